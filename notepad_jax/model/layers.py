"""The pieces of a decoder layer: RMSNorm, rotary embedding, attention block, feed-forward.

These are Flax NNX modules built around arrays that already exist: a module never owns the
master copy of a parameter, it wraps one layer's slice of the plain parameter tree for the
length of a trace. How attention itself is computed is not decided here: `attend` is handed
in by the caller (packed rows in training and prefill, the paged cache in decoding; see
`attention`), so that one layer definition serves the update and the engine alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Matrix, apply
from notepad_jax.model.moe import RoutedSwiGLU
from notepad_jax.model.rope import UNSCALED, Scaling, frequencies


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """RMSNorm in float32, cast back to x's dtype (Zhang & Sennrich 2019, eq. 4)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def add_bias(x: Float[Array, "... D"], bias: Float[Array, "... D"]) -> Array:
    """x + bias in x's dtype; added in float32, so the bias' gradient sums over tokens in that."""
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def rope_angles(
    positions_BT: Int[Array, "B T"], head_size: int, theta: float, scaling: Scaling = UNSCALED
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Returns (cos, sin) of the rotary angles, float32, computed once for all layers."""
    per_position, loudness = frequencies(head_size, theta, scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * per_position
    if loudness == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return jnp.cos(angle) * loudness, jnp.sin(angle) * loudness


def rotate(x_BTNH: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Applies rotary embedding in the half-split convention of Hugging Face checkpoints."""
    cos, sin = (a[:, :, None, :] for a in cos_sin)
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x_BTNH.dtype)


class Attention(nnx.Module):
    """Attention block: projections, optional biases, per-head norms around an `attend` function."""

    def __init__(self, config: PolicyConfig, params: Mapping[str, Matrix]):
        self.config = config
        names = ["q", "k", "v", "o"]
        names += ["q_bias", "k_bias", "v_bias"] if config.attention_bias else []
        names += ["o_bias"] if config.output_bias else []
        names += ["q_norm", "k_norm"] if config.qk_norm else []
        for name in names:
            setattr(self, name, nnx.Param(params[name]))

    def project(self, x_BTD: Array, name: str) -> Array:
        """Returns the q, k or v heads of x: [B, T, N or K, H], before RoPE, after any norm."""
        c = self.config
        x_BTNH = apply(x_BTD, getattr(self, name).get_value())
        if c.attention_bias:
            x_BTNH = add_bias(x_BTNH, getattr(self, f"{name}_bias")[...])
        if c.qk_norm and name in ("q", "k"):
            x_BTNH = rms_norm(x_BTNH, getattr(self, f"{name}_norm")[...], c.rms_eps)
        return x_BTNH

    def keys_values(self, x_BTD: Array, cos_sin: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns what a cache keeps of x: rotated keys and values, both [B, T, K, H]."""
        return rotate(self.project(x_BTD, "k"), cos_sin), self.project(x_BTD, "v")

    def queries(self, x_BTD: Array, cos_sin: tuple[Array, Array]) -> Array:
        return rotate(self.project(x_BTD, "q"), cos_sin)

    def output(self, out_BTNH: Array) -> Array:
        out_BTD = apply(out_BTNH, self.o.get_value(), inputs=2)
        return add_bias(out_BTD, self.o_bias[...]) if self.config.output_bias else out_BTD


class SwiGLU(nnx.Module):
    """The SwiGLU feed-forward, down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, params: Mapping[str, Matrix]):
        for name in ("gate", "up", "down"):
            setattr(self, name, nnx.Param(params[name]))

    def __call__(self, x_BTD: Array) -> Array:
        gate, up, down = (w.get_value() for w in (self.gate, self.up, self.down))
        return apply(jax.nn.silu(apply(x_BTD, gate)) * apply(x_BTD, up), down)


class DecoderLayer(nnx.Module):
    """A decoder layer: pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: PolicyConfig, params: Mapping[str, Matrix]):
        self.config = config
        self.attention = Attention(config, params)
        self.mlp = (
            SwiGLU(params) if config.experts is None else RoutedSwiGLU(config.experts, params)
        )
        self.attn_norm = nnx.Param(params["attn_norm"])
        self.mlp_norm = nnx.Param(params["mlp_norm"])

    def before_attention(self, hidden_BTD: Array) -> Array:
        return rms_norm(hidden_BTD, self.attn_norm[...], self.config.rms_eps)

    def after_attention(
        self, hidden_BTD: Array, out_BTNH: Array
    ) -> tuple[Array, Int[Array, "B T A"]]:
        """Returns the layer's output, and each token's experts: A is 0 in a dense layer."""
        hidden_BTD = hidden_BTD + self.attention.output(out_BTNH)
        normed_BTD = rms_norm(hidden_BTD, self.mlp_norm[...], self.config.rms_eps)
        if self.config.experts is None:
            routes_BTA = jnp.zeros((*hidden_BTD.shape[:2], 0), jnp.int32)
            return hidden_BTD + self.mlp(normed_BTD), routes_BTA
        out_BTD, routes_BTA = self.mlp(normed_BTD)
        return hidden_BTD + out_BTD, routes_BTA
