"""The jitted device functions of the engine, prefill and decode: each is one launch, and pure.

`read_prefixes` prefills a row of shared prefixes into whole pages. `start_tails` continues one
cached prefix (or none) with a row of packed tails, writes them into their own pages and
samples wherever the host asks: after the last prompt token of each tail, and after each token
of its draft. `generate` decodes all slots, several tokens per launch, stopping early when every
slot has stopped; a tail of one token begins there. `prefill_dense` and `insert_dense` are
JetStream's way: one prompt, keys and values not in pages yet.

Everything is static in shape (`shapes`), yet loops run as often as there is something to do.
The cache is donated: each function returns the one that replaces it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from notepad_jax.engine.sampler import likeliest, logprob_of, sample
from notepad_jax.model import attention, logprobs, lora, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params
from pallas_kernels import Pages, PageTables

SAMPLED = 64  # the most positions of a row that are sampled at once; their logits are [64, V]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """The sampling parameters of each of X positions."""

    temperature: Any  # float [X]
    top_p: Any  # float [X]
    seed: Any  # uint32 [X, 2]
    index: Any  # int32 [X]: tokens of the completion that come before
    mask: Any = None  # int32 [X]: which of a launch's masks; below 0: none. None: no launch has any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of the first tokens of pages, one after the other: the first `count` of Y."""

    source: Any  # int32 [Y]: pages
    target: Any  # int32 [Y]
    tokens: Any  # int32 [Y]: of a page, from its first on
    count: Any  # int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotArrays:
    """The decode state of B slots, as `generate` needs it."""

    token: Any  # int32 [B]: sampled, not yet in the cache
    position: Any  # int32 [B]: of `token`
    private_len: Any  # int32 [B]: private tokens in the cache
    remaining: Any  # int32 [B]: tokens that may still be sampled; 0 is an idle slot
    stop_ids: Any  # int32 [B, E]: -1 padded
    adapters: Any  # int32 [B]: of several policies' (`lora.several`)
    draws: Draws
    copies: Copies  # of up to B pages, before anything is decoded
    masks: Any = None  # int32 [slots, W]: a bit for each token that may be drawn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixArrays:
    """A packed row of prefixes to prefill (`layout.prefix_row`)."""

    tokens: Any  # int32 [1, T]
    positions: Any  # int32 [1, T]
    kv_end: Any  # int32 [1, T]
    table: Any  # int32 [1, T / Z]: the page of each Z tokens; one past the cache's end for none
    adapters: Any  # int32 [1, T]: each prefix's own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TailArrays:
    """A packed row of tails to prefill behind one cached prefix (`tail_rows.tail_row`)."""

    table: Any  # int32 [1, P] pages of the prefix
    length: Any  # int32 [1] tokens of the prefix
    tokens: Any  # int32 [1, T]
    positions: Any  # int32 [1, T]
    kv_end: Any  # int32 [1, T], counted within the tails
    target: Any  # int32 [T]: flat cache index of each token; past the cache's end for none
    copies: Copies  # of up to T pages, once all is written
    sample_at: Any  # int32 [T]: after which tokens to sample, the first `samples`
    samples: Any  # int32
    draws: Draws  # of those T
    adapters: Any  # int32 [1, 1]: all tails'
    masks: Any = None  # int32 [slots, W], as `SlotArrays` has them


@functools.partial(jax.jit, static_argnames="config", donate_argnames="pages")
def read_prefixes(config: PolicyConfig, params: Params, pages: Pages, row: PrefixArrays) -> Pages:
    """Prefills prefixes that start a context: fills whole pages with their keys and values."""
    attend = attention.packed(config, row.kv_end, row.positions)
    adapted = lora.chosen(params, row.adapters)
    k, v = policy.Policy(config, adapted).cache_entries(row.tokens, row.positions, attend)
    return attention.write_pages(pages, k, v, row.table)


@functools.partial(jax.jit, static_argnames=("config", "most"), donate_argnames="pages")
def start_tails(
    config: PolicyConfig,
    params: Params,
    pages: Pages,
    row: TailArrays,
    wanted: Array | None = None,
    most: int = 0,
) -> tuple[Array | Pages, ...]:
    """Prefills packed tails after a cached prefix and samples after the tokens `row.sample_at`.

    Each token is written once. Then the tokens of the page in which the prefix ends are copied into
    each tail's first page; a tail that begins as the one before it does gets a copy of all that is
    before its own tokens, instead. Returns (cache, sampled tokens [T], their logprobs [T]); only
    the first `row.samples` mean anything.
    With `most` above 0 also the ids and logprobs [T, most] of the `wanted` likeliest, and the
    logprobs [T] of the tokens that follow in the row.
    """
    attend = attention.packed_after_prefix(
        config, pages, row.table, row.length, row.kv_end, row.positions
    )
    adapted = lora.chosen(params, row.adapters)
    hidden_1TD, _, (k, v), _ = policy.forward(config, adapted, row.tokens, row.positions, attend)
    pages = attention.write_tokens(pages, k, v, row.target)
    pages = _copied(pages, row.copies)
    return pages, *_sample_after(config, params, hidden_1TD[0], row, wanted, most)


def _copied(pages: Pages, copies: Copies) -> Pages:
    def one(y: Array, pages: Pages) -> Pages:
        return attention.copy_page(pages, copies.source[y], copies.target[y], copies.tokens[y])

    return jax.lax.fori_loop(0, copies.count, one, pages)


def _sample_after(
    config: PolicyConfig, params: Params, hidden_TD: Array, row: TailArrays,
    wanted: Array | None, most: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Samples in blocks, as many as there are: logits of a whole row may not fit in memory."""
    T = hidden_TD.shape[0]
    size = min(T, SAMPLED)
    padded = -(-T // size) * size

    def whole_blocks(x: Array) -> Array:
        return jnp.pad(x, [(0, padded - T)] + [(0, 0)] * (x.ndim - 1))

    sample_at, draws = jax.tree.map(whole_blocks, (row.sample_at, row.draws))

    def block(i: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size)  # noqa: E731
        d = jax.tree.map(cut, draws)
        logits_XV = logprobs.logits(config, params, hidden_TD[cut(sample_at)])
        new = sample(logits_XV, d.temperature, d.top_p, d.seed, d.index, row.masks, d.mask)
        if most:
            next_X = jnp.roll(row.tokens[0], -1)[cut(sample_at)]
            following = logprob_of(logits_XV, d.temperature, next_X)
            new = *new, *likeliest(logits_XV, d.temperature, wanted, most), following
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, x, i * size, 0)
            for old, x in zip(done, new, strict=True)
        )

    shapes = ((padded,), (padded, most)) if most else ((padded,),)
    start = tuple(jnp.zeros(shape, t) for shape in shapes for t in (jnp.int32, jnp.float32))
    start += (jnp.zeros(padded),) if most else ()
    done = jax.lax.fori_loop(0, -(-row.samples // size), block, start)
    return tuple(x[:T] for x in done)


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
def insert_dense(pages: Pages, kv: tuple[Array, Array], target_T: Int[Array, " T"]) -> Pages:
    """Writes a dense prompt's keys and values at flat cache indices; past the end for none."""
    k, v = kv
    return attention.write_tokens(pages, k, v, target_T)


@functools.partial(jax.jit, static_argnames=("config", "steps", "most"), donate_argnames="pages")
def generate(
    config: PolicyConfig,
    params: Params,
    pages: Pages,
    tables: PageTables,
    slots: SlotArrays,
    steps: int,
    wanted: Array | None = None,
    most: int = 0,
) -> tuple[Array | Pages, ...]:
    """Decodes up to `steps` tokens in every slot, after it copied the pages that turns begin on.

    Returns (cache, tokens [B, steps], logprobs [B, steps], how many of each row's tokens are real
    [B]); with `most` above 0 also ids and logprobs [B, steps, most] of the `wanted` likeliest.
    """
    B = slots.token.shape[0]
    pages = _copied(pages, slots.copies)
    adapted = lora.chosen(params, slots.adapters[:, None])

    def more(state: tuple) -> Array:
        step, _, _, remaining, *_ = state
        return (step < steps) & jnp.any(remaining > 0)

    def one(state: tuple) -> tuple:
        step, pages, token, remaining, made, sampled = state
        active = remaining > 0
        lens = tables.shared_lens_B + slots.private_len + made + 1
        attend = attention.paged(config, tables, jnp.where(active, lens, 0))
        hidden_B1D, pages, _, _ = policy.forward(
            config, adapted, token[:, None], (slots.position + made)[:, None], attend, pages
        )
        draws = slots.draws
        logits_BV = logprobs.logits(config, params, hidden_B1D[:, 0])
        drawn = sample(
            logits_BV, draws.temperature, draws.top_p, draws.seed, draws.index + made,
            slots.masks, draws.mask,
        )  # fmt: skip
        new, more_of_it = drawn[0], ()
        if most:
            more_of_it = likeliest(logits_BV, draws.temperature, wanted, most)
        drawn = [jnp.where(active, x, 0) for x in drawn]
        sampled = tuple(
            x.at[:, step].set(one) for x, one in zip(sampled, (*drawn, *more_of_it), strict=True)
        )
        stopped = jnp.any(new[:, None] == slots.stop_ids, axis=1)
        made = made + active
        remaining = jnp.where(active & ~stopped, remaining - 1, 0)
        return step + 1, pages, jnp.where(active, new, token), remaining, made, sampled

    shapes = ((B, steps), (B, steps, most)) if most else ((B, steps),)
    nothing = tuple(jnp.zeros(shape, t) for shape in shapes for t in (jnp.int32, jnp.float32))
    made = jnp.zeros(B, jnp.int32)
    start = jnp.int32(0), pages, slots.token, slots.remaining, made, nothing
    _, pages, _, _, made, sampled = jax.lax.while_loop(more, one, start)
    return pages, *sampled[:2], made, *sampled[2:]
