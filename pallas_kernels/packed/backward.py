"""Packed attention, backward: one walk over the block list makes all three gradients.

By query, as the forward walks: a query block's dq stays in VMEM while its keys pass. The keys'
and values' gradients of a block, float32, come from memory and go back at every entry, one
copy of both, two buffers: they gather all queries of the row, all tails of a shared prefix and
all query heads of the kv head. The next block's sums are asked for in the middle of an entry,
when the last ones have long left, so that both copies hide behind products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.interpret import Interpret
from pallas_kernels.packed.walk import (
    A_B,
    A_BT,
    AT_B,
    at,
    bounds,
    call_over,
    column,
    masked_and_not,
    position,
    score_scale,
    visible_keys,
    walk_by_query,
    windowed,
)
from pallas_kernels.schedule import FIRST, LAST, PARTIAL, Schedule
from pallas_kernels.tiles import HIDDEN, LANES, dot, wide


def _backward_kernel(
    q_block, k_block, flags, q_start,
    q_ref, k_ref, v_ref, d_out_ref, stats_ref, bounds_ref,
    *refs, scale: float,
):  # fmt: skip
    # With a window, the queries' positions come first.
    *position_ref, nothing_yet, d_q_ref, d_kv_ref = refs[:-6]
    d_q_acc, d_kv_acc, columns, moves, read_done, write_done = refs[-6:]
    kv_head, entry = pl.program_id(0), pl.program_id(2)
    last_entry = pl.num_programs(2) - 1
    flag, here = flags[entry], k_block[entry]
    following = k_block[jnp.minimum(entry + 1, last_entry)]
    heads, bq, _ = q_ref.shape
    bk = k_ref.shape[0]

    def in_memory(block: Array) -> Any:
        return d_kv_ref.at[kv_head, :, pl.ds(pl.multiple_of(block * bk, bk), bk)]

    def read(block: Array, slot: Any) -> Any:
        return pltpu.make_async_copy(in_memory(block), d_kv_acc.at[slot], read_done.at[slot])

    def write(block: Array, slot: Any) -> Any:
        return pltpu.make_async_copy(d_kv_acc.at[slot], in_memory(block), write_done.at[slot])

    @pl.when(entry == 0)
    def _():
        moves[0] = 0
        read(here, 0).start()

    moved = (entry > 0) & (k_block[jnp.maximum(entry - 1, 0)] != here)

    @pl.when(moved)
    def _():
        moves[0] += 1

    slot = moves[0] & 1

    @pl.when(moved | (entry == 0))
    def _():
        read(here, slot).wait()

    @at(FIRST, flag)
    def _():
        d_q_acc[...] = jnp.zeros_like(d_q_acc)

    @at(PARTIAL, flag)
    def _():
        for n in range(bounds_ref.shape[0]):
            columns[n] = column(bounds_ref[n : n + 1])

    def compute(masked: bool, head: Array) -> None:
        @pl.when((head == heads // 2) & (following != here))
        def _():
            @pl.when(moves[0] > 0)
            def _():
                write(here, 1 - slot).wait()

            read(following, 1 - slot).start()

        # Keys down, queries across: two of the three products with the scores' gradients are
        # then plain, and the queries' lse and delta are rows, which broadcast down for nothing.
        q, d_out, k = q_ref[head], d_out_ref[head], k_ref[...]
        scores = dot(k, q, *A_BT) * score_scale(q.shape[1])
        if masked:
            visible = visible_keys(
                jax.lax.broadcasted_iota(jnp.int32, (1, bq), 1) + q_start[q_block[entry]],
                jax.lax.broadcasted_iota(jnp.int32, (bk, 1), 0) + here * bk,
                wide(columns[0], bq),
            )
            if position_ref:
                visible &= position_ref[0][...] < wide(columns[1], bq)
            scores = jnp.where(visible, scores, HIDDEN)
        weights = jnp.exp2(scores - stats_ref[head, :1])
        d_kv_acc[slot, 1] += dot(weights.astype(d_out.dtype), d_out, *A_B)
        d_weights = dot(v_ref[...], d_out, *A_BT)
        d_scores = (weights * (d_weights - stats_ref[head, 1:])).astype(q.dtype)
        d_kv_acc[slot, 0] += dot(d_scores, q, *A_B)
        d_q_acc[head] += dot(d_scores, k, *AT_B)

    masked_and_not(flag, heads, compute)

    @pl.when((following != here) | (entry == last_entry))
    def _():
        write(here, slot).start()

    @pl.when(entry == last_entry)
    def _():
        write(here, slot).wait()

        @pl.when(moves[0] > 0)
        def _():
            write(here, 1 - slot).wait()

    @at(LAST, flag)
    def _():
        d_q_ref[...] = (d_q_acc[...] * scale).astype(d_q_ref.dtype)


def backward(
    q_NTH: Array, k_KSH: Array, v_KSH: Array, d_out_NTH: Array, stats_N2T: Array,
    schedule: Schedule, interpret: Interpret = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Returns the gradients of q, k and v; stats_N2T: lse in base 2, and delta."""
    N, T, H = q_NTH.shape
    K, S, _ = k_KSH.shape
    walk = walk_by_query(schedule, N, K, H)
    (heads, bq, _), bk = walk.queries.block_shape, schedule.k_size
    in_memory = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    nothing_yet = jnp.zeros((K, 2, S, H), jnp.float32)
    d_q, d_kv = call_over(
        walk,
        schedule,
        functools.partial(_backward_kernel, scale=H**-0.5),
        "packed_attention_backward",
        parallel=1,  # the heads of a kv head add to the same sums
        in_specs=[
            walk.queries,
            walk.keys,
            walk.keys,
            walk.queries,
            pl.BlockSpec((heads, 2, bq), walk.query_block),
            walk.bounds,
            *walk.position,
            in_memory,
        ],
        out_specs=[walk.queries, in_memory],
        out_shape=[jax.ShapeDtypeStruct((N, T, H), q_NTH.dtype), nothing_yet],
        scratch_shapes=[
            pltpu.VMEM((heads, bq, H), jnp.float32),
            pltpu.VMEM((2, 2, bk, H), jnp.float32),
            pltpu.VMEM((1 + windowed(schedule), bk, LANES), jnp.int32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        aliases={6 + windowed(schedule): 1},
        interpret=interpret,
    )(
        q_NTH, k_KSH, v_KSH, d_out_NTH, stats_N2T, bounds(schedule), *position(schedule),
        nothing_yet,
    )  # fmt: skip
    return d_q, (d_kv[:, 0] * H**-0.5).astype(k_KSH.dtype), d_kv[:, 1].astype(v_KSH.dtype)
