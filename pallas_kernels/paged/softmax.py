"""The online softmax of the decode and the mixed kernel, in VMEM scratch: peak, sum, output.

Base 2, as in the packed kernels; every lane of a row of `m_ref` and `l_ref` holds the same.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.tiles import online, wide

# A running maximum starts far above a hidden score and far below a real one: a query that has
# seen no key yet then gives hidden keys the weight exp2(HIDDEN - START) = 0, not exp2(0) = 1.
START = -1e20


def accumulate(
    s: Array, v: Array, m_ref: Any, l_ref: Any, acc_ref: Any, at: Any, v_scale: Array | None
) -> None:
    """One step of the online softmax: scores s [M, C] against values v [C, H], into `at`."""
    new = online(s, v, m_ref[at], l_ref[at], acc_ref[at], v_scale)
    m_ref[at], l_ref[at], acc_ref[at] = new


def as_queries(x: Array, dtype: Any) -> Array:
    """Keys or values as they meet queries; the integers of an int8 cache become floats."""
    return x.astype(dtype) if x.dtype == jnp.int8 else x


def scales_of(pages: list[Array]) -> Array | None:
    """Scales as rows: [] -> None; [[pages, 1, Z]] -> [1, pages * Z], in lanes as scores are."""
    if not pages:
        return None
    (scales,) = pages
    return jnp.concatenate([scales[p] for p in range(scales.shape[0])], axis=1)


def finite_scales(scales: Array, count: Any) -> Array:
    """Zeros scales from lane `count` on: what was never written may be NaN."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, scales.shape, 1) < count, scales, 0)


def first_rows(values: Array, count: Any) -> Array:
    """Zeros from row `count` on: slots that no query sees may hold NaN; 0 * NaN would spread."""
    seen = lax.broadcasted_iota(jnp.int32, values.shape, 0) < count
    return jnp.where(seen, values.astype(jnp.float32), 0).astype(values.dtype)


def reset(m_ref: Any, l_ref: Any, acc_ref: Any) -> None:
    m_ref[...] = jnp.full_like(m_ref, START)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def normalised(l_ref: Any, acc_ref: Any, at: Any) -> Array:
    """The softmax's output, acc / l; 0 for a query that saw no key (its acc is 0)."""
    total = l_ref[at]
    inverse = 1 / jnp.where(total == 0, 1, total)
    acc = acc_ref[at]
    return acc * wide(inverse, acc.shape[1])
