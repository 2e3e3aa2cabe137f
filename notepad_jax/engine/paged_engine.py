"""The engine: a JetStream `Engine` over a paged cache, and its packed path for rollouts.

JetStream's verbs are all here (`prefill` one prompt, `insert` it into a slot, `generate`
for all slots), so its orchestrator can serve this engine. Rollouts use the packed verbs
beside them: `cache_prefixes` reads shared prefixes once, `prefill_packed` continues them
with many tails in one launch and verifies their drafts, `insert_packed` gives the unfinished
ones a slot. Both paths end in the same slots and the same `generate`.

Parameters are an argument of every call that runs the policy; the engine holds none. Device
work is in `launches`, the arrays they take are laid out by `layout`, and page numbers come
from `pages`; this file decides what is read when, and remembers who sits in which slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.engine import jetstream_compat, launches, layout
from notepad_jax.engine.layout import Slot, Tail, bucket
from notepad_jax.engine.pages import CachedPrefix, PagePool, PrefixCache
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params
from notepad_jax.parallel import place, rules
from notepad_jax.types import SamplingParams, Tokens
from pallas_kernels import Pages, cache_head_size


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes of the engine. Memory of the cache is pages * page_size tokens."""

    slots: int  # sequences that decode at the same time
    page_size: int  # tokens per page
    pages: int  # pages of the cache, per layer
    max_prompt: int  # tokens of one prompt
    max_new_tokens: int  # tokens of one completion
    steps_per_launch: int  # tokens decoded per slot between two looks of the host
    row_tokens: int  # tail tokens packed behind one copy of a prefix, per launch
    cache_dtype: str = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"engine.{field.name} is {value}; it must be at least 1")
        need = -(-(self.max_prompt + self.max_new_tokens) // self.page_size)
        if self.pages < need:
            raise ValueError(
                f"engine.pages is {self.pages}, but one context of {self.max_prompt} + "
                f"{self.max_new_tokens} tokens needs {need} pages of {self.page_size}"
            )
        if self.row_tokens < self.max_new_tokens:
            raise ValueError(
                f"engine.row_tokens is {self.row_tokens}; it must hold at least one tail and its "
                f"draft of {self.max_new_tokens} tokens"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """JetStream's prefill result: the dense keys and values of one whole prompt."""

    kv: tuple[jax.Array, jax.Array]  # [L, 1, T, K, H] each
    tokens: jax.Array  # [T]
    length: int = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Started:
    """What a packed prefill found for one tail."""

    tail: Tail
    tokens: list[int]  # sampled, drafts that were right included
    logprobs: list[float]
    finished: bool
    first: int  # flat index of the tail's first token in its launch
    kv: Any  # the launch's keys and values


@dataclasses.dataclass
class DecodeState:
    """The cache and who is in it. Methods of the engine replace `pages` in place."""

    pages: Pages
    pool: PagePool
    prefixes: PrefixCache
    slots: list[Slot | None]

    @property
    def free_slots(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot is None]


class PagedEngine(jetstream_compat.Engine):
    """See the module. `sampling` is what JetStream's orchestrator gets, which sends none."""

    def __init__(
        self,
        config: PolicyConfig,
        settings: EngineSettings,
        sampling: SamplingParams,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.config, self.settings = config, settings
        self._sampling, self._tokenizer, self._mesh = sampling, tokenizer, mesh

    # ------------------------------------------------------------ JetStream's interface

    def load_params(self, params: Params) -> Params:
        return params

    def init_decode_state(self) -> DecodeState:
        c, s = self.config, self.settings
        size = cache_head_size(c.head_size)
        pages = Pages.zeros(c.layers, s.pages, c.kv_heads, s.page_size, size, s.cache_dtype)
        pages = place.commit(pages, self._cache_sharding(pages))
        pool = PagePool(s.pages)
        return DecodeState(pages, pool, PrefixCache(pool, s.page_size), [None] * s.slots)

    def _cache_sharding(self, pages: Pages) -> jax.sharding.Sharding:
        """Where the cache lives: on a mesh, each device has the heads that it computes."""
        if self._mesh is None:
            return place.first_device()
        axes = (None, None, "kv_heads", None, None)
        return rules.sharding(self._mesh, axes, pages.data.shape, rules.SERVING)

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> Prefix:
        """Runs one prompt; with `existing_prefix`, the prompt continues it."""
        if existing_prefix is not None:
            before = np.asarray(existing_prefix.tokens)[: existing_prefix.length]
            tokens = np.concatenate([before, np.asarray(padded_tokens)[:true_length]])
            kv_before, start = existing_prefix.kv, existing_prefix.length
        else:
            tokens, kv_before, start = np.asarray(padded_tokens)[:true_length], None, 0
        length = len(tokens)
        if length > self.settings.max_prompt:
            raise ValueError(
                f"a prompt of {length} tokens exceeds the engine's {self.settings.max_prompt}; "
                f"shorten it or raise engine.max_prompt"
            )
        fresh = tokens[start:]
        padded = np.zeros(bucket(len(fresh), self.settings.page_size), np.int32)
        padded[: len(fresh)] = fresh
        kv = launches.prefill_dense(self.config, params, kv_before, start, padded[None])
        whole = np.zeros(start + len(padded), np.int32)
        whole[:length] = tokens
        return Prefix(kv, jnp.asarray(whole), length)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefilled prompt into `slot`, replacing whatever was there."""
        state = decode_state
        self.free_slot(state, slot)
        # The last prompt token is decoded again: its launch samples the first new token.
        cached = prefix.length - 1
        new = self._private_slot(state, None, cached, self._sampling)
        new.token = int(np.asarray(prefix.tokens)[cached])
        new.position, new.remaining = cached, self._sampling.max_new_tokens
        state.slots[slot] = new
        source = np.arange(cached)
        self._insert_tokens(state, prefix.kv, [source], [self._flat(new.pages, source)], [], [])
        return state

    def generate(
        self, params: Params, decode_state: DecodeState
    ) -> tuple[DecodeState, jetstream_compat.Results]:
        """Decodes up to `steps_per_launch` tokens in every active slot."""
        state, steps = decode_state, self.settings.steps_per_launch
        active = [i for i, s in enumerate(state.slots) if s is not None and s.remaining > 0]
        tokens = np.zeros((len(state.slots), steps), np.int32)
        logprobs = np.zeros((len(state.slots), steps), np.float32)
        made = np.zeros(len(state.slots), np.int32)
        if active:
            slots = [state.slots[i] for i in active]
            tables = layout.page_tables(slots, self.settings.page_size)
            arrays = layout.slot_arrays(slots)
            state.pages, *out = launches.generate(
                self.config, params, state.pages, tables, arrays, steps
            )
            n = len(active)
            tokens[active], logprobs[active], made[active] = (x[:n] for x in jax.device_get(out))
            for i, slot in zip(active, slots, strict=True):
                self._advance(slot, tokens[i, : made[i]])
        lengths = np.array([0 if s is None else s.made for s in state.slots], np.int32)
        return state, jetstream_compat.results(tokens, logprobs, made, lengths)

    def get_prefix_destination_sharding(self) -> Any:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def get_tokenizer(self) -> Any:
        return jetstream_compat.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Any:
        if self._tokenizer is None:
            raise ValueError("this engine was built without a tokenizer; pass one to serve text")
        return self._tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        return self.settings.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.settings.max_prompt

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        return self._mesh

    @property
    def colocated_cpus(self) -> list[Any] | None:
        return None

    # ------------------------------------------------------------ the packed path

    def cache_prefixes(
        self, params: Params, state: DecodeState, prefixes: Sequence[Tokens], version: int
    ) -> list[CachedPrefix]:
        """Reads distinct prefixes that are not cached yet into pages, one launch per length."""
        Z = self.settings.page_size
        entries = [
            state.prefixes.add(PrefixCache.key(version, prefix), len(prefix)) for prefix in prefixes
        ]
        by_length: dict[int, list[int]] = {}
        for i, prefix in enumerate(prefixes):
            by_length.setdefault(bucket(-(-len(prefix) // Z)) * Z, []).append(i)
        for length, chosen in by_length.items():
            rows = bucket(len(chosen))
            tokens = np.zeros((rows, length), np.int32)
            table = np.full((rows, length // Z), self.settings.pages, np.int32)
            for r, i in enumerate(chosen):
                tokens[r, : len(prefixes[i])] = prefixes[i]
                table[r, : len(entries[i].pages)] = entries[i].pages
            state.pages = launches.prefill_prefixes(self.config, params, state.pages, tokens, table)
        return entries

    def prefill_packed(
        self, params: Params, state: DecodeState, tails: Sequence[Tail]
    ) -> list[Started]:
        """Continues prefixes with many tails, verifying drafts; results in the tails' order."""
        by_width: dict[int, list[int]] = {}
        for i, tail in enumerate(tails):
            width = 0 if tail.prefix is None else bucket(len(tail.prefix.pages))
            by_width.setdefault(width, []).append(i)
        started: list[Started | None] = [None] * len(tails)
        for width, chosen in by_width.items():
            done = self._prefill_rows(params, state, [tails[i] for i in chosen], width)
            for i, result in zip(chosen, done, strict=True):
                started[i] = result
        return started

    def insert_packed(
        self, state: DecodeState, started: Sequence[Started], slots: Sequence[int]
    ) -> None:
        """Gives each unfinished tail a slot; its prefix must stay until the slot is freed."""
        by_launch: dict[int, list[tuple[Started, int]]] = {}
        for result, slot in zip(started, slots, strict=True):
            by_launch.setdefault(id(result.kv), []).append((result, slot))
        for group in by_launch.values():
            sources, targets, copy_from, copy_to = [], [], [], []
            for result, index in group:
                tail, made = result.tail, len(result.tokens)
                cached = len(tail.tokens) + made - 1  # the newest token is not in the cache
                slot = self._private_slot(state, tail.prefix, cached, tail.sampling)
                slot.token, slot.made = result.tokens[-1], made
                slot.remaining = tail.sampling.max_new_tokens - made
                state.slots[index] = slot
                ragged = slot.private_len - cached
                sources.append(result.first + np.arange(cached))
                targets.append(self._flat(slot.pages, ragged + np.arange(cached)))
                if ragged:
                    start = tail.prefix.length - ragged
                    copy_from.append(self._flat(tail.prefix.pages, start + np.arange(ragged)))
                    copy_to.append(self._flat(slot.pages, np.arange(ragged)))
            self._insert_tokens(state, group[0][0].kv, sources, targets, copy_from, copy_to)

    def private_pages(self, tail: Tail) -> int:
        """An upper bound of the pages that `insert_packed` allocates for a tail."""
        ragged = tail.prefix.length % self.settings.page_size if tail.prefix is not None else 0
        return self._pages_for(ragged + len(tail.tokens) + 2 * tail.sampling.max_new_tokens)

    def free_slot(self, state: DecodeState, slot: int) -> None:
        """Returns a slot's private pages; its prefix is the caller's to release."""
        if state.slots[slot] is not None:
            state.pool.release(state.slots[slot].pages)
            state.slots[slot] = None

    # ------------------------------------------------------------ inside

    def _prefill_rows(
        self, params: Params, state: DecodeState, tails: Sequence[Tail], width: int
    ) -> list[Started]:
        """One launch for tails whose prefixes take at most `width` pages."""
        rows = layout.pack_tails(tails, width, self.settings.row_tokens)
        new, logp, kv = launches.prefill_tails(
            self.config, params, state.pages, rows.table, rows.lens, rows.tokens, rows.positions,
            rows.kv_end, rows.sample_at, rows.draws,
        )  # fmt: skip
        new, logp = jax.device_get((new, logp))
        started = []
        for tail, first, span in zip(tails, rows.first, rows.spans, strict=True):
            n = layout.accepted(new[span], tail)
            ids = new[span][:n].tolist()
            finished = ids[-1] in tail.sampling.stop_ids or n == tail.sampling.max_new_tokens
            started.append(Started(tail, ids, logp[span][:n].tolist(), finished, first, kv))
        return started

    def _private_slot(
        self, state: DecodeState, prefix: CachedPrefix | None, cached: int, sampling: SamplingParams
    ) -> Slot:
        """Allocates a slot's private pages: the prefix's ragged end, `cached` tokens, room."""
        ragged = prefix.length % self.settings.page_size if prefix is not None else 0
        count = self._pages_for(ragged + cached + sampling.max_new_tokens)
        state.prefixes.make_room(count)
        position = (prefix.length if prefix is not None else 0) + cached
        return Slot(
            prefix=prefix, pages=state.pool.allocate(count), private_len=ragged + cached,
            position=position, token=0, made=0, remaining=0, sampling=sampling,
        )  # fmt: skip

    def _pages_for(self, count: int) -> int:
        return -(-count // self.settings.page_size)

    def _flat(self, pages: Sequence[int], offsets: np.ndarray) -> np.ndarray:
        """Flat cache indices of a sequence's tokens."""
        Z = self.settings.page_size
        return np.asarray(pages, np.int64)[offsets // Z] * Z + offsets % Z

    def _insert_tokens(
        self, state: DecodeState, kv: Any, sources: list, targets: list, froms: list, tos: list
    ) -> None:
        nowhere = self.settings.pages * self.settings.page_size

        def padded(parts: list[np.ndarray], smallest: int, fill: int) -> np.ndarray:
            joined = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            size = bucket(len(joined), smallest, 1) if len(joined) else 0
            out = np.full(size, fill, np.int32)
            out[: len(joined)] = joined
            return out

        state.pages = launches.insert_tails(
            state.pages, kv, padded(sources, 64, 0), padded(targets, 64, nowhere),
            padded(froms, 64, 0), padded(tos, 64, nowhere),
        )  # fmt: skip

    @staticmethod
    def _advance(slot: Slot, new: np.ndarray) -> None:
        n = len(new)
        slot.private_len += n
        slot.position += n
        slot.made += n
        slot.token = int(new[-1])
        slot.remaining = 0 if slot.token in slot.sampling.stop_ids else slot.remaining - n
