"""Low-rank adapters (Hu et al. 2021): a small tree that is trained in place of the parameters.

A target matrix W [inputs, outputs] becomes W + alpha / rank * A B with A [inputs, rank] and B
[rank, outputs]; B starts at zero, so training starts at the policy itself. The sum is made one
layer at a time inside the scan over layers (`merged`, called by `policy`), forward and in the
rematerialised backward, so no second copy of all weights exists: gradients and optimizer state
are of the adapters' size. `whole` makes the sum for all layers, for the engine and for export.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params, specs

# Matrices that can be adapted.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
_IN, _OUT = "{}_lora_in", "{}_lora_out"


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
    return {"layers": layers}


def attach(lora: Lora, base: Params, adapters: Params) -> Params:
    """Returns `base` with the adapters beside its matrices, as `policy` takes them."""
    scale = lora.alpha / lora.rank
    scaled = {
        name: leaf * scale if name.endswith(_OUT.format("")) else leaf
        for name, leaf in adapters["layers"].items()
    }
    return {**base, "layers": {**base["layers"], **scaled}}


def merged(layer: Mapping[str, Array]) -> dict[str, Array]:
    """Returns one layer's parameters with its adapters, if there are any, added in."""
    plain = {name: leaf for name, leaf in layer.items() if "_lora_" not in name}
    for name in TARGETS:
        if _IN.format(name) in layer:
            product = jnp.tensordot(layer[_IN.format(name)], layer[_OUT.format(name)], axes=1)
            plain[name] = layer[name] + product.astype(layer[name].dtype)
    return plain


@functools.partial(jax.jit, static_argnames="lora")
def whole(lora: Lora, base: Params, adapters: Params) -> Params:
    """Returns the adapted policy as ordinary parameters, in base's dtypes and shapes."""
    params = attach(lora, base, adapters)
    return {**params, "layers": jax.vmap(merged)(params["layers"])}
