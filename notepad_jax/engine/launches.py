"""What runs on the device: five pure functions, each one launch.

`prefill_prefixes` reads shared prefixes into whole pages. `prefill_tails` continues cached
prefixes with many tails packed into rows and samples at every position that the host asks
for: the last prompt token of each tail, and after each token of its draft. `insert_tails`
moves the tails that go on decoding into their slots' private pages. `generate` decodes all
slots, several tokens per launch, stopping early when every slot has stopped. `prefill_dense`
is JetStream's prefill: one prompt, keys and values not in pages yet.

Everything is static in shape; the host (`paged_engine`) rounds sizes up to a few buckets.
The cache is donated: each function returns the one that replaces it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from notepad_jax.engine.sampler import sample
from notepad_jax.model import attention, logprobs, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params
from pallas_kernels import Pages, PageTables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """How to sample at each of X positions."""

    temperature: Any  # float [X]
    top_p: Any  # float [X]
    seed: Any  # uint32 [X, 2]
    index: Any  # int32 [X]: tokens of the completion that come before


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotArrays:
    """The running state of B slots, as `generate` needs it."""

    token: Any  # int32 [B]: sampled, not yet in the cache
    position: Any  # int32 [B]: of `token`
    private_len: Any  # int32 [B]: private tokens in the cache
    remaining: Any  # int32 [B]: tokens that may still be sampled; 0 is an idle slot
    stop_ids: Any  # int32 [B, E]: -1 padded
    draws: Draws


@functools.partial(jax.jit, static_argnames="config", donate_argnames="pages")
def prefill_prefixes(
    config: PolicyConfig,
    params: Params,
    pages: Pages,
    tokens_RT: Int[Array, "R T"],
    table_RP: Int[Array, "R P"],
) -> Pages:
    """Fills whole pages with the keys and values of R prefixes that start a context."""
    R, T = tokens_RT.shape
    # Padding follows the prefix, so causality alone hides it from every real token.
    attend = attention.packed(config, jnp.full((R, T), T, jnp.int32))
    positions_RT = jnp.broadcast_to(jnp.arange(T), (R, T))
    k, v = policy.Policy(config, params).cache_entries(tokens_RT, positions_RT, attend)
    return pages.write_pages(k, v, table_RP)


@functools.partial(jax.jit, static_argnames="config")
def prefill_tails(
    config: PolicyConfig,
    params: Params,
    pages: Pages,
    table_RP: Int[Array, "R P"],
    lens_R: Int[Array, " R"],
    tokens_RT: Int[Array, "R T"],
    positions_RT: Int[Array, "R T"],
    kv_end_RT: Int[Array, "R T"],
    sample_at_X: Int[Array, " X"],
    draws: Draws,
) -> tuple[Int[Array, " X"], Float[Array, " X"], tuple[Array, Array]]:
    """Runs packed tails after cached prefixes and samples after the tokens `sample_at_X`.

    `sample_at_X` are flat indices into [R, T]. Returns (sampled tokens, their logprobs, the
    tails' keys and values, both [L, R, T, K, H]).
    """
    attend = attention.packed_after_prefix(config, pages, table_RP, lens_R, kv_end_RT)
    hidden_RTD, _, kv = policy.forward(config, params, tokens_RT, positions_RT, attend)
    hidden_XD = hidden_RTD.reshape(-1, config.width)[sample_at_X]
    logits_XV = logprobs.logits(config, params, hidden_XD)
    token_X, logprob_X = sample(logits_XV, draws.temperature, draws.top_p, draws.seed, draws.index)
    return token_X, logprob_X, kv


@functools.partial(jax.jit, static_argnames=("config", "start"))
def prefill_dense(
    config: PolicyConfig,
    params: Params,
    kv_before: tuple[Array, Array] | None,
    start: int,
    tokens_1T: Int[Array, "1 T"],
) -> tuple[Array, Array]:
    """Keys and values [L, 1, start + T, K, H] of a prompt whose first `start` tokens are known."""
    positions_1T = start + jnp.arange(tokens_1T.shape[1])[None]
    attend = attention.packed_after_dense(config, kv_before, start, tokens_1T.shape[1])
    k, v = policy.Policy(config, params).cache_entries(tokens_1T, positions_1T, attend)
    if kv_before is None:
        return k, v
    return tuple(
        jnp.concatenate([old[:, :, :start], new], axis=2)
        for old, new in zip(kv_before, (k, v), strict=True)
    )


@functools.partial(jax.jit, donate_argnames="pages")
def insert_tails(
    pages: Pages,
    kv: tuple[Array, Array],
    source_X: Int[Array, " X"],
    target_X: Int[Array, " X"],
    copy_from_Y: Int[Array, " Y"],
    copy_to_Y: Int[Array, " Y"],
) -> Pages:
    """Puts tail tokens (flat indices into [R, T]) at flat cache indices, then copies tokens.

    The copies carry the last, partly filled page of a shared prefix into a slot's own pages.
    """
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:])[:, source_X] for x in kv)
    pages = pages.write_tokens(k, v, jnp.arange(k.shape[0]), target_X)
    return pages.copy_tokens(copy_from_Y, copy_to_Y)


@functools.partial(jax.jit, static_argnames=("config", "steps"), donate_argnames="pages")
def generate(
    config: PolicyConfig,
    params: Params,
    pages: Pages,
    tables: PageTables,
    slots: SlotArrays,
    steps: int,
) -> tuple[Pages, Int[Array, "B steps"], Float[Array, "B steps"], Int[Array, " B"]]:
    """Decodes up to `steps` tokens in every slot.

    Returns (cache, tokens, logprobs, how many of each row's tokens are real).
    """
    B = slots.token.shape[0]

    def more(state: tuple) -> Array:
        step, _, _, remaining, *_ = state
        return (step < steps) & jnp.any(remaining > 0)

    def one(state: tuple) -> tuple:
        step, pages, token, remaining, made, tokens, logps = state
        active = remaining > 0
        lens = tables.shared_lens_B + slots.private_len + made + 1
        attend = attention.paged(tables, jnp.where(active, lens, 0))
        hidden_B1D, pages, _ = policy.forward(
            config, params, token[:, None], (slots.position + made)[:, None], attend, pages
        )
        draws = slots.draws
        new, logp = sample(
            logprobs.logits(config, params, hidden_B1D[:, 0]),
            draws.temperature, draws.top_p, draws.seed, draws.index + made,
        )  # fmt: skip
        tokens = tokens.at[:, step].set(jnp.where(active, new, 0))
        logps = logps.at[:, step].set(jnp.where(active, logp, 0.0))
        stopped = jnp.any(new[:, None] == slots.stop_ids, axis=1)
        made = made + active
        remaining = jnp.where(active & ~stopped, remaining - 1, 0)
        return step + 1, pages, jnp.where(active, new, token), remaining, made, tokens, logps

    start = (
        jnp.int32(0), pages, slots.token, slots.remaining, jnp.zeros(B, jnp.int32),
        jnp.zeros((B, steps), jnp.int32), jnp.zeros((B, steps), jnp.float32),
    )  # fmt: skip
    _, pages, _, _, made, tokens, logps = jax.lax.while_loop(more, one, start)
    return pages, tokens, logps, made
