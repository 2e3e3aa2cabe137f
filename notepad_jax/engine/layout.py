"""The host arrays of a launch: tails packed into rows, slots arranged by shared prefix.

Pure numpy, no device work: `paged_engine` decides what to run, this file writes it down in
the shapes that `launches` takes. Sizes are rounded up, since every new shape is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from notepad_jax.engine import launches
from notepad_jax.engine.pages import CachedPrefix
from notepad_jax.types import SamplingParams, Tokens
from pallas_kernels import PageTables

ROW_SLOTS = 16  # slots that read a shared prefix together; more are split, which bounds padding


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
class Tail:
    """One prompt to continue: a cached prefix (or none), private tokens, a draft."""

    prefix: CachedPrefix | None
    tokens: Tokens
    draft: Tokens
    sampling: SamplingParams


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


@dataclasses.dataclass(frozen=True)
class TailRows:
    """Tails packed into R rows of T tokens, each row behind one cached prefix (or none)."""

    table: np.ndarray  # int32 [R, P] pages of each row's prefix
    lens: np.ndarray  # int32 [R] tokens of each row's prefix
    tokens: np.ndarray  # int32 [R, T]
    positions: np.ndarray  # int32 [R, T]
    kv_end: np.ndarray  # int32 [R, T], counted within the row's tails
    sample_at: np.ndarray  # int32 [X] flat indices into [R, T]
    draws: launches.Draws  # of those X
    first: list[int]  # flat index of each tail's first token
    spans: list[slice]  # where each tail's samples lie among the X


def pack_tails(tails: Sequence[Tail], width: int, row_tokens: int) -> TailRows:
    """Packs tails, with their drafts, behind prefixes of at most `width` pages.

    A token is to be sampled after each tail's last prompt token and after each draft token.
    """
    rows: list[CachedPrefix | None] = []
    open_rows: dict[int, tuple[int, int]] = {}  # prefix -> (its last row, tokens used there)
    inputs: list[np.ndarray] = []
    place: list[tuple[int, int]] = []
    for i, tail in enumerate(tails):
        ends = len(tail.draft) and int(tail.draft[-1]) in tail.sampling.stop_ids
        inputs.append(np.concatenate([tail.tokens, tail.draft[:-1] if ends else tail.draft]))
        row, used = open_rows.get(id(tail.prefix), (-1, row_tokens))
        if used + len(inputs[i]) > row_tokens:
            row, used = len(rows), 0
            rows.append(tail.prefix)
        place.append((row, used))
        open_rows[id(tail.prefix)] = row, used + len(inputs[i])
    R = bucket(len(rows))
    T = bucket(max(p + len(x) for (_, p), x in zip(place, inputs, strict=True)), 64, 1)
    tokens, positions = np.zeros((R, T), np.int32), np.zeros((R, T), np.int32)
    kv_end = np.broadcast_to(np.arange(1, T + 1, dtype=np.int32), (R, T)).copy()
    table, lens = np.zeros((R, width), np.int32), np.zeros(R, np.int32)
    for r, prefix in enumerate(rows):
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
    first = [row * T + start for row, start in place]
    ends = np.cumsum([len(at) for at in sample_at])
    spans = [slice(end - len(at), end) for end, at in zip(ends, sample_at, strict=True)]
    return TailRows(table, lens, tokens, positions, kv_end, flat, _draws(entries, X), first, spans)


def accepted(sampled: np.ndarray, tail: Tail) -> int:
    """How many sampled tokens stand: each is right given the draft tokens before it."""
    n = 1
    while n < len(sampled) and sampled[n - 1] == tail.draft[n - 1]:
        if sampled[n - 1] in tail.sampling.stop_ids:
            break
        n += 1
    return min(n, tail.sampling.max_new_tokens)


def page_tables(slots: Sequence[Slot], page_size: int) -> PageTables:
    """Arranges slots in rows that share a prefix; at most ROW_SLOTS to a row."""
    Z = page_size
    rows: dict[tuple[int, int], list[int]] = {}
    seen: dict[int, int] = {}
    for b, slot in enumerate(slots):
        key = id(slot.prefix)
        nth = seen[key] = seen.get(key, -1) + 1
        rows.setdefault((key, nth // ROW_SLOTS), []).append(b)
    B = coarse(len(slots))
    R, M = coarse(len(rows)), ROW_SLOTS
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


def slot_arrays(slots: Sequence[Slot]) -> launches.SlotArrays:
    B = coarse(len(slots))
    token, position, private_len, remaining = np.zeros((4, B), np.int32)
    stops = np.full((B, max(len(s.sampling.stop_ids) for s in slots) or 1), -1, np.int32)
    for b, s in enumerate(slots):
        token[b], position[b] = s.token, s.position
        private_len[b], remaining[b] = s.private_len, s.remaining
        stops[b, : len(s.sampling.stop_ids)] = s.sampling.stop_ids
    draws = _draws([(s.sampling, s.made) for s in slots], B)
    return launches.SlotArrays(token, position, private_len, remaining, stops, draws)


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
