"""Packed attention in plain jnp, block by block: the path of CPUs.

It walks a block list (`schedule`), so packed rows with shared prefixes cost what their mask
needs and not what their rectangle holds; its backward walks the same list.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.schedule import Schedule
from pallas_kernels.tiles import HIDDEN, delta_of, kept, no_gradient


def packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    schedule: Schedule,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`pallas_kernels.packed_attention` in jnp, one block after the other: for a few cores."""
    B, T, N, _ = q_BTNH.shape
    K = k_BSKH.shape[2]
    q = _queries(q_BTNH, K, schedule.q_size)
    k, v = (_blocked(x, schedule.k_size) for x in (k_BSKH, v_BSKH))
    out, lse = _packed(q, k, v, schedule)
    return _unqueries(out, B, N, T), _unqueries(lse[..., None], B, N, T)[..., 0]


def _blocked(x_BTKH: Array, size: int) -> Array:
    """[B, T, K, H] -> [B * blocks, K, size, H], zero padded."""
    B, T, K, H = x_BTKH.shape
    x = jnp.pad(x_BTKH, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
    return x.reshape(-1, size, K, H).transpose(0, 2, 1, 3)


def _queries(q_BTNH: Array, kv_heads: int, size: int) -> Array:
    """[B, T, N, H] -> [B * blocks, K, G * size, H]: a kv head's queries in one matrix."""
    x = _blocked(q_BTNH, size)
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def _unqueries(x: Array, rows: int, heads: int, length: int) -> Array:
    """[B * blocks, K, G * size, H] -> [B, T, N, H]."""
    H = x.shape[-1]
    x = x.reshape(x.shape[0], heads, -1, H).transpose(0, 2, 1, 3)
    return x.reshape(rows, -1, heads, H)[:, :length]


def _take(x: Array, block: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, block, keepdims=False)


def _put(x: Array, value: Array, block: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, block, 0)


def _visible(schedule: Schedule, q_block: Array, k_block: Array, groups: int) -> Array:
    """The mask of one block: [G * q_size, k_size]."""
    i = _take(schedule.q_start, q_block) + jnp.arange(schedule.q_size)[:, None]
    j = k_block * schedule.k_size + jnp.arange(schedule.k_size)[None, :]
    ends = _take(schedule.kv_end.reshape(-1, schedule.k_size), k_block)
    visible = (j <= i) & (i < ends[None, :])
    if schedule.k_reach is not None:
        position = _take(schedule.q_position.reshape(-1, schedule.q_size), q_block)
        reach = _take(schedule.k_reach.reshape(-1, schedule.k_size), k_block)
        visible &= position[:, None] < reach[None, :]
    return jnp.tile(visible, (groups, 1))


@jax.custom_vjp
def _packed(q: Array, k: Array, v: Array, schedule: Schedule) -> Any:
    return _packed_forward(q, k, v, schedule)[0]


def _packed_forward(q: Array, k: Array, v: Array, schedule: Schedule) -> Any:
    H, groups = q.shape[-1], q.shape[2] // schedule.q_size
    scaled = q * jnp.asarray(H**-0.5, q.dtype)

    def step(e: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peaks, sums, outs = state
        qb, kb = schedule.q_block[e], schedule.k_block[e]
        scores = jnp.einsum(
            "kqh,ksh->kqs", _take(scaled, qb), _take(k, kb), preferred_element_type=jnp.float32
        )
        visible = _visible(schedule, qb, kb, groups)
        scores = jnp.where(visible, scores, HIDDEN)
        peak, total, out = _take(peaks, qb), _take(sums, qb), _take(outs, qb)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        # A block may hide everything from some query: its weights must be 0, not exp(0).
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0)
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weights.sum(axis=-1)
        out = out * keep[..., None] + jnp.einsum(
            "kqs,ksh->kqh", weights.astype(v.dtype), _take(v, kb),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return _put(peaks, new_peak, qb), _put(sums, total, qb), _put(outs, out, qb)

    shape = q.shape[:-1]
    start = (
        jnp.full(shape, HIDDEN, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    with jax.named_scope("packed_attention"):
        peaks, sums, outs = jax.lax.fori_loop(0, schedule.count, step, start)
    sums = jnp.maximum(sums, 1e-30)  # queries of the zero padding see nothing
    out, lse = kept((outs / sums[..., None]).astype(q.dtype), peaks + jnp.log(sums))
    return (out, lse), (q, k, v, schedule, out, lse)


def _packed_backward(residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    q, k, v, schedule, out, lse = residuals
    d_out, d_lse = cotangents
    H, groups = q.shape[-1], q.shape[2] // schedule.q_size
    scale = H**-0.5
    # Sums over queries are plain matrix products only with the queries' transpose on the left.
    q_T, d_out_T = q.swapaxes(-1, -2), d_out.swapaxes(-1, -2)
    delta = delta_of(d_out, out, d_lse)

    def step(e: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_q, d_k_T, d_v_T = state
        qb, kb = schedule.q_block[e], schedule.k_block[e]
        q_e, k_e, v_e, d_out_e = _take(q, qb), _take(k, kb), _take(v, kb), _take(d_out, qb)
        scores = scale * jnp.einsum("kqh,ksh->kqs", q_e, k_e, preferred_element_type=jnp.float32)
        visible = _visible(schedule, qb, kb, groups)
        weights = jnp.where(visible, jnp.exp(scores - _take(lse, qb)[..., None]), 0)
        d_weights = jnp.einsum("kqh,ksh->kqs", d_out_e, v_e, preferred_element_type=jnp.float32)
        d_scores = (scale * weights * (d_weights - _take(delta, qb)[..., None])).astype(q.dtype)
        d_q_e = jnp.einsum("kqs,ksh->kqh", d_scores, k_e, preferred_element_type=jnp.float32)
        d_k_e = jnp.einsum(
            "khq,kqs->khs", _take(q_T, qb), d_scores, preferred_element_type=jnp.float32
        )
        d_v_e = jnp.einsum(
            "khq,kqs->khs", _take(d_out_T, qb), weights.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (
            _put(d_q, _take(d_q, qb) + d_q_e, qb),
            _put(d_k_T, _take(d_k_T, kb) + d_k_e, kb),
            _put(d_v_T, _take(d_v_T, kb) + d_v_e, kb),
        )

    shapes = q.shape, k.swapaxes(-1, -2).shape, v.swapaxes(-1, -2).shape
    start = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    with jax.named_scope("packed_attention_backward"):
        d_q, d_k_T, d_v_T = jax.lax.fori_loop(0, schedule.count, step, start)
    return (
        d_q.astype(q.dtype),
        d_k_T.swapaxes(-1, -2).astype(k.dtype),
        d_v_T.swapaxes(-1, -2).astype(v.dtype),
        no_gradient(schedule),
    )


_packed.defvjp(_packed_forward, _packed_backward)
