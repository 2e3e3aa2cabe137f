"""What a reader of weights asks for: shapes, dtypes and places, and weights put into them.

A target is a tree of `jax.ShapeDtypeStruct`s (or of arrays); a leaf with no sharding goes to
this process's first device, and in the place of a matrix that is to be quantised stands a
`Quantized` of two of them. Weights are compared with their checksums as they were published, in
their new place, and only then cast: by `carry` and `share` leaf by leaf out of a tree that
somebody else owns, by `cast` out of one that was read for this purpose. Neighbours above: `steps`,
`handoff`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from notepad_jax.checkpoint.checksums import (
    HandoffError,
    compare,
    leaf_checksums,
    named_leaves,
)
from notepad_jax.model.matrices import Quantized, quantize
from notepad_jax.parallel import place


def placed(abstract: Any, shardings: Any = None) -> Any:
    """Returns `abstract` in the places that `shardings`, a tree, names.

    Without it leaves stay where they say, or go to this process's first device.
    """
    default = place.first_device()

    def leaf(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    if shardings is None:  # numpy arrays have none
        shardings = jax.tree.map(lambda x: getattr(x, "sharding", None) or default, abstract)
    return jax.tree.map(leaf, abstract, shardings)


def check_shapes(saved: Any, wanted: Any, where: str) -> None:
    """Raises HandoffError where the trees' leaf names or shapes differ."""
    have, want = named_leaves(saved), named_leaves(wanted)
    for name in sorted(set(have) | set(want)):
        if name not in have:
            raise HandoffError(f"{where} has no leaf {name!r}, which the policy needs")
        if name not in want:
            raise HandoffError(f"{where} has a leaf {name!r}, which the policy does not know")
        if tuple(have[name].shape) != tuple(want[name].shape):
            raise HandoffError(
                f"{where}: leaf {name!r} has shape {tuple(have[name].shape)}, the policy needs "
                f"{tuple(want[name].shape)}; the two were built from different model configs"
            )


def as_published(target: Any) -> Any:
    """Returns `target` without quantisation: shapes and places as weights are published."""
    return jax.tree.map(
        lambda x: x.values if isinstance(x, Quantized) else x,
        target,
        is_leaf=lambda x: isinstance(x, Quantized),
    )


_quantize = jax.jit(quantize, static_argnums=1)


def _in_form(leaf: Array, wanted: Any) -> Any:
    if not isinstance(wanted, Quantized):
        return leaf if leaf.dtype == wanted.dtype else leaf.astype(wanted.dtype)
    inputs = tuple(axis for axis, size in enumerate(wanted.scale.shape) if size == 1)
    return jax.device_put(_quantize(leaf, inputs), jax.tree.map(lambda x: x.sharding, wanted))


def cast(params: Any, target: Any) -> Any:
    """Returns `params` in the dtypes of `target`, quantised where `target` is.

    `params` lie where `as_published(target)` says. One leaf is cast at a time and then let
    go, so where nobody else holds `params` the devices never hold both policies whole.
    """
    leaves, tree = jax.tree.flatten(params)
    del params
    for i, wanted in enumerate(tree.flatten_up_to(target)):
        leaves[i] = _in_form(leaves[i], wanted)
    return jax.tree.unflatten(tree, leaves)


def carry(params: Any, published: Mapping[str, str], target: Any, where: str) -> Any:
    """Returns a copy of `params` in the places and dtypes of `target`, which owns its buffers.

    So `params` may be donated afterwards. One leaf travels at a time: it is laid out anew,
    compared with its checksum in `published`, cast, and let go; beside copy and original the
    devices hold that leaf alone. `target` is complete (`placed`) and has the shapes of
    `params`. Raises HandoffError, starting with `where`.
    """

    def owned(laid: Array, made: Any) -> Any:
        return jnp.copy(made) if made is laid else made

    return _arrived(params, published, target, where, owned)


def share(params: Any, published: Mapping[str, str], target: Any, where: str) -> Any:
    """As `carry`, of leaves that nobody ever donates.

    What is asked for as it is, where it is, takes no memory: it shares buffers with `params`.
    """
    return _arrived(params, published, target, where, lambda laid, made: made)


def _arrived(
    params: Any, published: Mapping[str, str], target: Any, where: str,
    kept: Callable[[Array, Any], Any],
) -> Any:  # fmt: skip
    """`params` in the form of `target`; `kept` is given each leaf as it was laid out and cast."""

    def one(name: str, leaf: Array, wanted: Any) -> Any:
        plain = as_published(wanted)
        laid = place.laid(leaf, plain.sharding)  # may share buffers with `leaf`
        compare({name: published[name]}, leaf_checksums({name: laid}), where)
        return jax.block_until_ready(kept(laid, _in_form(laid, wanted)))

    tree = jax.tree.structure(params)
    pairs = zip(named_leaves(params).items(), tree.flatten_up_to(target), strict=True)
    return tree.unflatten([one(name, leaf, wanted) for (name, leaf), wanted in pairs])


def abstract(tree: Any) -> Any:
    """Returns shapes, dtypes and shardings of a tree of arrays: a target for `restore`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
