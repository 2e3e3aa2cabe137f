"""Packed attention as dense products: the oracle of tests, and in slices the path of GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.schedule import Schedule


def dense_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    kv_end_BS: Int[Array, "B S"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The oracle of `packed_attention`: every score, one mask, one softmax in float32."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    i, j = S - T + jnp.arange(T)[:, None], jnp.arange(S)[None, :]
    visible = (j <= i) & (i < kv_end_BS[:, None, None, None, :])
    scores = jnp.where(visible, scores * H**-0.5, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v_BSKH.astype(jnp.float32))
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype), lse.transpose(0, 3, 1, 2).reshape(B, T, N)


def dense_packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    schedule: Schedule,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`pallas_kernels.packed_attention` as large dense products: right for GPUs.

    A thousand small steps one after the other would leave a GPU idle, so each block of
    queries meets all keys that causality leaves at once, masked, and is recomputed in the
    backward. Memory holds the scores of one block of queries, [B, N, q_size, S].
    """
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    padded = pl.cdiv(S, schedule.k_size) * schedule.k_size
    B = q_BTNH.shape[0]
    kv_end_BS = schedule.kv_end.reshape(B, padded)[:, :S] - jnp.arange(B)[:, None] * padded
    attend = jax.checkpoint(dense_attention)
    outs, lses = [], []
    for first in range(0, T, schedule.q_size):
        last = min(first + schedule.q_size, T)
        reach = S - T + last
        out, lse = attend(
            q_BTNH[:, first:last], k_BSKH[:, :reach], v_BSKH[:, :reach], kv_end_BS[:, :reach]
        )
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)
