"""Token logprobs in plain jnp: never more than one block of logits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.logprob.blocks import vary, varying
from pallas_kernels.tiles import HIDDEN


def token_logprob(
    x_TD: Float[Array, "T D"],
    w: Float[Array, "M N"],
    labels_T: Int[Array, " T"],
    *,
    temperature: float,
    valid_vocab: int,
    transposed: bool = False,
    axis_name: str | None = None,
    block: int = 1024,
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, " T"]]:
    """`pallas_kernels.token_logprob` in plain jnp, one block of tokens after the other.

    Only [block, V] logits exist at a time, forward and (by recomputation) backward.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; logprobs need one above 0")
    T, D = x_TD.shape
    V, width = w.shape if transposed else w.shape[::-1]
    if width != D:
        raise ValueError(f"hidden states are {D} wide, the output matrix {width}")
    blocks = pl.cdiv(T, block)
    size = pl.cdiv(T, blocks)
    x = jnp.pad(x_TD, ((0, blocks * size - T), (0, 0))).reshape(blocks, size, D)
    labels = jnp.pad(labels_T, (0, blocks * size - T)).reshape(blocks, size)
    # Over a mesh axis, every shard holds V consecutive ids; alone, sums are over one shard.
    total = largest = lambda a: a  # noqa: E731
    if axis_name is not None:
        total = functools.partial(jax.lax.psum, axis_name=axis_name)
        largest = functools.partial(jax.lax.pmax, axis_name=axis_name)
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * V
    # Inside shard_map gradients are summed over devices where an argument is made to vary: here,
    # and not block by block.
    axes = varying(x) | varying(w)
    x, w = vary(x, axes), vary(w, axes)
    narrow = jax.lax.stop_gradient(w.astype(x.dtype))  # once, not for every block

    @jax.checkpoint
    def one(x_TD: Array, labels_T: Array) -> tuple[Array, Array, Array]:
        logits = _logits(x_TD, narrow, w, transposed) / temperature
        ids = first + jnp.arange(V)
        logits = jnp.where(ids < valid_vocab, logits, HIDDEN)
        peak = largest(jax.lax.stop_gradient(logits.max(axis=-1)))
        lse = peak + jnp.log(total(jnp.exp(logits - peak[:, None]).sum(axis=-1)))
        mine = ids == labels_T[:, None]
        label = total(jnp.where(mine, logits, 0).sum(axis=-1))
        probability = jnp.exp(logits - lse[:, None])
        entropy = lse - total(jnp.sum(probability * logits, axis=-1))
        return label - lse, lse, entropy

    with jax.named_scope("token_logprob"):
        results = (
            [one(x[0], labels[0])] if blocks == 1 else jax.lax.map(lambda b: one(*b), (x, labels))
        )
    if blocks == 1:
        return results[0]
    return tuple(r.reshape(-1)[:T] for r in results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _logits(x_TD: Array, narrow: Array, w: Array, transposed: bool) -> Array:
    """x w in x's dtype, summed in float32; `narrow` is w in that dtype.

    In the backward the logits' gradient is rounded to it, too, as the TPU kernel rounds it, and the
    gradient of a wider w is not.
    """
    return _product(x_TD, narrow, (((1,), (int(transposed),)), ((), ())))


def _logits_forward(x_TD: Array, narrow: Array, w: Array, transposed: bool) -> tuple[Array, Any]:
    return _logits(x_TD, narrow, w, transposed), (x_TD, narrow, jnp.zeros((), w.dtype))


def _logits_backward(transposed: bool, kept: Any, d_TV: Array) -> tuple[Array, None, Array]:
    x_TD, narrow, kind = kept
    d_TV = d_TV.astype(x_TD.dtype)
    d_x = _product(d_TV, narrow, (((1,), (1 - int(transposed),)), ((), ())))
    d_w_VD = _product(d_TV, x_TD, (((0,), (0,)), ((), ())))
    d_w = d_w_VD if transposed else d_w_VD.T
    return d_x.astype(x_TD.dtype), None, d_w.astype(kind.dtype)


_product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)


_logits.defvjp(_logits_forward, _logits_backward)
