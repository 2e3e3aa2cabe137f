"""Low-rank adapters (Hu et al. 2021): a partition of the policy's tree.

A target matrix W [inputs, outputs] becomes W + alpha / rank * A B with A [inputs, rank] and B
[rank, outputs]; B starts at zero, so training starts at the policy itself. `partition` splits
an adapted policy into what is frozen and what is trained; joined (`parameters.join`) they are
one tree that `policy` runs, with x A B computed beside x W (`beside`, `matrices.Adapted`), and
gradients and optimizer state are of the adapters' size. `merged` adds them up, in float32, for
the engine and for export. A tree without adapters passes through both unchanged, so nobody
else has to know whether there are any. A tree that has some already (`adapted`: a policy that was
read from a folder of adapters) says by itself which they are (`of`), and `partition` goes on with
them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Adapted
from notepad_jax.model.parameters import Params, join, specs, without
from notepad_jax.parallel import mesh as meshes
from notepad_jax.parallel import place, rules

# Matrices that can be adapted.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
_IN, _OUT, _SCALE = "{}_lora_in", "{}_lora_out", "lora_scale"


@dataclasses.dataclass(frozen=True)
class Lora:
    """How a policy is adapted."""

    rank: int
    alpha: float  # the adapters' product is multiplied by alpha / rank
    targets: tuple[str, ...]  # of TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; adapters need at least 1")
        for name in self.targets:
            if name not in TARGETS:
                raise ValueError(f"lora.targets has {name!r}; there are {', '.join(TARGETS)}")
        if not self.targets:
            raise ValueError(f"lora.targets is empty; choose of {', '.join(TARGETS)}")


def init(config: PolicyConfig, lora: Lora, key: Array) -> Params:
    """Returns fresh float32 adapters: {"layers": {"q_lora_in": [L, D, r], ...}}.

    Raises:
      ValueError: the policy has no such matrix (a mixture of experts has no `gate`).
    """
    layers: dict[str, Array] = {}
    adapted = _adapted(config, lora)
    shapes = tuple(
        (config.layers, *(size for size, _ in inputs), lora.rank) for _, inputs, _ in adapted
    )
    for (name, inputs, outputs), drawn in zip(adapted, _normal(key, shapes), strict=True):
        layers[_IN.format(name)] = drawn * math.prod(size for size, _ in inputs) ** -0.5
        shape = (config.layers, lora.rank, *(size for size, _ in outputs))
        layers[_OUT.format(name)] = jnp.zeros(shape)
    return {"layers": layers}


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Draws all matrices in one program; each shape alone would be one to compile."""
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def layout(config: PolicyConfig, lora: Lora, mesh: Mesh) -> Params:
    """Returns where fresh adapters live: each factor is cut as its matrix is on that side."""
    layers: dict[str, Any] = {}
    for name, inputs, outputs in _adapted(config, lora):
        for leaf, sides in (
            (_IN, [*inputs, (lora.rank, None)]),
            (_OUT, [(lora.rank, None), *outputs]),
        ):
            sizes, axes = zip((config.layers, "layer"), *sides, strict=True)
            layers[leaf.format(name)] = rules.sharding(mesh, axes, sizes, rules.TRAINING)
    return {"layers": layers}


def _adapted(config: PolicyConfig, lora: Lora) -> list[tuple[str, list, list]]:
    """The targets with (size, logical axis) of each input and each output dimension."""
    known, found = specs(config)["layers"], []
    for name in lora.targets:
        if name not in known:
            raise ValueError(f"lora.targets has {name!r}, which this policy's layers do not have")
        _, *sides = zip(known[name].shape, known[name].axes, strict=True)
        split = len(known[name].inputs)
        found.append((name, sides[:split], sides[split:]))
    return found


def frozen(base: Params, scale: Any) -> Params:
    """Returns what of an adapted policy is not trained: the base and the adapters' `scale`."""
    return {**base, "layers": {**base["layers"], _SCALE: scale}}


def partition(
    config: PolicyConfig, params: Params, lora: Lora, key: Array
) -> tuple[Params, Params]:
    """Returns (frozen, trained), on the mesh of `params`: base and scale, and adapters.

    The adapters are those that `params` has, or fresh ones. Raises ValueError where it has others
    than `lora` asks for.
    """
    check(of(params), lora)
    if _SCALE in params["layers"]:
        base = plain(params)
        trained = {"layers": without(params, base)["layers"]}
        return frozen(base, trained["layers"].pop(_SCALE)), trained
    there = meshes.of(params)
    trained = place.commit(init(config, lora, key), layout(config, lora, there))
    return frozen(params, _scale(config, lora, there)), trained


def adapted(config: PolicyConfig, base: Params, lora: Lora, adapters: Params) -> Params:
    """Returns a policy with `adapters`, of the shapes of `init` and on the mesh of `base`."""
    return join(frozen(base, _scale(config, lora, meshes.of(base))), adapters)


def _scale(config: PolicyConfig, lora: Lora, there: Mesh) -> Array:
    scale = jnp.full((config.layers,), lora.alpha / lora.rank, jnp.float32)
    return place.commit(scale, place.replicated(there))


def of(params: Params) -> Lora | None:
    """Returns how a policy is adapted; None where it is not."""
    layers = params["layers"]
    if _SCALE not in layers:
        return None
    targets = tuple(name for name in TARGETS if _IN.format(name) in layers)
    rank = layers[_IN.format(targets[0])].shape[-1]
    scale = np.asarray(layers[_SCALE])  # device to host
    return Lora(rank, rank * float(scale[0]), targets)


def check(began: Lora | None, asked: Lora) -> None:
    """Raises ValueError unless the adapters that a policy `began` with are as `asked` for."""
    if began is None:
        return
    # A policy keeps alpha / rank, in float32.
    ours, theirs = (np.float32(one.alpha / one.rank) for one in (asked, began))
    if ours == theirs and asked.rank == began.rank and set(asked.targets) == set(began.targets):
        return
    raise ValueError(
        f"the policy has adapters with {_spelt(began)}, and the config asks for {_spelt(asked)}; "
        f"take over the first to go on with them, or train all weights (grpo.lora.rank=0)"
    )


def _spelt(lora: Lora) -> str:
    targets = tuple(name for name in TARGETS if name in lora.targets)
    said = {"rank": lora.rank, "alpha": f"{lora.alpha:g}", "targets": ",".join(targets)}
    return " ".join(f"grpo.lora.{key}={value}" for key, value in said.items())


def plain(params: Params) -> Params:
    """Returns a tree, of a policy or of one layer, without what belongs to adapters."""
    return {
        name: plain(leaf) if isinstance(leaf, Mapping) else leaf
        for name, leaf in params.items()
        if "lora_" not in name
    }


def beside(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one layer's parameters with every adapter in its matrix's place (`Adapted`)."""
    found = plain(layer)
    for name in TARGETS:
        if _IN.format(name) in layer:
            a, b = layer[_IN.format(name)], layer[_OUT.format(name)]
            found[name] = Adapted(layer[name], a, b, layer[_SCALE])
    return found


def merged(params: Params, dtype: str = "float32") -> Params:
    """Returns an adapted policy as ordinary parameters.

    What was adapted is summed in float32 and rounded once to `dtype`; float32 leaves that to
    whoever keeps it. All else is as it is, and so is a policy without adapters.
    """
    return _merged(params, dtype) if _SCALE in params["layers"] else params


def in_place(params: Params, dtype: str = "float32") -> Params:
    """Returns `merged` parameters with every matrix where it lies in `params`."""
    if _SCALE not in params["layers"]:
        return params
    where = jax.tree.map(lambda x: x.sharding, plain(params))
    return place.commit(merged(params, dtype), where)


@functools.partial(jax.jit, static_argnums=1)
def _merged(params: Params, dtype: str) -> Params:
    layers = beside(params["layers"])

    def one(matrix: Array, a: Array, b: Array, scale: Array) -> Array:
        product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), axes=1)
        return (matrix.astype(jnp.float32) + scale * product).astype(dtype)

    added = {
        name: jax.vmap(one)(leaf.matrix, leaf.a, leaf.b, leaf.scale)
        for name, leaf in layers.items()
        if isinstance(leaf, Adapted)
    }
    return {**params, "layers": {**layers, **added}}
