"""Packed attention as a few large products, a slice of queries after the other.

The path of GPUs for which Triton does not compile.

A thousand small steps one after the other would leave a GPU idle, so a slice of queries meets
all keys that causality leaves it at once, masked. XLA does not fuse two matrix products: the
scores of a slice pass through device memory, and that traffic, not arithmetic, is what this
costs. Hence the form: heads lie before tokens, so that no score is ever transposed; weights
meet values in the values' dtype, like the kernels'; and the derivative is written out, so that
the backward makes scores again from the logsumexp, without a maximum or a sum.
docs/performance.md has the bytes. Beside: `dense`, the oracle, and `packed`, block by block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.schedule import Schedule
from pallas_kernels.tiles import HIDDEN, delta_of, kept, no_gradient


def sliced_packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    schedule: Schedule,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`pallas_kernels.packed_attention` through XLA, `schedule.q_size` queries at a time.

    Of the schedule only the mask and that size are read: its list is for code that skips blocks.
    Memory holds the scores of a few slices, float32 [B, N, q_size, S] each.
    """
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    padded = pl.cdiv(S, schedule.k_size) * schedule.k_size
    kv_end_BS = schedule.kv_end.reshape(B, padded)[:, :S] - jnp.arange(B)[:, None] * padded
    reach_BS = position_BT = None
    if schedule.k_reach is not None:
        reach_BS = schedule.k_reach.reshape(B, padded)[:, :S]
        position_BT = schedule.q_position.reshape(B, -1)[:, :T]
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    slices = []
    for begin in range(0, T, schedule.q_size):
        end = min(begin + schedule.q_size, T)
        seen = S - T + end  # what lies behind it is later than every query of the slice
        mask = _Mask(
            kv_end_BS[:, :seen],
            None if reach_BS is None else reach_BS[:, :seen],
            None if position_BT is None else position_BT[:, begin:end],
        )
        q_slice = q_BKGTH[..., begin:end, :]
        slices.append(_slice(q_slice, k_BKSH[:, :, :seen], v_BKSH[:, :, :seen], mask))
    out, lse = (jnp.concatenate(parts, axis=3) for parts in zip(*slices, strict=True))
    return (
        out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H),
        lse.transpose(0, 3, 1, 2).reshape(B, T, N),
    )


_scores = functools.partial(
    jnp.einsum, "bkgth,bksh->bkgts", preferred_element_type=jnp.float32
)  # of queries and keys; of cotangents and values


class _Mask(NamedTuple):
    """What a slice of queries sees of S keys; see `schedule.Schedule`."""

    kv_end: Int[Array, "B S"]
    reach: Int[Array, "B S"] | None  # None: no window
    position: Int[Array, "B T"] | None


def _visible(mask: _Mask, queries: int) -> Bool[Array, "B 1 1 queries S"]:
    """The mask of the last `queries` places, every one of which sees itself."""
    S = mask.kv_end.shape[1]
    i, j = jnp.arange(S - queries, S)[:, None], jnp.arange(S)
    visible = (j <= i) & (i < mask.kv_end[:, None, :])
    if mask.reach is not None:
        visible &= mask.position[:, :, None] < mask.reach[:, None, :]
    return visible[:, None, None]


@jax.custom_vjp
def _slice(q_BKGTH: Array, k_BKSH: Array, v_BKSH: Array, mask: _Mask) -> tuple[Array, Array]:
    """Attention of the last T of S positions: (out [B, K, G, T, H], lse [B, K, G, T])."""
    return _slice_forward(q_BKGTH, k_BKSH, v_BKSH, mask)[0]


def _slice_forward(q: Array, k: Array, v: Array, mask: _Mask) -> Any:
    with jax.named_scope("packed_attention"):
        scores = _scores(q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(_visible(mask, q.shape[3]), scores, HIDDEN)
        peak = scores.max(axis=-1)
        weights = jnp.exp(scores - peak[..., None])  # of what is hidden: exp(-1e30) is 0
        total = weights.sum(axis=-1)
        out = jnp.einsum(
            "bkgts,bksh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        out = (out / total[..., None]).astype(q.dtype)
        out, lse = kept(out, peak + jnp.log(total))
    return (out, lse), (q, k, v, mask, out, lse)


def _slice_backward(residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    q, k, v, mask, out, lse = residuals
    d_out, d_lse = cotangents
    scale = q.shape[-1] ** -0.5
    sum32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    with jax.named_scope("packed_attention_backward"):
        delta = delta_of(d_out, out, d_lse)
        weights = jnp.exp(_scores(q, k) * scale - lse[..., None])
        weights = jnp.where(_visible(mask, q.shape[3]), weights, 0)
        d_scores = (scale * weights * (_scores(d_out, v) - delta[..., None])).astype(q.dtype)
        d_q = sum32("bkgts,bksh->bkgth", d_scores, k).astype(q.dtype)
        d_k = sum32("bkgts,bkgth->bksh", d_scores, q).astype(k.dtype)
        d_v = sum32("bkgts,bkgth->bksh", weights.astype(q.dtype), d_out).astype(v.dtype)
    return d_q, d_k, d_v, no_gradient(mask)


_slice.defvjp(_slice_forward, _slice_backward)
