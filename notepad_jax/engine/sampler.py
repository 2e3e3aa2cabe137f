"""Token sampling: temperature, nucleus (top-p), and noise that belongs to the request alone.

The noise of the n-th token of a completion is a function of (request seed, n) and of nothing
else: not of the slot, the batch, the launch, or whether the token was verified as a draft or
decoded. That is what makes a rollout reproducible under continuous batching, and what lets
a draft be checked exactly, not only in distribution.

Reported logprobs are those of softmax(logits / temperature) in float32, before a mask forbids
tokens and top_p cuts the tail: the same quantity the trainer computes. Under a mask they are
therefore not those of the distribution that was drawn from, and a forced token may have a very
low one. Greedy sampling reports temperature 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def _nucleus(logits_XV: Array, top_p_X: Array) -> Array:
    """Masks all but the likeliest tokens that together reach top_p; equals stay together.

    A token stays if all that are likelier reach less than top_p together, so what is sought is
    the least probability of which that is true. Floats that are not negative are ordered as their
    bits are, and halving the 2^30 of them up to 1.0 finds it exactly, in sums over the vocabulary
    where it lies. Sorting 152K tokens would take the TPU compiler 11 of a launch's 17 CPU seconds.
    """
    probability_XV = jax.nn.softmax(logits_XV, axis=-1)

    def as_float(bits_X: Array) -> Array:
        return jax.lax.bitcast_convert_type(bits_X, jnp.float32)[:, None]

    def halved(_: Array, between: tuple[Array, Array]) -> tuple[Array, Array]:
        low_X, high_X = between  # what is likelier than `high` reaches less than top_p
        middle_X = (low_X + high_X) // 2
        likelier_XV = jnp.where(probability_XV > as_float(middle_X), probability_XV, 0.0)
        enough_X = jnp.sum(likelier_XV, axis=-1) < top_p_X
        return jnp.where(enough_X, low_X, middle_X + 1), jnp.where(enough_X, middle_X, high_X)

    one_X = jax.lax.bitcast_convert_type(jnp.ones_like(top_p_X), jnp.int32)
    _, least_X = jax.lax.fori_loop(0, 30, halved, (jnp.zeros_like(one_X), one_X))
    # 1 is the whole vocabulary, whatever shares the launch: sums are rounded, and may reach it.
    stays_XV = (probability_XV >= as_float(least_X)) | (top_p_X[:, None] >= 1)
    return jnp.where(stays_XV, logits_XV, -jnp.inf)


def _masked(logits_XV: Array, masks_MW: Array, mask_X: Array) -> Array:
    """Masks what the bits of each row's mask forbid; a row below 0 has none."""
    words_XW = masks_MW[jnp.maximum(mask_X, 0)]
    bits_XW32 = words_XW[:, :, None] >> jnp.arange(32) & 1
    bits_XV = bits_XW32.reshape(len(mask_X), -1)[:, : logits_XV.shape[1]]
    return jnp.where((bits_XV == 1) | (mask_X < 0)[:, None], logits_XV, -jnp.inf)


def _argmax(x_XV: Array) -> Array:
    """`jnp.argmax` over the last axis, the first of equals; XLA makes vector code of this one."""
    last = x_XV.shape[-1] - 1
    highest = x_XV == jnp.max(x_XV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(highest, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def likeliest(
    logits_XV: Float[Array, "X V"], temperature_X: Float[Array, " X"], wanted: Array, most: int
) -> tuple[Int[Array, "X most"], Float[Array, "X most"]]:
    """The `wanted` (at most `most`) likeliest tokens of each row, and their logprobs.

    Logprobs are those that `sample` reports; of equals the lower id comes first. What is beyond
    `wanted` means nothing. One pass over the vocabulary for each, and none if `wanted` is 0:
    sorting it would cost more to compile than all the rest of a launch (`_nucleus`).
    """
    scaled_XV = logits_XV / jnp.where(temperature_X == 0, 1.0, temperature_X)[:, None]
    X, V = scaled_XV.shape

    def one(k: Array, state: tuple) -> tuple:
        left_XV, ids_XK, logps_XK = state
        token_X = _argmax(left_XV)
        highest_X = jnp.max(left_XV, axis=-1)
        left_XV = jnp.where(jnp.arange(V)[None] == token_X[:, None], -jnp.inf, left_XV)
        return left_XV, ids_XK.at[:, k].set(token_X), logps_XK.at[:, k].set(highest_X)

    start = scaled_XV, jnp.zeros((X, most), jnp.int32), jnp.zeros((X, most), jnp.float32)
    _, ids_XK, logps_XK = jax.lax.fori_loop(0, jnp.minimum(wanted, most), one, start)
    return ids_XK, logps_XK - jax.nn.logsumexp(scaled_XV, axis=-1)[:, None]


def logprob_of(
    logits_XV: Float[Array, "X V"], temperature_X: Float[Array, " X"], token_X: Int[Array, " X"]
) -> Float[Array, " X"]:
    """The logprobs of tokens that were given, as `sample` reports those that it draws."""
    scaled_XV = logits_XV / jnp.where(temperature_X == 0, 1.0, temperature_X)[:, None]
    chosen_X = jnp.take_along_axis(scaled_XV, token_X[:, None], axis=-1)[:, 0]
    return chosen_X - jax.nn.logsumexp(scaled_XV, axis=-1)


def _noise(seed_X2: Array, index_X: Array, vocab: int) -> Array:
    def one(seed_2: Array, index: Array) -> Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), (vocab,), jnp.float32)

    return jax.vmap(one)(seed_X2, index_X)


def sample(
    logits_XV: Float[Array, "X V"],
    temperature_X: Float[Array, " X"],
    top_p_X: Float[Array, " X"],
    seed_X2: UInt32[Array, "X 2"],
    index_X: Int[Array, " X"],
    masks_MW: Int[Array, "M W"] | None = None,
    mask_X: Int[Array, " X"] | None = None,
) -> tuple[Int[Array, " X"], Float[Array, " X"]]:
    """Draws one token per row by the Gumbel-max rule.

    Args:
      logits_XV: float32 at temperature 1; -inf where no token exists.
      temperature_X: 0 is greedy.
      index_X: how many tokens of the completion came before this one.
      masks_MW, mask_X: a bit for each token that may be drawn, and which of these masks a row
        has; below 0: none. top_p is a share of what may be drawn.
    Returns:
      (token int32, logprob float32).
    """
    greedy_X = temperature_X == 0
    scaled_XV = logits_XV / jnp.where(greedy_X, 1.0, temperature_X)[:, None]
    free_XV = scaled_XV
    if masks_MW is not None:
        free_XV = jax.lax.cond(
            jnp.any(mask_X >= 0), lambda: _masked(scaled_XV, masks_MW, mask_X), lambda: scaled_XV
        )
    cut_XV = jax.lax.cond(jnp.any(top_p_X < 1), lambda: _nucleus(free_XV, top_p_X), lambda: free_XV)
    noisy_XV = jax.lax.cond(
        jnp.all(greedy_X),
        lambda: cut_XV,
        lambda: jnp.where(
            greedy_X[:, None], cut_XV, cut_XV + _noise(seed_X2, index_X, logits_XV.shape[1])
        ),
    )
    token_X = _argmax(noisy_XV)
    chosen_X = jnp.take_along_axis(scaled_XV, token_X[:, None], axis=-1)[:, 0]
    return token_X, chosen_X - jax.nn.logsumexp(scaled_XV, axis=-1)
