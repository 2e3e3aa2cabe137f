"""LoRA merging: adapters added into the matrices that they lie beside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from notepad_jax.model.lora import SCALE, beside, factors, frozen, plain
from notepad_jax.model.matrices import Adapted
from notepad_jax.model.parameters import Params
from notepad_jax.parallel import place


def alone(params: Params) -> Params:
    """Returns a policy's adapters and their scale, without the base: what `several` looks at."""
    return frozen(factors(params), params["layers"][SCALE])


def merged(params: Params) -> Params:
    """Returns an adapted policy merged into ordinary parameters, summed in float32.

    All else is as it is, and so is a policy without adapters.
    """
    return _merged(params) if SCALE in params["layers"] else params


def in_place(params: Params) -> Params:
    """Returns `merged` parameters with every matrix where it lies in `params`."""
    if SCALE not in params["layers"]:
        return params
    where = jax.tree.map(lambda x: x.sharding, plain(params))
    return place.commit(merged(params), where)


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
