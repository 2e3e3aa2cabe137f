"""The online softmax of the decode and the mixed kernel, in VMEM scratch: peak, sum, output.

Base 2, as in the packed kernels; every lane of a row of `m_ref` and `l_ref` holds the same.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.tiles import dot, wide

# A running maximum starts far above a masked score and far below a real one: a query that has
# seen no key yet then gives masked keys the weight exp2(MASK - START) = 0, not exp2(0) = 1.
START, MASK = -1e20, -1e30


def online(s: Array, v: Array, m_ref: Any, l_ref: Any, acc_ref: Any, at: Any) -> None:
    """One step of the online softmax, base 2: scores s [M, C] against values v [C, H]."""
    m_old = m_ref[at]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - wide(m_new, s.shape[1]))
    keep = jnp.exp2(m_old - m_new)
    l_ref[at] = keep * l_ref[at] + p.sum(axis=1, keepdims=True)
    m_ref[at] = m_new
    pv = dot(p.astype(v.dtype), v, 1, 0)
    acc_ref[at] = wide(keep, pv.shape[1]) * acc_ref[at] + pv


def reset(m_ref: Any, l_ref: Any, acc_ref: Any) -> None:
    m_ref[...] = jnp.full_like(m_ref, START)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def normalised(l_ref: Any, acc_ref: Any, at: Any) -> Array:
    """acc / l; 0 for a query that saw no key (its acc is 0)."""
    total = l_ref[at]
    inverse = 1 / jnp.where(total == 0, 1, total)
    acc = acc_ref[at]
    return acc * wide(inverse, acc.shape[1])
