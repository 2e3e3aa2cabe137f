"""Shared by the two packed kernels: the grid over a block list, and the mask within a block.

A kernel is a `pallas_call` over the entries of a list (`call_over`), with the list's tables in
scalar memory; one step serves several query heads (`heads_per_step`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.interpret import Interpret, interpret_mode
from pallas_kernels.schedule import PARTIAL, Schedule
from pallas_kernels.tiles import HIDDEN, LANES, LOG2E, each, wide

A_BT = (1, 1)  # the axes that a @ b.T contracts
A_B = (1, 0)
AT_B = (0, 0)

# Scores, weights and their gradients are float32 blocks: the compiler's default of 16 MiB is
# too little for blocks of 1,024. Every chip has at least 64 MiB.
_VMEM_BYTES = 48 * 2**20


def heads_per_step(q_heads: int, kv_heads: int) -> tuple[int, int]:
    """Query heads that one step serves, and steps per kv head.

    All heads of a group meet a key block while it is in VMEM: it is fetched once for them,
    and a step's bookkeeping (some 200 cycles) is paid once. 8 heads' accumulators fit.
    """
    group = q_heads // kv_heads
    heads = max(n for n in range(1, 9) if group % n == 0)
    return heads, group // heads


class Walk(NamedTuple):
    """The grid (kv heads, steps a kv head, entries), and where in it operands lie."""

    grid: tuple[Any, ...]
    queries: pl.BlockSpec  # [N, T, H]: those of the step's heads
    keys: pl.BlockSpec  # [K, S, H]
    bounds: pl.BlockSpec  # [1 or 2, S]: see `bounds`
    query_block: Callable  # the index of a block of [N, numbers, T]
    position: list[pl.BlockSpec]  # [1, T] if there is a window


def walk_by_query(schedule: Schedule, q_heads: int, kv_heads: int, head_size: int) -> Walk:
    heads, steps = heads_per_step(q_heads, kv_heads)
    bq, bk = schedule.q_size, schedule.k_size
    return Walk(
        (kv_heads, steps, schedule.count),
        pl.BlockSpec(
            (heads, bq, head_size), lambda k, g, e, q_block, *_: (k * steps + g, q_block[e], 0)
        ),
        pl.BlockSpec(
            (None, bk, head_size), lambda k, g, e, q_block, k_block, *_: (k, k_block[e], 0)
        ),
        pl.BlockSpec(
            (1 + windowed(schedule), bk), lambda k, g, e, q_block, k_block, *_: (0, k_block[e])
        ),
        lambda k, g, e, q_block, *_: (k * steps + g, 0, q_block[e]),
        [pl.BlockSpec((1, bq), lambda k, g, e, q_block, *_: (0, q_block[e]))] * windowed(schedule),
    )


def windowed(schedule: Schedule) -> bool:
    return schedule.k_reach is not None


def bounds(schedule: Schedule) -> Array:
    """The mask's key bounds [1, S]: kv_end; with a window [2, S], below it k_reach: one operand."""
    return jnp.stack([schedule.kv_end, schedule.k_reach][: 1 + windowed(schedule)])


def position(schedule: Schedule) -> list[Array]:
    """The queries' positions [1, T], if there is a window."""
    return [schedule.q_position[None]] if windowed(schedule) else []


def call_over(
    walk: Walk, schedule: Schedule, kernel: Callable, name: str, *, parallel: int, in_specs: list,
    out_specs: Any, out_shape: Any, scratch_shapes: list, interpret: Interpret,
    aliases: dict[int, int] | None = None,
) -> Callable:  # fmt: skip
    """A pallas_call over a block list: its four tables come first and live in scalar memory.

    The first `parallel` dimensions of the grid are independent of each other: a chip with two
    cores gives each half of them. `aliases` counts operands behind the tables.
    """
    tables = schedule.q_block, schedule.k_block, schedule.flags, schedule.q_start
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=walk.grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=out_shape,
        input_output_aliases={len(tables) + i: o for i, o in (aliases or {}).items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * parallel + ("arbitrary",) * (3 - parallel),
            disable_bounds_checks=True,
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=interpret_mode(interpret),
        name=name,
    )
    return functools.partial(call, *tables)


def score_scale(head_size: int) -> float:
    return LOG2E * head_size**-0.5


def column(row: Array) -> Array:
    """Transposes [1, n] -> [n, 128]: a number per lane to a number per row, in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def visible_keys(i: Array, j: Array, kv_end: Array) -> Array:
    """The mask j <= i < kv_end in one comparison a score: i - j wraps around to huge below j."""
    unsigned = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
    return unsigned(i - j) < unsigned(jnp.maximum(kv_end - j, 0))


def hide(
    scores: Array, q_first: Array, k_first: Array, bounds: Array, position: Array | None = None
) -> Array:
    """Hides the scores [queries, keys] of a block that the mask excludes; bounds [1 or 2, keys].

    The block's first query and its first key stand at `q_first` and `k_first`; `position`
    [queries, 128] is the queries' place in their text, in every lane.
    """
    kv_end = bounds[:1]
    i = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) + q_first
    j = jax.lax.broadcasted_iota(jnp.int32, kv_end.shape, 1) + k_first
    visible = visible_keys(i, j, kv_end)
    if position is not None:
        visible &= wide(position, scores.shape[1]) < bounds[1:]
    return jnp.where(visible, scores, HIDDEN)


def at(flag: int, flags: Array) -> Callable:
    return pl.when((flags & flag) != 0)


def masked_and_not(flags: Array, heads: int, compute: Callable[[bool, Array], None]) -> None:
    """Runs `compute` for every head, with or without a mask: full blocks do no mask work."""
    for masked in (True, False):

        @pl.when(((flags & PARTIAL) != 0) == masked)
        def _(masked: bool = masked) -> None:
            each(heads)(functools.partial(compute, masked))
