"""Restore targets: trees of shapes, dtypes and shardings, and weights resharded into them.

A target is a tree of `jax.ShapeDtypeStruct`s (or of arrays); a leaf with no sharding goes to this
process's first device, and in the place of a matrix that is to be quantised stands a `Quantized` of
two of them. Out of a tree with another owner weights come by `carry` and `share`, a few layers
at a time: cast where they lie, laid out anew, and compared there with what left. What was read for
this purpose is compared as it was published, and then cast (`cast`). Neighbours above: `restore`,
`handoff`, `training_state`.
"""

from __future__ import annotations

import functools
import math
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
    """Returns `abstract` with the shardings of the tree `shardings`.

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


AT_ONCE = 1 << 28  # bytes of a leaf that travel together, as published; at least a layer


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _formed(
    leaf: Array, first: Any, count: int, dtype: Any, inputs: tuple[int, ...] | None
) -> Any:  # fmt: skip
    """`count` entries of the leading axis, cast, or quantised over the axes `inputs`."""
    part = jax.lax.dynamic_slice_in_dim(leaf, first, count) if leaf.ndim else leaf
    return part.astype(dtype) if inputs is None else quantize(part, inputs)


def _in_form(leaf: Array, wanted: Any, first: int = 0, count: int | None = None) -> Any:
    """`count` entries from `first` on (all) as `wanted`, on the devices where they are."""
    count = _entries(leaf) if count is None else count
    if isinstance(wanted, Quantized):
        inputs = tuple(axis for axis, size in enumerate(wanted.scale.shape) if size == 1)
        return _formed(leaf, first, count, None, inputs)
    if leaf.dtype == wanted.dtype and count == _entries(leaf):
        return leaf
    return _formed(leaf, first, count, wanted.dtype, None)


def _entries(leaf: Any) -> int:
    return leaf.shape[0] if leaf.ndim else 1


def at_once(leaf: Any) -> int:
    """Returns how many entries of a leaf's leading axis travel together: layers, of matrices.

    As many as divide them all and are at most `AT_ONCE` bytes; what has no layers travels whole.
    """
    count = _entries(leaf)
    if leaf.ndim < 3:
        return count
    most = max(1, AT_ONCE * count // (math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize))
    return max(size for size in range(1, count + 1) if count % size == 0 and size <= most)


def cast(params: Any, target: Any) -> Any:
    """Returns `params` in the dtypes of `target`, quantised where `target` is.

    `params` lie where `as_published(target)` says. One leaf is cast at a time and then let
    go, so where nothing else holds `params` the devices never hold both policies whole.
    """
    leaves, tree = jax.tree.flatten(params)
    del params
    for i, wanted in enumerate(tree.flatten_up_to(target)):
        made = _in_form(leaves[i], wanted)
        leaves[i] = jax.device_put(made, jax.tree.map(lambda x: x.sharding, wanted))
    return jax.tree.unflatten(tree, leaves)


def narrowed(params: Any, target: Any) -> Any:
    """Returns `params` where they lie, each leaf in the dtype of `target` if that has fewer bits.

    What `target` quantises stays as it is: its scales are made of what the masters say.
    """

    def leaf(wanted: Any, x: Array) -> Array:
        plain = not isinstance(wanted, Quantized) and jnp.issubdtype(x.dtype, jnp.floating)
        fewer = plain and jnp.dtype(wanted.dtype).itemsize < x.dtype.itemsize
        return x.astype(wanted.dtype) if fewer else x

    return jax.tree.map(leaf, target, params, is_leaf=lambda x: isinstance(x, Quantized))


def carry(params: Any, target: Any, where: str) -> Any:
    """Returns a resharded copy of `params` in the dtypes of `target`, which owns its buffers.

    So `params` may be donated afterwards. A few layers of a leaf travel at a time (`at_once`):
    cast where they lie, so that what crosses is no more than what arrives, and put in their place
    in the copy; beside copy and original the devices hold those layers alone. Their checksums are
    made on either side. `target` is complete (`placed`) and has the shapes of `params`. Raises
    HandoffError, starting with `where`.
    """
    return _arrived(params, target, where, owned=True)


def share(params: Any, target: Any, where: str) -> Any:
    """Reshards leaves that are never donated, as `carry` does.

    What is asked for as it is, where it is, takes no memory: it shares buffers with `params`.
    """
    return _arrived(params, target, where, owned=False)


def _arrived(params: Any, target: Any, where: str, owned: bool) -> Any:
    def one(name: str, leaf: Array, wanted: Any) -> Any:
        count, size = _entries(leaf), at_once(leaf)
        as_it_is = not isinstance(wanted, Quantized) and leaf.dtype == wanted.dtype
        if size == count or (as_it_is and not owned):
            made = _travelled(name, _in_form(leaf, wanted), wanted, where)  # may share buffers
            return jnp.copy(made) if as_it_is and owned else made
        made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), wanted)
        for first in range(0, count, size):  # nothing here holds what has travelled
            made = jax.tree.map(
                functools.partial(_put, first=first),
                made,
                _travelled(name, _in_form(leaf, wanted, first, size), wanted, where),
            )
        return made

    tree = jax.tree.structure(params)
    pairs = zip(named_leaves(params).items(), tree.flatten_up_to(target), strict=True)
    return tree.unflatten(
        [jax.block_until_ready(one(name, leaf, wanted)) for (name, leaf), wanted in pairs]
    )


def _travelled(name: str, part: Any, wanted: Any, where: str) -> Any:
    """A part of leaf `name` where `wanted` says, after a look at whether it arrived."""
    there = jax.tree.map(lambda x, like: place.laid(x, like.sharding), part, wanted)
    compare(leaf_checksums({name: part}), leaf_checksums({name: there}), where)
    return there


def _put(whole: Array, part: Array, first: int) -> Array:
    return _put_in(whole, part, first, whole.sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _put_in(whole: Array, part: Array, first: Any, sharding: Any) -> Array:
    whole = jax.lax.dynamic_update_slice_in_dim(whole, part, first, 0)
    return jax.lax.with_sharding_constraint(whole, sharding)


def abstract(tree: Any) -> Any:
    """Returns shapes, dtypes and shardings of a tree of arrays: a target for `restore`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
