"""Low-rank adapters (Hu et al. 2021): a partition of the policy's tree.

A target matrix W [inputs, outputs] becomes W + alpha / rank * A B with A [inputs, rank] and B
[rank, outputs]; B starts at zero, so training starts at the policy itself. `partition` splits
an adapted policy into what is frozen and what is trained; joined (`parameters.join`) they are
one tree that `policy` runs, with x A B computed beside x W (`beside`, `matrices.Adapted`), and
gradients and optimizer state are of the adapters' size. `merged` adds them up, in float32, for
the engine and for export. A tree without adapters passes through both unchanged, so nobody
else has to know whether there are any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Adapted
from notepad_jax.model.parameters import Params, specs
from notepad_jax.parallel import place

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
    sizes = specs(config)["layers"]
    layers: dict[str, Array] = {}
    for name, subkey in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        if name not in sizes:
            raise ValueError(f"lora.targets has {name!r}, which this policy's layers do not have")
        layer, *axes = sizes[name].shape
        split = len(sizes[name].inputs)
        inputs, outputs = axes[:split], axes[split:]
        fan_in = math.prod(inputs)
        shape = (layer, *inputs, lora.rank)
        layers[_IN.format(name)] = jax.random.normal(subkey, shape) * fan_in**-0.5
        layers[_OUT.format(name)] = jnp.zeros((layer, lora.rank, *outputs))
    return place.commit({"layers": layers})


def partition(config: PolicyConfig, base: Params, lora: Lora, key: Array) -> tuple[Params, Params]:
    """Returns (frozen, trained): the base with the adapters' scale, and fresh adapters."""
    scale = place.commit(jnp.full((config.layers,), lora.alpha / lora.rank, jnp.float32))
    frozen = {**base, "layers": {**base["layers"], _SCALE: scale}}
    return frozen, init(config, lora, key)


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


def merged(params: Params) -> Params:
    """Returns an adapted policy as ordinary parameters.

    What was adapted is float32, for whoever keeps it to round once; all else is as it is, and so
    is a policy without adapters.
    """
    return _merged(params) if _SCALE in params["layers"] else params


@jax.jit
def _merged(params: Params) -> Params:
    layers = beside(params["layers"])

    def one(matrix: Array, a: Array, b: Array, scale: Array) -> Array:
        product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), axes=1)
        return matrix.astype(jnp.float32) + scale * product

    added = {
        name: jax.vmap(one)(leaf.matrix, leaf.a, leaf.b, leaf.scale)
        for name, leaf in layers.items()
        if isinstance(leaf, Adapted)
    }
    return {**params, "layers": {**layers, **added}}
