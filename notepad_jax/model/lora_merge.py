"""LoRA merging: adapters added into the matrices that they lie beside.

For runs that train all weights on from there, for exports, and for engines that compute in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.lora import SCALE, beside, factors, frozen, of_several, plain
from notepad_jax.model.matrices import Adapted, Quantized
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


def exact(config: PolicyConfig, params: Params) -> dict[str, Adapted]:
    """Returns the adapted matrices of a policy, arrays or abstract, if `merged` loses nothing.

    In float32 the sum rounds as the products would. A base in bfloat16 or int8, or one that is
    cast to bfloat16, swallows what adapters add, and those of several policies stay for tokens to
    choose: then there are none.
    """
    if SCALE not in params["layers"] or of_several(params) or config.dtype != "float32":
        return {}
    found = _adapted(params)
    bases = [leaf.matrix for leaf in found.values()]
    whole = all(not isinstance(x, Quantized) and x.dtype == jnp.float32 for x in bases)
    return found if whole else {}


def _adapted(params: Params) -> dict[str, Adapted]:
    layers = beside(params["layers"])
    return {name: leaf for name, leaf in layers.items() if isinstance(leaf, Adapted)}


@jax.jit
def _merged(params: Params) -> Params:

    def one(matrix: Array, a: Array, b: Array, scale: Array) -> Array:
        product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), axes=1)
        return matrix.astype(jnp.float32) + scale * product

    added = {
        name: jax.vmap(one)(leaf.matrix, leaf.a, leaf.b, leaf.scale)
        for name, leaf in _adapted(params).items()
    }
    return {**params, "layers": {**plain(params["layers"]), **added}}
