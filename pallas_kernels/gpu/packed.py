"""Packed attention on GPUs: a program for each head and block, scores never leave the chip.

Three kernels over one block list (`schedule`), lowered through Triton. The forward and the
queries' gradient take a block of queries and walk its run of keys; the keys' and values' gradient
takes a block of keys and walks the queries that see it, of one query head: the heads of a kv head
are summed afterwards, so that a long prefix, which every tail sees, is many programs' work and not
one's. Programs of one grid start in order, so the longest come first. The TPU kernels (`packed`)
walk the list one entry after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.gpu.tiles import State, nothing_yet, online, power_of_two, whole
from pallas_kernels.schedule import Schedule
from pallas_kernels.tiles import HIDDEN, LN2, LOG2E, delta_of, dot, kept, no_gradient


def blocks(head_size: int, dtype: DTypeLike) -> tuple[int, int]:
    """Returns (queries, keys) per block.

    With those for bfloat16 and heads of 64 and 128 an H100 was fastest. All fit the 99 KiB of
    shared memory that the smallest processors have, `_stages` blocks at once.
    """
    size = jnp.dtype(dtype).itemsize
    if power_of_two(head_size) * size > 256:
        return 32, 32
    if size > 2:
        return 64, 32
    return (128, 64) if head_size <= 64 else (64, 64)


def _stages(width: int, size: int) -> int:
    """Blocks that are under way at once; `size` of a number, in bytes."""
    return {1: 3, 2: 2}.get(pl.cdiv(width * size, 128), 1)


def packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    schedule: Schedule,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The GPU path of `pallas_kernels.packed_attention`, which documents and checks it.

    `schedule` must have been built for these T and S, with `runs`, and with blocks that are powers
    of two of at least 16.
    """
    B, T, N, H = q_BTNH.shape
    q = _rows(q_BTNH, schedule.q_size)
    k, v = (_rows(x, schedule.k_size) for x in (k_BSKH, v_BSKH))
    out, lse = _attend(q, k, v, schedule, H**-0.5, interpret)
    lse_BTN = lse.reshape(N, B, -1)[:, :, :T].transpose(1, 2, 0)
    return out.reshape(B, -1, N, out.shape[-1])[:, :T, :, :H], lse_BTN


def _rows(x_BTNH: Array, size: int) -> Array:
    """[B, T, N, H] -> [B * T padded to whole blocks, N, H padded to a power of two]."""
    _, T, N, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, -T % size), (0, 0), (0, power_of_two(H) - H)))
    return x.reshape(-1, N, x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, schedule: Schedule, scale: float, interpret: bool) -> Any:
    return _attend_forward(q, k, v, schedule, scale, interpret)[0]


def _attend_forward(
    q: Array, k: Array, v: Array, schedule: Schedule, scale: float, interpret: bool
) -> Any:
    with jax.named_scope("packed_attention"):
        out, lse = kept(*_forward(q, k, v, schedule, scale, interpret))
    return (out, lse), (q, k, v, schedule, out, lse)


def _attend_backward(scale: float, interpret: bool, residuals: Any, cotangents: Any) -> Any:
    q, k, v, schedule, out, lse = residuals
    d_out, d_lse = cotangents
    with jax.named_scope("packed_attention_backward"):
        delta = delta_of(d_out, out, d_lse.T).T
        operands = q, k, v, d_out, lse * LOG2E, delta, schedule, scale, interpret
        d_q = _backward_of_queries(*operands)
        d_k, d_v = _backward_of_keys(*operands)
    return d_q, d_k, d_v, no_gradient(schedule)


_attend.defvjp(_attend_forward, _attend_backward)


# ---------------------------------------------------------------- what the kernels share


class _Grid(NamedTuple):
    """A grid of (query heads, blocks) and how its programs see operands."""

    heads: int
    group: int  # query heads of a kv head
    width: int  # of a head, a power of two
    stages: int

    def rows(self, count: int, *, kv: bool = False) -> pl.BlockSpec:
        """All of [count, heads, H] that is one head's: a query head's, or its kv head's."""
        group = self.group if kv else 1
        return pl.BlockSpec((count, None, self.width), lambda n, _: (0, n // group, 0))

    def block(self, size: int, last: int | None = None, *, kv: bool = False) -> pl.BlockSpec:
        """A program's block of [rows, heads, H]; with `last` the last block comes first."""
        group, at = self.group if kv else 1, (lambda i: i if last is None else last - i)
        return pl.BlockSpec((size, None, self.width), lambda n, i: (at(i), n // group, 0))

    def call(self, kernel: Callable, name: str, blocks: int, interpret: bool, **specs: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(self.heads, blocks),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=self.stages),
            interpret=interpret,
            name=name,
            **specs,
        )


def _grid(q: Array, k: Array) -> _Grid:
    _, heads, width = q.shape
    return _Grid(heads, heads // k.shape[1], width, _stages(width, q.dtype.itemsize))


def _numbers(count: int) -> pl.BlockSpec:
    """All of a query head's float32 numbers, of [heads, count]."""
    return pl.BlockSpec((None, count), lambda n, _: (n, 0))


def _mask(schedule: Schedule) -> list[Array]:
    """What tells which keys a query sees; with windows also reaches and positions."""
    windows = [] if schedule.k_reach is None else [schedule.k_reach, schedule.q_position]
    return [schedule.q_start, schedule.kv_end, *windows]


def _hidden(
    scores: Array, mask: Sequence[Any], q_block: Array, queries: Any, k_first: Array, keys: Any
) -> Array:
    """Scores [queries, keys], with `HIDDEN` where the mask says so."""
    q_start_ref, kv_end_ref, *windows = mask
    i = q_start_ref[q_block] + jnp.arange(scores.shape[0], dtype=jnp.int32)
    j = k_first + jnp.arange(scores.shape[1], dtype=jnp.int32)
    visible = (j[None, :] <= i[:, None]) & (i[:, None] < kv_end_ref[keys][None, :])
    if windows:
        reach_ref, position_ref = windows
        visible &= position_ref[queries][:, None] < reach_ref[keys][None, :]
    return jnp.where(visible, scores, HIDDEN)


# ---------------------------------------------------------------- forward


def _forward_kernel(
    first_ref, k_block_ref, q_ref, k_ref, v_ref, *refs, k_size: int, scale: float
):  # fmt: skip
    *mask, out_ref, lse_ref = refs
    (q_size, width), block = q_ref.shape, pl.num_programs(1) - 1 - pl.program_id(1)
    q, queries = q_ref[...], pl.ds(block * q_size, q_size)

    def step(e: Array, state: State) -> State:
        k_first = k_block_ref[e] * k_size
        keys = pl.ds(k_first, k_size)
        scores = dot(q, k_ref[keys, :], 1, 1) * (scale * LOG2E)
        scores = _hidden(scores, mask, block, queries, k_first, keys)
        return online(scores, v_ref[keys, :], state)  # every query sees itself

    first, end = first_ref[block], first_ref[block + 1]
    peak, total, acc = jax.lax.fori_loop(first, end, step, nothing_yet(q_size, width))
    out_ref[...] = (acc / total[:, None]).astype(out_ref.dtype)
    lse_ref[queries] = (peak + jnp.log2(total)) * LN2


# As in `packed.forward`: a layer whose outputs are kept (`remat`) must not run this again.
@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def _forward(
    q: Array, k: Array, v: Array, schedule: Schedule, scale: float, interpret: bool
) -> tuple[Array, Array]:
    """Returns attention's (out [T, N, H], lse float32 [N, T]), all rows' tokens behind another."""
    (T, N, _), kernel = q.shape, functools.partial(_forward_kernel, scale=scale)
    out = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((N, T), jnp.float32)]
    return _by_queries(kernel, "packed_attention_forward", (q, k, v), schedule, out, interpret)


def _by_queries(
    kernel: Callable, name: str, operands: Sequence[Array], schedule: Schedule, out: Any,
    interpret: bool,
) -> Any:  # fmt: skip
    """Calls a kernel whose programs take a block of queries each, and walk its run of keys.

    Behind q, k and v come further operands, like q or a number a query [N, T]; so is what comes
    `out`, as `jax.ShapeDtypeStruct`s.
    """
    q, k, _, *more = operands
    grid, size, mask = _grid(q, k), schedule.q_size, _mask(schedule)
    blocks, tables = q.shape[0] // size, (schedule.runs.of_queries, schedule.k_block)
    longest_first, keys = grid.block(size, blocks - 1), grid.rows(k.shape[0], kv=True)

    def of(x: Any) -> pl.BlockSpec:
        return longest_first if x.ndim == 3 else _numbers(q.shape[0])

    specs = [*map(whole, tables), of(q), keys, keys, *map(of, more), *map(whole, mask)]
    return grid.call(
        functools.partial(kernel, k_size=schedule.k_size),
        name, blocks, interpret,
        in_specs=specs,
        out_specs=jax.tree.map(of, out),
        out_shape=out,
    )(*tables, *operands, *mask)  # fmt: skip


# ---------------------------------------------------------------- backward


def _queries_kernel(
    first_ref, k_block_ref, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, *refs,
    k_size: int, scale: float,
):  # fmt: skip
    *mask, d_q_ref = refs
    block = pl.num_programs(1) - 1 - pl.program_id(1)
    queries = pl.ds(block * q_ref.shape[0], q_ref.shape[0])
    q, d_out = q_ref[...], d_out_ref[...]
    lse, delta = lse_ref[queries][:, None], delta_ref[queries][:, None]

    def step(e: Array, d_q: Array) -> Array:
        k_first = k_block_ref[e] * k_size
        keys = pl.ds(k_first, k_size)
        k = k_ref[keys, :]
        scores = dot(q, k, 1, 1) * (scale * LOG2E)
        weights = jnp.exp2(_hidden(scores, mask, block, queries, k_first, keys) - lse)
        d_scores = weights * (dot(d_out, v_ref[keys, :], 1, 1) - delta)
        return d_q + dot(d_scores.astype(k.dtype), k, 1, 0)

    start = jnp.zeros(q.shape, jnp.float32)
    d_q = jax.lax.fori_loop(first_ref[block], first_ref[block + 1], step, start)
    d_q_ref[...] = (d_q * scale).astype(d_q_ref.dtype)


def _keys_kernel(
    first_ref, q_block_ref, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, *refs,
    q_size: int, scale: float,
):  # fmt: skip
    *mask, d_k_ref, d_v_ref = refs
    block, k_size = pl.program_id(1), k_ref.shape[0]
    k, v = k_ref[...], v_ref[...]
    keys = pl.ds(block * k_size, k_size)

    def step(e: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        d_k, d_v = state
        q_block = q_block_ref[e]
        queries = pl.ds(q_block * q_size, q_size)
        q, d_out = q_ref[queries, :], d_out_ref[queries, :]
        scores = dot(q, k, 1, 1) * (scale * LOG2E)
        scores = _hidden(scores, mask, q_block, queries, block * k_size, keys)
        weights = jnp.exp2(scores - lse_ref[queries][:, None])
        d_v += dot(weights.astype(d_out.dtype), d_out, 0, 0)
        d_scores = weights * (dot(d_out, v, 1, 1) - delta_ref[queries][:, None])
        return d_k + dot(d_scores.astype(q.dtype), q, 0, 0), d_v

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(first_ref[block], first_ref[block + 1], step, start)
    d_k_ref[...] = d_k * scale
    d_v_ref[...] = d_v


def _backward_of_queries(
    q: Array, k: Array, v: Array, d_out: Array, lse: Array, delta: Array,
    schedule: Schedule, scale: float, interpret: bool,
) -> Array:  # fmt: skip
    """Returns q's gradient; lse (base 2) and delta are float32 [N, T]."""
    return _by_queries(
        functools.partial(_queries_kernel, scale=scale), "packed_attention_backward_queries",
        (q, k, v, d_out, lse, delta), schedule, jax.ShapeDtypeStruct(q.shape, q.dtype), interpret,
    )  # fmt: skip


def _backward_of_keys(
    q: Array, k: Array, v: Array, d_out: Array, lse: Array, delta: Array,
    schedule: Schedule, scale: float, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns the gradients of k and of v; arguments as of `_backward_of_queries`."""
    (T, N, H), (S, K, _), grid, size = q.shape, k.shape, _grid(q, k), schedule.k_size
    runs, mask = schedule.runs, _mask(schedule)
    of_keys = grid.block(size, kv=True)
    found = grid.call(
        functools.partial(_keys_kernel, q_size=schedule.q_size, scale=scale),
        "packed_attention_backward_keys",
        S // size,
        interpret,
        in_specs=[
            whole(runs.of_keys),
            whole(runs.q_block),
            grid.rows(T),
            *[of_keys] * 2,
            grid.rows(T),
            *[_numbers(T)] * 2,
            *map(whole, mask),
        ],
        out_specs=[grid.block(size)] * 2,
        out_shape=[jax.ShapeDtypeStruct((S, N, H), jnp.float32)] * 2,
    )(runs.of_keys, runs.q_block, q, k, v, d_out, lse, delta, *mask)
    d_k, d_v = (x.reshape(S, K, N // K, H).sum(axis=2).astype(k.dtype) for x in found)
    return d_k, d_v
