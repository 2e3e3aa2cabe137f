"""Packed attention as one dense product in float32: the oracle of tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def dense_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    kv_end_BS: Int[Array, "B S"],
    positions_BS: Int[Array, "B S"] | None = None,
    window: int = 0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The oracle of `packed_attention`: every score, one mask, one softmax in float32."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    i, j = S - T + jnp.arange(T)[:, None], jnp.arange(S)[None, :]
    visible = (j <= i) & (i < kv_end_BS[:, None, None, None, :])
    if window:
        back = positions_BS[:, S - T :, None] - positions_BS[:, None, :]
        visible &= (back < window)[:, None, None]
    scores = jnp.where(visible, scores * H**-0.5, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v_BSKH.astype(jnp.float32))
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype), lse.transpose(0, 3, 1, 2).reshape(B, T, N)
