"""The engine: a JetStream `Engine` over a paged cache, and its packed path for rollouts.

JetStream's verbs are all here (`prefill` one prompt, `insert` it into a slot, `generate`
for all slots), so its orchestrator can serve this engine. Rollouts use the packed verbs
beside them: `cache_prefixes` reads shared prefixes once, `prefill_packed` continues them
with many tails in one launch and verifies their drafts, `insert_packed` gives the unfinished
ones a slot. Both paths end in the same slots and the same `generate`.

Parameters are an argument of every call that runs the policy; the engine holds none. Device
work is in `launches`; this file is the host side: which pages, which rows, which sizes. Sizes
are rounded up by `bucket`, so that a few compiled shapes serve all batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.engine import jetstream_compat, launches
from notepad_jax.engine.pages import CachedPrefix, PagePool, PrefixCache
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params
from notepad_jax.types import SamplingParams, Tokens
from pallas_kernels import Pages, PageTables


def bucket(size: int, smallest: int = 1, per_octave: int = 4) -> int:
    """Rounds up to a grid with `per_octave` sizes per doubling: at most 1/4 is padding."""
    if size <= smallest:
        return smallest
    step = max(1, 2 ** ((size - 1).bit_length() - 1) // per_octave)
    return -(-size // step) * step


def coarse(size: int) -> int:
    """Rounds up to 8, 32, 128, 512, ...: decode batches shrink often, and compile slowly."""
    rounded = 8
    while rounded < size:
        rounded *= 4
    return rounded


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
class Tail:
    """One prompt to continue: a cached prefix (or none), private tokens, a draft."""

    prefix: CachedPrefix | None
    tokens: Tokens
    draft: Tokens
    sampling: SamplingParams


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
class Slot:
    """A sequence that is decoding."""

    prefix: CachedPrefix | None
    pages: tuple[int, ...]
    private_len: int  # private tokens in the cache
    position: int  # of `token`
    token: int  # sampled last, not yet in the cache
    made: int  # tokens of the completion so far
    remaining: int
    sampling: SamplingParams


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


def _seed_words(seed: int) -> tuple[int, int]:
    return seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF


def _draws(entries: Sequence[tuple[SamplingParams, int]], size: int) -> launches.Draws:
    """Packs (sampling, tokens made so far) of each position, padded to `size` greedy ones."""
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seed, index = np.zeros((size, 2), np.uint32), np.zeros(size, np.int32)
    for x, (sampling, made) in enumerate(entries):
        temperature[x], top_p[x] = sampling.temperature, sampling.top_p
        seed[x], index[x] = _seed_words(sampling.seed), made
    return launches.Draws(temperature, top_p, seed, index)


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
        pages = Pages.zeros(c.layers, s.pages, c.kv_heads, s.page_size, c.head_size, s.cache_dtype)
        pool = PagePool(s.pages)
        return DecodeState(pages, pool, PrefixCache(pool, s.page_size), [None] * s.slots)

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
            tables, arrays = self._tables(slots), self._slot_arrays(slots)
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
        rows: list[tuple[CachedPrefix | None, list[int]]] = []
        open_rows: dict[int, tuple[int, int]] = {}  # prefix -> (row, tokens used)
        inputs: list[np.ndarray] = []
        place: list[tuple[int, int]] = []
        for i, tail in enumerate(tails):
            ends = len(tail.draft) and int(tail.draft[-1]) in tail.sampling.stop_ids
            inputs.append(np.concatenate([tail.tokens, tail.draft[:-1] if ends else tail.draft]))
            row, used = open_rows.get(id(tail.prefix), (-1, self.settings.row_tokens))
            if used + len(inputs[i]) > self.settings.row_tokens:
                row, used = len(rows), 0
                rows.append((tail.prefix, []))
            rows[row][1].append(i)
            place.append((row, used))
            open_rows[id(tail.prefix)] = row, used + len(inputs[i])
        R = bucket(len(rows))
        T = bucket(max(p + len(x) for (_, p), x in zip(place, inputs, strict=True)), 64, 1)
        tokens, positions = np.zeros((R, T), np.int32), np.zeros((R, T), np.int32)
        kv_end = np.broadcast_to(np.arange(1, T + 1, dtype=np.int32), (R, T)).copy()
        table, lens = np.zeros((R, width), np.int32), np.zeros(R, np.int32)
        for r, (prefix, _) in enumerate(rows):
            if prefix is not None:
                table[r, : len(prefix.pages)], lens[r] = prefix.pages, prefix.length
        sample_at: list[np.ndarray] = []
        entries: list[tuple[SamplingParams, int]] = []
        for tail, x, (row, first) in zip(tails, inputs, place, strict=True):
            here = slice(first, first + len(x))
            tokens[row, here], kv_end[row, here] = x, first + len(x)
            positions[row, here] = lens[row] + np.arange(len(x))
            n = len(x) - len(tail.tokens) + 1
            sample_at.append(row * T + first + len(tail.tokens) - 1 + np.arange(n))
            entries += [(tail.sampling, made) for made in range(n)]
        X = bucket(len(entries), 64, 1)
        flat = np.zeros(X, np.int32)
        flat[: len(entries)] = np.concatenate(sample_at)
        new, logp, kv = launches.prefill_tails(
            self.config, params, state.pages, table, lens, tokens, positions, kv_end, flat,
            _draws(entries, X),
        )  # fmt: skip
        new, logp = jax.device_get((new, logp))
        started, x = [], 0
        for tail, at, (row, first) in zip(tails, sample_at, place, strict=True):
            n = _accepted(new[x : x + len(at)], tail)
            ids = new[x : x + n].tolist()
            finished = ids[-1] in tail.sampling.stop_ids or n == tail.sampling.max_new_tokens
            started.append(
                Started(tail, ids, logp[x : x + n].tolist(), finished, row * T + first, kv)
            )
            x += len(at)
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

    def _tables(self, slots: Sequence[Slot]) -> PageTables:
        """Arranges slots in rows that share a prefix; at most 16 to a row bounds the padding."""
        Z = self.settings.page_size
        rows: dict[tuple[int, int], list[int]] = {}
        seen: dict[int, int] = {}
        for b, slot in enumerate(slots):
            key = id(slot.prefix)
            nth = seen[key] = seen.get(key, -1) + 1
            rows.setdefault((key, nth // 16), []).append(b)
        B = coarse(len(slots))
        R, M = coarse(len(rows)), 16
        shared = [(len(s.prefix.pages) if s.prefix is not None else 0) for s in slots]
        P = bucket(max(shared)) if any(shared) else 0
        Q = bucket(max(len(s.pages) for s in slots), 1, 1)
        table, lens = np.zeros((R, P), np.int32), np.zeros(R, np.int32)
        members, place = np.zeros((R, M), np.int32), np.zeros(B, np.int32)
        private = np.zeros((B, Q), np.int32)
        for r, row in enumerate(rows.values()):
            prefix = slots[row[0]].prefix
            if prefix is not None:
                table[r, : len(prefix.pages)] = prefix.pages
                lens[r] = prefix.length // Z * Z
            members[r, : len(row)] = row
            place[row] = r * M + np.arange(len(row))
        for b, slot in enumerate(slots):
            private[b, : len(slot.pages)] = slot.pages
        return PageTables(table, lens, members, place, private)

    def _slot_arrays(self, slots: Sequence[Slot]) -> launches.SlotArrays:
        B = coarse(len(slots))
        token, position, private_len, remaining = np.zeros((4, B), np.int32)
        stops = np.full((B, max(len(s.sampling.stop_ids) for s in slots) or 1), -1, np.int32)
        for b, s in enumerate(slots):
            token[b], position[b] = s.token, s.position
            private_len[b], remaining[b] = s.private_len, s.remaining
            stops[b, : len(s.sampling.stop_ids)] = s.sampling.stop_ids
        draws = _draws([(s.sampling, s.made) for s in slots], B)
        return launches.SlotArrays(token, position, private_len, remaining, stops, draws)

    @staticmethod
    def _advance(slot: Slot, new: np.ndarray) -> None:
        n = len(new)
        slot.private_len += n
        slot.position += n
        slot.made += n
        slot.token = int(new[-1])
        slot.remaining = 0 if slot.token in slot.sampling.stop_ids else slot.remaining - n


def _accepted(sampled: np.ndarray, tail: Tail) -> int:
    """How many sampled tokens stand: each is right given the draft tokens before it."""
    n = 1
    while n < len(sampled) and sampled[n - 1] == tail.draft[n - 1]:
        if sampled[n - 1] in tail.sampling.stop_ids:
            break
        n += 1
    return min(n, tail.sampling.max_new_tokens)
