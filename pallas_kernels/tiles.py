"""Shared by all kernels: tiles of 128 lanes, exact products, a step of the online softmax.

Below everything else here; the jnp twins (`reference`) take from it the score of a hidden key, what
their derivatives have in common with the kernels', and what remat keeps of packed attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

LANES = 128
HIDDEN = -1e30  # the score of what must not count: finite, so that differences stay finite
LOG2E = math.log2(math.e)
LN2 = math.log(2)
_KEPT = "packed_attention"
# For `jax.checkpoint(layer, policy=SAVE_ATTENTION)`: a layer keeps attention's outputs and their
# logsumexps, all that its backward needs beside queries, keys and values, which projections make
# again. Without them a layer's backward would run attention's forward kernel once more. They cost
# as much memory as the layer's input, for what grows with the square of a row.
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(_KEPT)


def dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """The product of two matrices over the given axes, summed in float32.

    float32 operands would otherwise be rounded to bfloat16 on their way into the MXU.
    """
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def wide(x: Array, width: int) -> Array:
    """Broadcasts [rows, 128] of equal lanes to [rows, width] of equal lanes."""
    return x[:, :width] if width <= LANES else jnp.tile(x, (1, width // LANES))


def each(*bounds: Any) -> Callable[[Callable[[Array], None]], None]:
    """Decorates a body that runs for every i of `range(*bounds)`; a kernel's loop without a state.

    The bounds may be traced.
    """
    low, high = (0, *bounds)[-2:]

    def loop(body: Callable[[Array], None]) -> None:
        jax.lax.fori_loop(low, high, lambda i, _: body(i), None)

    return loop


def online(
    s: Array, v: Array, peak: Array, total: Array, acc: Array, v_scale: Array | None = None
) -> tuple[Array, Array, Array]:
    """One step of the online softmax, base 2: scores s [M, C] against values v [C, H].

    `peak` and `total` [M, 128] are the running maximum and sum of each row, in every lane, `acc`
    [M, H] is its weighted sum of values, not yet divided by the total. Returns all three anew.
    `v_scale` [1, C] multiplies the values, if they have scales.
    """
    new_peak = jnp.maximum(peak, s.max(axis=1, keepdims=True))
    weights = jnp.exp2(s - wide(new_peak, s.shape[1]))
    keep = jnp.exp2(peak - new_peak)
    total = keep * total + weights.sum(axis=1, keepdims=True)
    weights = weights if v_scale is None else weights * v_scale
    acc = wide(keep, v.shape[1]) * acc + dot(weights.astype(v.dtype), v, 1, 0)
    return new_peak, total, acc


def kept(out: Array, lse: Array) -> tuple[Array, Array]:
    """Names what `SAVE_ATTENTION` keeps; the results must be both residuals and outputs."""
    return checkpoint_name(out, _KEPT), checkpoint_name(lse, _KEPT)


def delta_of(d_out: Array, out: Array, d_lse: Array) -> Array:
    """What attention's derivative subtracts in a query, float32 [...]: d_out . out - d_lse.

    A score's derivative is weight * (d_out . v - delta); outputs are [..., H].
    """
    return jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse


def no_gradient(tree: Any) -> Any:
    """The cotangent of integers, which is what a mask or a schedule consists of."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
