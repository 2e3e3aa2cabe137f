"""Packed attention, forward: a query block's accumulators stay in VMEM while its keys pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.interpret import Interpret
from pallas_kernels.packed.walk import (
    A_BT,
    at,
    bounds,
    call_over,
    column,
    hide,
    masked_and_not,
    position,
    score_scale,
    walk_by_query,
    windowed,
)
from pallas_kernels.schedule import FIRST, LAST, Schedule
from pallas_kernels.tiles import HIDDEN, LANES, LN2, dot, each, online, wide


def _forward_kernel(
    q_block, k_block, flags, q_start,
    q_ref, k_ref, v_ref, bounds_ref,
    *refs, chunk: int, windowed: bool,
):  # fmt: skip
    # With a window, the queries' positions come before the outputs, and as a column at the end.
    position_ref, refs, position_column = refs[:windowed], refs[windowed:], refs[windowed + 5 :]
    out_ref, lse_ref, peak_ref, total_ref, acc_ref = refs[:5]
    entry = pl.program_id(2)
    flag = flags[entry]
    heads, bk = q_ref.shape[0], k_ref.shape[0]

    @at(FIRST, flag)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if windowed:
            position_column[0][...] = column(position_ref[0][...])

    def compute(masked: bool, head: Array) -> None:
        q = q_ref[head]
        peak, total, acc = peak_ref[head], total_ref[head], acc_ref[head]
        for start in range(0, bk, chunk):
            keys = pl.ds(start, chunk)
            scores = dot(q, k_ref[keys, :], *A_BT) * score_scale(q.shape[1])
            if masked:
                k_first = k_block[entry] * bk + start
                q_first, text = q_start[q_block[entry]], [x[...] for x in position_column]
                scores = hide(scores, q_first, k_first, bounds_ref[:, keys], *text)
            # A query that sees nothing yet has peak -1e30 and weights 1: nonsense that its
            # first visible key wipes with a factor exp2(-1e30). The diagonal comes last, and
            # there every query sees itself.
            peak, total, acc = online(scores, v_ref[keys, :], peak, total, acc)
        peak_ref[head], total_ref[head], acc_ref[head] = peak, total, acc

    masked_and_not(flag, heads, compute)

    @at(LAST, flag)
    def _():
        @each(heads)
        def _(head: Array) -> None:
            total = total_ref[head]
            out_ref[head] = (acc_ref[head] / wide(total, out_ref.shape[2])).astype(out_ref.dtype)
            lse_ref[head] = ((peak_ref[head] + jnp.log2(total)) * LN2).T[:1]


# jax drops a jit whose results are not needed, and never a pallas_call: a layer whose outputs are
# kept (`remat`) must not run this again in its backward.
@functools.partial(jax.jit, static_argnames="interpret")
def forward(
    q_NTH: Array, k_KSH: Array, v_KSH: Array, schedule: Schedule, interpret: Interpret = False
) -> tuple[Array, Array]:
    """Returns attention's (out [N, T, H], lse float32 [N, T])."""
    N, T, H = q_NTH.shape
    walk = walk_by_query(schedule, N, k_KSH.shape[0], H)
    heads, bq, _ = walk.queries.block_shape
    out, lse = call_over(
        walk,
        schedule,
        functools.partial(
            _forward_kernel, chunk=min(schedule.k_size, 512), windowed=windowed(schedule)
        ),
        "packed_attention_forward",
        parallel=2,
        in_specs=[walk.queries, walk.keys, walk.keys, walk.bounds, *walk.position],
        out_specs=[walk.queries, pl.BlockSpec((heads, 1, bq), walk.query_block)],
        out_shape=[
            jax.ShapeDtypeStruct((N, T, H), q_NTH.dtype),
            jax.ShapeDtypeStruct((N, 1, T), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((heads, bq, LANES), jnp.float32),
            pltpu.VMEM((heads, bq, LANES), jnp.float32),
            pltpu.VMEM((heads, bq, H), jnp.float32),
            *[pltpu.VMEM((bq, LANES), jnp.int32)] * windowed(schedule),
        ],
        interpret=interpret,
    )(q_NTH, k_KSH, v_KSH, bounds(schedule), *position(schedule))
    return out, lse[:, 0]
