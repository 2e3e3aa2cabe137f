"""The host arrays of a launch: packed rows of prefixes and of tails, slots by shared prefix.

Pure numpy, no device work: `executor` decides what to run, this file writes it down in the
shapes that `launches` takes. Rows, their mask and their positions are `packing`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from notepad_jax.engine import launches, masks
from notepad_jax.engine.masks import Masks
from notepad_jax.engine.pages import CachedPrefix
from notepad_jax.engine.scheduler import Context
from notepad_jax.engine.settings import STOP_IDS, EngineSettings
from notepad_jax.engine.shapes import Decode, prefix_pages, private_pages
from notepad_jax.packing import PrefixWithTails, Rows, lay_out
from notepad_jax.types import NO_TOKENS
from pallas_kernels import PageTables


def prefix_row(
    settings: EngineSettings, prefixes: Sequence[CachedPrefix], width: int
) -> launches.PrefixArrays:
    """A packed row of prefixes one after the other, each rounded up to whole pages."""
    Z = settings.page_size
    # What fills up a prefix's last page lies behind it: no token of the prefix sees it.
    whole = [np.pad(p.tokens, (0, -p.length % Z)) if p.length % Z else p.tokens for p in prefixes]
    places = _places(tuple(map(len, whole)), width)
    ids = np.zeros((1, width), np.int32)
    ids[0, : places.used] = np.concatenate([NO_TOKENS, *whole])
    table = np.full((1, width // Z), settings.pages, np.int32)
    used = [page for prefix in prefixes for page in prefix.pages]
    table[0, : len(used)] = used
    adapters = np.zeros((1, width), np.int32)
    whose = np.repeat([p.adapters for p in prefixes], list(map(len, whole)))
    adapters[0, : len(whose)] = whose
    return launches.PrefixArrays(ids, places.positions, places.kv_end, table, adapters)


@functools.lru_cache(64)
def _places(lengths: tuple[int, ...], width: int) -> Rows:
    """The row of prefixes of such lengths, but for their tokens: most chunks are of one length."""
    empty = [PrefixWithTails(prefix=np.zeros(length, np.int32)) for length in lengths]
    return lay_out([empty], 1, width)


def copies(pages: Sequence[Any], size: int) -> launches.Copies:
    """Of each page to copy: which, where to, and how many of its tokens ([3, n])."""
    padded = np.zeros((3, size), np.int32)
    padded[:, : len(pages[0])] = pages
    return launches.Copies(*padded, np.int32(len(pages[0])))


def by_prefix(contexts: Sequence[Context]) -> list[list[int]]:
    """Which contexts read the same prefix by the same adapters, in order of first appearance."""
    groups: dict[tuple[int, int], list[int]] = {}
    for b, context in enumerate(contexts):
        groups.setdefault((id(context.prefix), context.sampling.adapters), []).append(b)
    return list(groups.values())


def decode_tables(
    settings: EngineSettings, contexts: Sequence[Context], shape: Decode
) -> PageTables:
    """Returns page tables for decode, with slots in rows that share a prefix."""
    Z, M = settings.page_size, shape.members
    table = np.zeros((shape.rows, prefix_pages(settings)), np.int32)
    lens, place = np.zeros(shape.rows, np.int32), np.zeros(shape.slots, np.int32)
    members = np.zeros((shape.rows, M), np.int32)
    private = np.zeros((shape.slots, private_pages(settings)), np.int32)
    rows = [
        group[first : first + M]
        for group in by_prefix(contexts)
        for first in range(0, len(group), M)
    ]
    for r, row in enumerate(rows):
        prefix = contexts[row[0]].prefix
        if prefix is not None:
            table[r, : len(prefix.pages)] = prefix.pages
            lens[r] = prefix.length // Z * Z
        members[r, : len(row)] = row
        place[row] = r * M + np.arange(len(row))
    for b, context in enumerate(contexts):
        private[b, : len(context.pages)] = context.pages
    return PageTables(table, lens, members, place, private)


def slot_arrays(
    settings: EngineSettings, contexts: Sequence[Context], slots: int
) -> launches.SlotArrays:
    """The decode state of running turns; one without a token begins with its prefix's last page.

    One with a grammar gets one token: what may follow it is not known yet.
    """
    token, position, private_len, remaining, adapters = np.zeros((5, slots), np.int32)
    stops = np.full((slots, STOP_IDS), -1, np.int32)
    begun = [
        (c.prefix.pages[-1], c.pages[0], c.ragged) for c in contexts if c.ragged and not c.tokens
    ]
    for b, c in enumerate(contexts):
        token[b], position[b] = c.newest, c.position
        private_len[b] = c.private_len
        remaining[b] = c.remaining if c.matcher is None else min(c.remaining, 1)
        adapters[b] = c.sampling.adapters
        stops[b, : len(c.sampling.stop_ids)] = c.sampling.stop_ids
    found = masks.found(settings, contexts)
    each = np.ones(len(contexts), np.int64)
    return launches.SlotArrays(
        token,
        position,
        private_len,
        remaining,
        stops,
        adapters,
        draws(contexts, each, slots, found),
        copies(np.array(begun, np.int32).reshape(-1, 3).T, slots),
        found.bits,
    )


def draws(
    contexts: Sequence[Context], counts: np.ndarray, size: int, found: Masks
) -> launches.Draws:
    """How the next tokens of each turn are sampled, so many of each; greedy ones fill up."""
    sampled, used = [c.sampling for c in contexts], int(counts.sum())
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seed, index = np.zeros((size, 2), np.uint32), np.zeros(size, np.int32)
    temperature[:used] = np.repeat([s.temperature for s in sampled], counts)
    top_p[:used] = np.repeat([s.top_p for s in sampled], counts)
    seeds = np.repeat(np.array([s.seed for s in sampled], np.uint64), counts)
    seed[:used, 0], seed[:used, 1] = seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)
    first = np.cumsum(counts) - counts - [c.made for c in contexts]
    index[:used] = np.arange(used) - np.repeat(first, counts)
    mask = None
    if found.bits is not None:
        mask = np.full(size, -1, np.int32)
        mask[:used] = np.repeat(found.which, counts)
    return launches.Draws(temperature, top_p, seed, index, mask)
