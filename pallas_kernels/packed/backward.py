"""Packed attention, backward: one kernel for queries, one for keys and values.

The dq kernel walks the list by query block, as the forward does; the dk/dv kernel by key block,
where the gradients of a shared prefix gather all of its tails and all query heads of the kv
head in one accumulator. Both compute the weights again, from the forward's logsumexps.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.interpret import Interpret
from pallas_kernels.packed.walk import (
    A_B,
    A_BT,
    at,
    call_over,
    column,
    heads_per_step,
    hide,
    masked_and_not,
    score_scale,
    specs_by_query,
    visible_keys,
)
from pallas_kernels.schedule import FIRST, LAST, Schedule
from pallas_kernels.tiles import HIDDEN, LANES, dot, each, wide

# ---------------------------------------------------------------- queries


def _backward_q_kernel(
    q_block, k_block, flags, q_start,
    q_ref, k_ref, v_ref, d_out_ref, stats_ref, kv_end_ref,
    d_q_ref,
    lse_column, delta_column, acc_ref,
    *, scale: float,
):  # fmt: skip
    entry = pl.program_id(1)
    flag = flags[entry]
    heads, bk = q_ref.shape[0], k_ref.shape[0]

    @at(FIRST, flag)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

        @each(heads)
        def _(head: Array) -> None:
            lse_column[head] = column(stats_ref[head, :1])
            delta_column[head] = column(stats_ref[head, 1:])

    def compute(masked: bool, head: Array) -> None:
        k = k_ref[...]
        scores = dot(q_ref[head], k, *A_BT) * score_scale(k.shape[1])
        if masked:
            k_first = k_block[entry] * bk
            scores = hide(scores, q_start[q_block[entry]], k_first, kv_end_ref[...])
        weights = jnp.exp2(scores - wide(lse_column[head], bk))
        d_weights = dot(d_out_ref[head], v_ref[...], *A_BT)
        d_scores = weights * (d_weights - wide(delta_column[head], bk))
        acc_ref[head] += dot(d_scores.astype(k.dtype), k, *A_B)

    masked_and_not(flag, heads, compute)

    @at(LAST, flag)
    def _():
        d_q_ref[...] = (acc_ref[...] * scale).astype(d_q_ref.dtype)


def backward_q(
    q_NTH: Array, k_KSH: Array, v_KSH: Array, d_out_NTH: Array, stats_N2T: Array,
    schedule: Schedule, interpret: Interpret = False,
) -> Array:  # fmt: skip
    """Returns the gradient of the queries, [N, T, H]; stats_N2T: lse in base 2, and delta."""
    N, T, H = q_NTH.shape
    heads, steps = heads_per_step(N, k_KSH.shape[0])
    bq, blocks = schedule.q_size, schedule.by_query
    queries, keys, kv_end = specs_by_query(schedule, heads, steps, H)
    return call_over(
        functools.partial(_backward_q_kernel, scale=H**-0.5),
        "packed_attention_dq",
        grid=(N // heads, blocks.count),
        blocks=blocks,
        schedule=schedule,
        in_specs=[
            queries,
            keys,
            keys,
            queries,
            pl.BlockSpec((heads, 2, bq), lambda n, e, q_block, *_: (n, 0, q_block[e])),
            kv_end,
        ],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct((N, T, H), q_NTH.dtype),
        scratch_shapes=[
            pltpu.VMEM((heads, bq, LANES), jnp.float32),
            pltpu.VMEM((heads, bq, LANES), jnp.float32),
            pltpu.VMEM((heads, bq, H), jnp.float32),
        ],
        interpret=interpret,
    )(q_NTH, k_KSH, v_KSH, d_out_NTH, stats_N2T, schedule.kv_end[None])


# ---------------------------------------------------------------- keys and values


def _backward_kv_kernel(
    q_block, k_block, flags, q_start,
    q_ref, k_ref, v_ref, d_out_ref, stats_ref, kv_end_ref,
    d_k_ref, d_v_ref,
    kv_end_column, d_k_acc, d_v_acc,
    *, scale: float,
):  # fmt: skip
    entry, step = pl.program_id(1), pl.program_id(2)
    flag = flags[entry]
    heads, bq, _ = q_ref.shape
    bk = k_ref.shape[0]

    @pl.when(((flag & FIRST) != 0) & (step == 0))
    def _():
        kv_end_column[...] = column(kv_end_ref[...])
        d_k_acc[...] = jnp.zeros_like(d_k_acc)
        d_v_acc[...] = jnp.zeros_like(d_v_acc)

    def compute(masked: bool, head: Array) -> None:
        # Keys down, queries across: both products below are then plain, and the queries'
        # lse and delta are rows, which broadcast down for nothing.
        q, d_out = q_ref[head], d_out_ref[head]
        scores = dot(k_ref[...], q, *A_BT) * score_scale(q.shape[1])
        if masked:
            visible = visible_keys(
                jax.lax.broadcasted_iota(jnp.int32, (1, bq), 1) + q_start[q_block[entry]],
                jax.lax.broadcasted_iota(jnp.int32, (bk, 1), 0) + k_block[entry] * bk,
                wide(kv_end_column[...], bq),
            )
            scores = jnp.where(visible, scores, HIDDEN)
        weights = jnp.exp2(scores - stats_ref[head, :1])
        d_v_acc[...] += dot(weights.astype(d_out.dtype), d_out, *A_B)
        d_weights = dot(v_ref[...], d_out, *A_BT)
        d_scores = weights * (d_weights - stats_ref[head, 1:])
        d_k_acc[...] += dot(d_scores.astype(q.dtype), q, *A_B)

    masked_and_not(flag, heads, compute)

    @pl.when(((flag & LAST) != 0) & (step == pl.num_programs(2) - 1))
    def _():
        d_k_ref[...] = (d_k_acc[...] * scale).astype(d_k_ref.dtype)
        d_v_ref[...] = d_v_acc[...].astype(d_v_ref.dtype)


def backward_kv(
    q_NTH: Array, k_KSH: Array, v_KSH: Array, d_out_NTH: Array, stats_N2T: Array,
    schedule: Schedule, interpret: Interpret = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns the gradients of keys and values, [K, S, H]; stats_N2T: lse in base 2, and delta."""
    N, T, H = q_NTH.shape
    K, S, _ = k_KSH.shape
    heads, steps = heads_per_step(N, K)
    bq, bk = schedule.q_size, schedule.k_size
    blocks = schedule.by_key
    per_query = lambda k, e, g, q_block, *_: (k * steps + g, q_block[e], 0)  # noqa: E731
    per_key = lambda k, e, g, q_block, k_block, *_: (k, k_block[e], 0)  # noqa: E731
    return call_over(
        functools.partial(_backward_kv_kernel, scale=H**-0.5),
        "packed_attention_dkv",
        grid=(K, blocks.count, steps),
        blocks=blocks,
        schedule=schedule,
        in_specs=[
            pl.BlockSpec((heads, bq, H), per_query),
            pl.BlockSpec((None, bk, H), per_key),
            pl.BlockSpec((None, bk, H), per_key),
            pl.BlockSpec((heads, bq, H), per_query),
            pl.BlockSpec(
                (heads, 2, bq), lambda k, e, g, q_block, *_: (k * steps + g, 0, q_block[e])
            ),
            pl.BlockSpec((1, bk), lambda k, e, g, q_block, k_block, *_: (0, k_block[e])),
        ],
        out_specs=[pl.BlockSpec((None, bk, H), per_key)] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((K, S, H), k_KSH.dtype),
            jax.ShapeDtypeStruct((K, S, H), v_KSH.dtype),
        ],
        scratch_shapes=[
            pltpu.VMEM((bk, LANES), jnp.int32),
            pltpu.VMEM((bk, H), jnp.float32),
            pltpu.VMEM((bk, H), jnp.float32),
        ],
        interpret=interpret,
    )(q_NTH, k_KSH, v_KSH, d_out_NTH, stats_N2T, schedule.kv_end[None])
