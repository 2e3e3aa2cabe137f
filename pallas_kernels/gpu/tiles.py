"""Shared by the GPU kernels: what a product takes, operands that are whole, the online softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.tiles import HIDDEN, dot


def power_of_two(count: int) -> int:
    """The least power of two that is `count` or more, and 16 or more: what a product takes."""
    return max(16, pl.next_power_of_2(count))


def whole(x: Array) -> pl.BlockSpec:
    """All of an array, for every program."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


State = tuple[Array, Array, Array]  # of queries: maximum and sum [M], weighted values [M, H]


def nothing_yet(queries: int, width: int) -> State:
    """What queries have seen before their first key."""
    return (
        jnp.full(queries, HIDDEN, jnp.float32),
        jnp.zeros(queries, jnp.float32),
        jnp.zeros((queries, width), jnp.float32),
    )


def online(scores: Array, v: Array, state: State) -> State:
    """One step of the online softmax, base 2: scores [M, C], some `HIDDEN`, and values v [C, H].

    A query that sees nothing yet has peak -1e30 and weights 1: nonsense that its first visible
    key wipes with a factor exp2(-1e30).
    """
    peak, total, acc = state
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    weights = jnp.exp2(scores - new_peak[:, None])
    keep = jnp.exp2(peak - new_peak)
    acc = acc * keep[:, None] + dot(weights.astype(v.dtype), v, 1, 0)
    return new_peak, total * keep + weights.sum(axis=1), acc
