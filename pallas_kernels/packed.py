"""Packed attention on TPU: three Pallas kernels that walk one block list.

The mask is "query i sees key j iff j <= i < kv_end[j]" (docs/kernels.md draws it). The list
(`schedule`) names the blocks with anything to compute, so a batch of packed tails behind
shared prefixes costs what its mask needs; full blocks do no mask work. The forward kernel
and the dq kernel walk it by query block, the dk/dv kernel by key block, where the gradients
of a shared prefix gather all of its tails and all query heads of the kv head in one
accumulator.

The online softmax is Milakov & Gimelshein's, blocked as in FlashAttention (Dao et al.,
2022), in base 2: scores are scaled by log2(e) / sqrt(H), in float32, so a weight is one
exp2. (Scaling the queries beforehand would save a multiplication a score and round them
twice; the estimates do not miss it.) Inside the kernels heads lead and the rows of the batch
lie behind each other: q [N, B * T, H], k and v [K, B * S, H], T and S padded to whole blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.schedule import FIRST, LAST, PARTIAL, BlockList, Schedule
from pallas_kernels.tiles import LANES, LOG2E, Interpret, dot, interpret_mode, wide

_HIDDEN = -1e30  # the score of a hidden key: finite, so that differences stay finite
_LN2 = math.log(2)

_A_BT = (1, 1)  # the axes that a @ b.T contracts
_A_B = (1, 0)


def packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    schedule: Schedule,
    interpret: Interpret = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The TPU path of `pallas_kernels.packed_attention`, which documents and checks it.

    `schedule` must have been built for these T and S, with blocks that are multiples of 128.
    """
    for name, size in (("q_size", schedule.q_size), ("k_size", schedule.k_size)):
        if size % LANES:
            raise ValueError(f"{name} is {size}; the TPU kernels need a multiple of {LANES}")
    # Three tables of int32 in a core's 1 MiB of scalar memory, which holds other things too.
    if schedule.room > 75_000:
        raise ValueError(
            f"a block list with room for {schedule.room} entries does not fit scalar memory "
            "(75,000 do): give packed_schedule max_entries, or fewer rows at a time"
        )
    B, T, N, H = q_BTNH.shape
    q = _heads_first(q_BTNH, schedule.q_size)
    k, v = (_heads_first(x, schedule.k_size) for x in (k_BSKH, v_BSKH))
    out, lse = _attend(q, k, v, schedule, interpret)
    lse_BTN = lse.reshape(N, B, -1)[:, :, :T].transpose(1, 2, 0)
    return _heads_last(out, B, T), lse_BTN


def _heads_first(x_BTNH: Array, size: int) -> Array:
    """[B, T, N, H] -> [N, B * T padded to whole blocks, H]."""
    B, T, N, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
    return x.transpose(2, 0, 1, 3).reshape(N, -1, H)


def _heads_last(x: Array, rows: int, length: int) -> Array:
    N, _, H = x.shape
    return x.reshape(N, rows, -1, H)[:, :, :length].transpose(1, 2, 0, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, schedule: Schedule, interpret: Interpret) -> Any:
    return _attend_forward(q, k, v, schedule, interpret)[0]


def _attend_forward(q: Array, k: Array, v: Array, schedule: Schedule, interpret: Interpret) -> Any:
    out, lse = forward(q, k, v, schedule, interpret)
    out, lse = out + schedule.poison.astype(out.dtype), lse + schedule.poison
    return (out, lse), (q, k, v, schedule, out, lse)


def _attend_backward(interpret: Interpret, residuals: Any, cotangents: Any) -> Any:
    q, k, v, schedule, out, lse = residuals
    d_out, d_lse = cotangents
    # d score = weight * (d_out . v - d_out . out + d_lse): the last two are one number a query.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    # One operand, not two: each costs a grid step some twenty bundles of bookkeeping.
    stats = jnp.stack([lse * LOG2E, delta], axis=1)
    operands = (q, k, v, d_out, stats, schedule, interpret)
    d_q, (d_k, d_v) = backward_q(*operands), backward_kv(*operands)
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), schedule)
    return d_q, d_k, d_v, no_gradient


_attend.defvjp(_attend_forward, _attend_backward)


# ---------------------------------------------------------------- inside the kernels


def _scale(head_size: int) -> float:
    return LOG2E * head_size**-0.5


def _column(row: Array) -> Array:
    """[1, n] -> [n, 128]: a number per lane becomes a number per row, in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _visible(i: Array, j: Array, kv_end: Array) -> Array:
    """j <= i < kv_end in one comparison a score: below j, i - j wraps around to a huge number."""
    unsigned = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
    return unsigned(i - j) < unsigned(jnp.maximum(kv_end - j, 0))


def _at(flag: int, flags: Array) -> Callable:
    return pl.when((flags & flag) != 0)


def _each(heads: int) -> Callable:
    """Decorates a body that runs for every query head of a step."""

    def loop(body: Callable[[Array], None]) -> None:
        jax.lax.fori_loop(0, heads, lambda head, _: body(head), None)

    return loop


def _masked_and_not(flags: Array, heads: int, compute: Callable[[bool, Array], None]) -> None:
    """Two bodies for every head, so that full blocks do no mask work."""
    for masked in (True, False):

        @pl.when(((flags & PARTIAL) != 0) == masked)
        def _(masked: bool = masked) -> None:
            _each(heads)(functools.partial(compute, masked))


# ---------------------------------------------------------------- forward


def _forward_kernel(
    q_block, k_block, flags, q_start,
    q_ref, k_ref, v_ref, kv_end_ref,
    out_ref, lse_ref,
    peak_ref, total_ref, acc_ref,
    *, chunk: int,
):  # fmt: skip
    entry = pl.program_id(1)
    flag = flags[entry]
    heads, bq, _ = q_ref.shape
    bk = k_ref.shape[0]

    @_at(FIRST, flag)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, _HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def compute(masked: bool, head: Array) -> None:
        q = q_ref[head]
        peak, total, acc = peak_ref[head], total_ref[head], acc_ref[head]
        for start in range(0, bk, chunk):
            keys = pl.ds(start, chunk)
            scores = dot(q, k_ref[keys, :], *_A_BT) * _scale(q.shape[1])
            if masked:
                visible = _visible(
                    jax.lax.broadcasted_iota(jnp.int32, (bq, chunk), 0) + q_start[q_block[entry]],
                    jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
                    + (k_block[entry] * bk + start),
                    kv_end_ref[:, keys],
                )
                scores = jnp.where(visible, scores, _HIDDEN)
            # A query that sees nothing yet has peak -1e30 and weights 1: nonsense that its
            # first visible key wipes with a factor exp2(-1e30). The diagonal comes last, and
            # there every query sees itself.
            new_peak = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
            weights = jnp.exp2(scores - wide(new_peak, chunk))
            keep = jnp.exp2(peak - new_peak)
            v = v_ref[keys, :]
            total = keep * total + weights.sum(axis=1, keepdims=True)
            acc = wide(keep, v.shape[1]) * acc + dot(weights.astype(v.dtype), v, *_A_B)
            peak = new_peak
        peak_ref[head], total_ref[head], acc_ref[head] = peak, total, acc

    _masked_and_not(flag, heads, compute)

    @_at(LAST, flag)
    def _():
        @_each(heads)
        def _(head: Array) -> None:
            total = total_ref[head]
            out_ref[head] = (acc_ref[head] / wide(total, out_ref.shape[2])).astype(out_ref.dtype)
            lse_ref[head] = ((peak_ref[head] + jnp.log2(total)) * _LN2).T[:1]


def forward(
    q_NTH: Array, k_KSH: Array, v_KSH: Array, schedule: Schedule, interpret: Interpret = False
) -> tuple[Array, Array]:
    """Returns (out [N, T, H], lse float32 [N, T])."""
    N, T, H = q_NTH.shape
    heads, steps = heads_per_step(N, k_KSH.shape[0])
    bq, bk, blocks = schedule.q_size, schedule.k_size, schedule.by_query
    queries, keys, kv_end = _specs_by_query(schedule, heads, steps, H)
    out, lse = _call(
        functools.partial(_forward_kernel, chunk=min(bk, 512)),
        "packed_attention_forward",
        grid=(N // heads, blocks.count),
        blocks=blocks,
        schedule=schedule,
        in_specs=[queries, keys, keys, kv_end],
        out_specs=[
            queries,
            pl.BlockSpec((heads, 1, bq), lambda n, e, q_block, *_: (n, 0, q_block[e])),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((N, T, H), q_NTH.dtype),
            jax.ShapeDtypeStruct((N, 1, T), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((heads, bq, LANES), jnp.float32),
            pltpu.VMEM((heads, bq, LANES), jnp.float32),
            pltpu.VMEM((heads, bq, H), jnp.float32),
        ],
        interpret=interpret,
    )(q_NTH, k_KSH, v_KSH, schedule.kv_end[None])
    return out, lse[:, 0]


def heads_per_step(q_heads: int, kv_heads: int) -> tuple[int, int]:
    """Query heads that one step serves, and steps per kv head.

    All heads of a group meet a key block while it is in VMEM: it is fetched once for them,
    and a step's bookkeeping (some 200 cycles) is paid once. 8 heads' accumulators fit.
    """
    group = q_heads // kv_heads
    heads = max(n for n in range(1, 9) if group % n == 0)
    return heads, group // heads


def _specs_by_query(schedule: Schedule, heads: int, steps: int, head_size: int) -> list:
    """Blocks of queries, of keys (or values) and of kv_end on a grid (heads, entries)."""
    bq, bk = schedule.q_size, schedule.k_size
    return [
        pl.BlockSpec((heads, bq, head_size), lambda n, e, q_block, *_: (n, q_block[e], 0)),
        pl.BlockSpec(
            (None, bk, head_size), lambda n, e, q_block, k_block, *_: (n // steps, k_block[e], 0)
        ),
        pl.BlockSpec((1, bk), lambda n, e, q_block, k_block, *_: (0, k_block[e])),
    ]


def _call(
    kernel: Callable, name: str, *, grid: tuple, blocks: BlockList, schedule: Schedule,
    in_specs: list, out_specs: Any, out_shape: Any, scratch_shapes: list, interpret: Interpret,
) -> Callable:  # fmt: skip
    """A pallas_call over a block list: its four tables come first and live in scalar memory."""
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            # Heads are independent: a chip with two cores gives each half of them.
            dimension_semantics=("parallel",) + ("arbitrary",) * (len(grid) - 1),
            disable_bounds_checks=True,
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=interpret_mode(interpret),
        name=name,
    )
    return functools.partial(call, blocks.q_block, blocks.k_block, blocks.flags, schedule.q_start)


# Scores, weights and their gradients are float32 blocks: the compiler's default of 16 MiB is
# too little for blocks of 1,024. Every chip has at least 64 MiB.
_VMEM_BYTES = 48 * 2**20


# ---------------------------------------------------------------- backward: queries


def _backward_q_kernel(
    q_block, k_block, flags, q_start,
    q_ref, k_ref, v_ref, d_out_ref, stats_ref, kv_end_ref,
    d_q_ref,
    lse_column, delta_column, acc_ref,
    *, scale: float,
):  # fmt: skip
    entry = pl.program_id(1)
    flag = flags[entry]
    heads, bq, _ = q_ref.shape
    bk = k_ref.shape[0]

    @_at(FIRST, flag)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

        @_each(heads)
        def _(head: Array) -> None:
            lse_column[head] = _column(stats_ref[head, :1])
            delta_column[head] = _column(stats_ref[head, 1:])

    def compute(masked: bool, head: Array) -> None:
        k = k_ref[...]
        scores = dot(q_ref[head], k, *_A_BT) * _scale(k.shape[1])
        if masked:
            visible = _visible(
                jax.lax.broadcasted_iota(jnp.int32, (bq, bk), 0) + q_start[q_block[entry]],
                jax.lax.broadcasted_iota(jnp.int32, (1, bk), 1) + k_block[entry] * bk,
                kv_end_ref[...],
            )
            scores = jnp.where(visible, scores, _HIDDEN)
        weights = jnp.exp2(scores - wide(lse_column[head], bk))
        d_weights = dot(d_out_ref[head], v_ref[...], *_A_BT)
        d_scores = weights * (d_weights - wide(delta_column[head], bk))
        acc_ref[head] += dot(d_scores.astype(k.dtype), k, *_A_B)

    _masked_and_not(flag, heads, compute)

    @_at(LAST, flag)
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
    queries, keys, kv_end = _specs_by_query(schedule, heads, steps, H)
    return _call(
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


# ---------------------------------------------------------------- backward: keys and values


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
        kv_end_column[...] = _column(kv_end_ref[...])
        d_k_acc[...] = jnp.zeros_like(d_k_acc)
        d_v_acc[...] = jnp.zeros_like(d_v_acc)

    def compute(masked: bool, head: Array) -> None:
        # Keys down, queries across: both products below are then plain, and the queries'
        # lse and delta are rows, which broadcast down for nothing.
        q, d_out = q_ref[head], d_out_ref[head]
        scores = dot(k_ref[...], q, *_A_BT) * _scale(q.shape[1])
        if masked:
            visible = _visible(
                jax.lax.broadcasted_iota(jnp.int32, (1, bq), 1) + q_start[q_block[entry]],
                jax.lax.broadcasted_iota(jnp.int32, (bk, 1), 0) + k_block[entry] * bk,
                wide(kv_end_column[...], bq),
            )
            scores = jnp.where(visible, scores, _HIDDEN)
        weights = jnp.exp2(scores - stats_ref[head, :1])
        d_v_acc[...] += dot(weights.astype(d_out.dtype), d_out, *_A_B)
        d_weights = dot(v_ref[...], d_out, *_A_BT)
        d_scores = weights * (d_weights - stats_ref[head, 1:])
        d_k_acc[...] += dot(d_scores.astype(q.dtype), q, *_A_B)

    _masked_and_not(flag, heads, compute)

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
    return _call(
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
