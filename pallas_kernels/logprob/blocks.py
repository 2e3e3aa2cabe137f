"""Shared by the three logprob kernels: the static setup, and the blocks of tokens and weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.logprob.sizes import ROWS, VMEM_LIMIT, Sizes
from pallas_kernels.tiles import LOG2E


@dataclasses.dataclass(frozen=True)
class Setup:
    """The static parameters of the kernels, fixed when they are compiled."""

    temperature: float
    valid_vocab: int  # of the whole vocabulary
    transposed: bool  # w is [V, D]
    axis_name: str | None
    sizes: Sizes
    dw_dtype: Any  # that of w before it was cast to x's
    interpret: Any

    @property
    def scale(self) -> float:
        """Softmax in base 2: exp(a / temperature) = exp2(a * scale)."""
        return LOG2E / self.temperature

    def vocab(self, w: Any) -> int:
        return w.shape[0 if self.transposed else 1]


def token_blocks(T: int, largest: int) -> tuple[int, int]:
    """(tokens a block, tokens in all): evenly split, rounded up to whole matrix products."""
    blocks = pl.cdiv(T, largest)
    each = pl.cdiv(T, blocks)
    step = 16 if each <= ROWS else ROWS
    each = pl.cdiv(each, step) * step
    return each, blocks * each


def pad(a: Array, length: int) -> Array:
    return jnp.pad(a, ((0, length - a.shape[0]), (0, 0))) if length > a.shape[0] else a


def bounds_of(setup: Setup, w: Array) -> Int[Array, " 2"]:
    """This shard's first id, and where its valid ids end (maybe before they begin)."""
    V = setup.vocab(w)
    first = 0 if setup.axis_name is None else lax.axis_index(setup.axis_name) * V
    return jnp.stack([jnp.int32(first), jnp.minimum(first + V, setup.valid_vocab)])


def weight_spec(setup: Setup, D: int, size: int, vocab_block: Any) -> pl.BlockSpec:
    if setup.transposed:
        return pl.BlockSpec((size, D), lambda *grid: (vocab_block(*grid), 0))
    return pl.BlockSpec((D, size), lambda *grid: (0, vocab_block(*grid)))


def like(shape: tuple[int, ...], dtype: Any, a: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(a).manual_axis_type)


def compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        # The outer axis owns its accumulators, so v5p's two cores may share it.
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=VMEM_LIMIT,
        disable_bounds_checks=True,  # every address below is static or made by a BlockSpec
    )


def row_slices(tokens: int) -> list[Any]:
    rows = min(tokens, ROWS)
    return [pl.ds(start, rows) for start in range(0, tokens, rows)]


def varying(a: Array) -> frozenset[str]:
    """The mesh axes over which shard_map knows `a` to differ; none outside of shard_map."""
    return frozenset(jax.typeof(a).manual_axis_type.varying)


def vary(a: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - varying(a)))
    return lax.pcast(a, missing, to="varying") if missing else a
