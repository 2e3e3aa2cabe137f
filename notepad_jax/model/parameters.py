"""The policy's parameter specs: shape, logical axes and initial scale of each, declared once.

`specs(config)` is the single list of a policy's parameters. Initial values, shardings
(`parallel.mesh` maps the logical axes to mesh axes), abstract targets for restoring a
checkpoint or for adopting it as an engine does, and the Hugging Face name table all read it.
Leaves under "layers" are stacked: their first axis is the layer, and the forward pass scans
over it. `unstacked` takes matrices apart for an engine whose device reads them faster so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Quantized, Unstacked
from notepad_jax.parallel import place
from notepad_jax.parallel.mesh import sharding, trimmed

Params = Any  # nested dict of arrays; an engine's may hold `Quantized` or `Unstacked` matrices

ROLLOUT_DTYPES = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A parameter's shape, logical axes, and the standard deviation of its initial value.

    `scale` 0 means a constant: ones for norms, zeros for biases (`fill`). `inputs` are the
    axes that a product with a layer's matrix sums over; what has none is no such matrix.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float
    fill: float = 0.0
    inputs: tuple[int, ...] = ()


def specs(config: PolicyConfig) -> dict[str, Any]:
    """Returns the tree of `Spec`s of `config`'s parameters."""
    c = config
    L, D, N, K, H, F = c.layers, c.width, c.heads, c.kv_heads, c.head_size, c.feed_forward
    layers: dict[str, Spec] = {
        "attn_norm": Spec((L, D), ("layer", None), 0.0, 1.0),
        "q": Spec((L, D, N, H), ("layer", "embed", "heads", None), D**-0.5, inputs=(1,)),
        "k": Spec((L, D, K, H), ("layer", "embed", "kv_heads", None), D**-0.5, inputs=(1,)),
        "v": Spec((L, D, K, H), ("layer", "embed", "kv_heads", None), D**-0.5, inputs=(1,)),
        "o": Spec((L, N, H, D), ("layer", "heads", None, "embed"), (N * H) ** -0.5, inputs=(1, 2)),
        "mlp_norm": Spec((L, D), ("layer", None), 0.0, 1.0),
    }
    if c.experts is None:
        layers["gate"] = Spec((L, D, F), ("layer", "embed", "mlp"), D**-0.5, inputs=(1,))
        layers["up"] = Spec((L, D, F), ("layer", "embed", "mlp"), D**-0.5, inputs=(1,))
        layers["down"] = Spec((L, F, D), ("layer", "mlp", "embed"), F**-0.5, inputs=(1,))
    else:  # an expert is small: experts are spread over devices, none is cut
        E, F = c.experts.count, c.experts.feed_forward
        inwards, outwards = ("layer", "expert", "embed", None), ("layer", "expert", None, "embed")
        layers["router"] = Spec((L, D, E), ("layer", "embed", None), D**-0.5)
        layers["expert_gate"] = Spec((L, E, D, F), inwards, D**-0.5, inputs=(2,))
        layers["expert_up"] = Spec((L, E, D, F), inwards, D**-0.5, inputs=(2,))
        layers["expert_down"] = Spec((L, E, F, D), outwards, F**-0.5, inputs=(2,))
    if c.qk_norm:
        layers["q_norm"] = Spec((L, H), ("layer", None), 0.0, 1.0)
        layers["k_norm"] = Spec((L, H), ("layer", None), 0.0, 1.0)
    if c.attention_bias:
        layers["q_bias"] = Spec((L, N, H), ("layer", "heads", None), 0.0)
        layers["k_bias"] = Spec((L, K, H), ("layer", "kv_heads", None), 0.0)
        layers["v_bias"] = Spec((L, K, H), ("layer", "kv_heads", None), 0.0)
    if c.output_bias:
        layers["o_bias"] = Spec((L, D), ("layer", None), 0.0)
    tree: dict[str, Any] = {
        "embed": Spec((c.vocab_size, D), ("vocab", "embed"), 0.02),
        "layers": layers,
        "final_norm": Spec((D,), (None,), 0.0, 1.0),
    }
    if not c.tied_embeddings:
        tree["unembed"] = Spec((D, c.vocab_size), ("embed", "vocab"), D**-0.5)
    return tree


def map_specs(function: Callable[[Spec], Any], config: PolicyConfig) -> dict[str, Any]:
    """Applies `function` to every spec; the result has the parameters' tree structure."""
    return jax.tree.map(function, specs(config), is_leaf=lambda x: isinstance(x, Spec))


def init_params(config: PolicyConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Draws initial parameters, on the first device.

    Each leaf has its own key, so adding a leaf moves no other.
    """
    with_path, tree = jax.tree.flatten_with_path(
        specs(config), is_leaf=lambda x: isinstance(x, Spec)
    )

    def leaf(path: Any, spec: Spec) -> jax.Array:
        if spec.scale == 0.0:
            return jnp.full(spec.shape, spec.fill, dtype)
        name = jax.tree_util.keystr(path)
        folded = jax.random.fold_in(key, sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
        return (spec.scale * jax.random.normal(folded, spec.shape)).astype(dtype)

    return place.commit(jax.tree.unflatten(tree, [leaf(path, spec) for path, spec in with_path]))


def abstract_params(config: PolicyConfig, dtype: str = "float32") -> Params:
    """Returns the parameters' shapes and dtypes without making them."""
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)), config)


def count(config: PolicyConfig) -> int:
    """Returns the number of parameters."""
    leaves = jax.tree.leaves(abstract_params(config))
    return sum(int(leaf.size) for leaf in leaves)


def join(*partitions: Params) -> Params:
    """Returns one tree of the leaves of several; of two leaves at a path the last one stands."""
    whole: dict[str, Any] = {}
    for part in partitions:
        for name, leaf in part.items():
            whole[name] = join(whole.get(name, {}), leaf) if isinstance(leaf, Mapping) else leaf
    return whole


def without(params: Params, others: Params) -> Params:
    """Returns the leaves of `params` that have no namesake in `others`."""
    left = {
        name: without(leaf, others.get(name, {})) if isinstance(leaf, Mapping) else leaf
        for name, leaf in params.items()
        if isinstance(leaf, Mapping) or name not in others
    }
    return {name: leaf for name, leaf in left.items() if not isinstance(leaf, Mapping) or leaf}


def shardings(
    config: PolicyConfig, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None]
) -> Any:
    """Returns the tree of shardings of the parameters on `mesh` under a table of rules."""
    return map_specs(lambda s: sharding(mesh, s.axes, s.shape, rules), config)


def rollout_target(config: PolicyConfig, params: Params, dtype: str) -> Params:
    """Returns the abstract tree that an engine with weights in `dtype` asks a hand-off for.

    "int8" quantises the layers' matrices; embeddings, norms, biases and routers are bfloat16
    then. `params` are arrays or `jax.ShapeDtypeStruct`s: every leaf keeps their shape and
    place, and a scale is split as its matrix's output axes are. Raises ValueError for
    another dtype than `ROLLOUT_DTYPES`.
    """
    if dtype not in ROLLOUT_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(ROLLOUT_DTYPES)}")

    def leaf(spec: Spec, like: Any) -> jax.ShapeDtypeStruct | Quantized:
        if dtype != "int8" or not spec.inputs:
            kept = "bfloat16" if dtype == "int8" else dtype
            return jax.ShapeDtypeStruct(like.shape, kept, sharding=like.sharding)
        shape = tuple(1 if i in spec.inputs else n for i, n in enumerate(like.shape))
        whole = _undivided(like.sharding, spec.inputs)
        return Quantized(
            values=jax.ShapeDtypeStruct(like.shape, "int8", sharding=like.sharding),
            scale=jax.ShapeDtypeStruct(shape, "float32", sharding=whole),
        )

    return jax.tree.map(leaf, specs(config), params, is_leaf=lambda x: isinstance(x, Spec))


def unstacked(
    config: PolicyConfig, params: Params, of: Callable[[str, Any], Unstacked] | None = None
) -> Params:
    """Returns `params` with the layers' matrices `Unstacked`.

    Those that are multiplied as they lie: a stack that is cast or made of int8 is written anew
    for every product anyway, and a mixture's experts are met by one grouped product. Leaves are
    arrays on one device or `jax.ShapeDtypeStruct`s; `of` takes a leaf apart, `place.entries` unless
    told otherwise.
    """
    layers = dict(params["layers"])
    of = of or (lambda _, leaf: Unstacked(tuple(place.entries(leaf))))
    for name, spec in specs(config)["layers"].items():
        leaf, plain = layers[name], spec.inputs and "expert" not in spec.axes
        if plain and not isinstance(leaf, Quantized) and leaf.dtype == jnp.dtype(config.dtype):
            layers[name] = of(name, leaf)
    return {**params, "layers": layers}


def _undivided(sharding: Any, axes: tuple[int, ...]) -> Any:
    """Returns `sharding` with `axes` on every device whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = [None if i in axes else name for i, name in enumerate(sharding.spec)]
    return NamedSharding(sharding.mesh, trimmed(spec))
