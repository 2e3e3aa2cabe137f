"""The host arrays of a launch: packed rows of prefixes and of tails, slots by shared prefix.

Pure numpy, no device work: `executor` decides what to run, this file writes it down in the
shapes that `launches` takes. Rows, their mask and their positions are `packing`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from notepad_jax import packing
from notepad_jax.engine import launches, masks
from notepad_jax.engine.masks import Masks
from notepad_jax.engine.pages import CachedPrefix
from notepad_jax.engine.scheduler import Context
from notepad_jax.engine.settings import STOP_IDS, EngineSettings
from notepad_jax.engine.shapes import Decode, prefix_pages, private_pages
from notepad_jax.packing import PrefixWithTails, lay_out
from notepad_jax.types import Tokens
from pallas_kernels import PageTables

LEAST = 8  # tokens that tails begin alike with to be computed together: pages are copied for it


class Tails(NamedTuple):
    """Tails of one packed row, each beginning as the one before it does."""

    members: list[int]  # which of the contexts
    common: list[int]  # of each, tokens that the one before it has, too
    tokens: int  # what they are written with


def prefix_row(
    settings: EngineSettings, prefixes: Sequence[CachedPrefix], width: int
) -> launches.PrefixArrays:
    """A packed row of prefixes one after the other, each rounded up to whole pages."""
    Z = settings.page_size
    # What fills up a prefix's last page lies behind it: no token of the prefix sees it.
    whole = [np.pad(p.tokens, (0, -p.length % Z)) for p in prefixes]
    rows = lay_out([[PrefixWithTails(prefix=ids) for ids in whole]], 1, width)
    table = np.full((1, width // Z), settings.pages, np.int32)
    used = [page for prefix in prefixes for page in prefix.pages]
    table[0, : len(used)] = used
    adapters = np.zeros((1, width), np.int32)
    whose = np.repeat([p.adapters for p in prefixes], list(map(len, whole)))
    adapters[0, : len(whose)] = whose
    return launches.PrefixArrays(rows.tokens, rows.positions, rows.kv_end, table, adapters)


def alike(
    settings: EngineSettings, contexts: Sequence[Context], group: Sequence[int]
) -> list[Tails]:
    """Gathers those of `group`, turns behind one prefix, whose tails begin alike.

    The members of a group that is sampled have the same question, and often the same memory.
    """
    found: dict[bytes | int, list[int]] = {}
    for b in group:
        context = contexts[b]
        own = not context.shares or len(context.tail) <= LEAST
        found.setdefault(b if own else context.tail[:LEAST].tobytes(), []).append(b)
    return [tails for members in found.values() for tails in _cut(settings, contexts, members)]


def _cut(settings: EngineSettings, contexts: Sequence[Context], members: list[int]) -> list[Tails]:
    """Sorts tails so that neighbours begin alike, and cuts them into what fits a row.

    A row has as many places for pages to copy and for tokens to sample as it has for tokens.
    """
    if len(members) == 1:
        return [Tails(members, [0], input_length(contexts[members[0]]))]
    inputs = {b: _input(contexts[b]) for b in members}
    members = sorted(members, key=lambda b: inputs[b].tobytes())
    out: list[Tails] = []
    tokens = copies = draws = 0
    for b, same in zip(members, packing.in_common([inputs[b] for b in members]), strict=True):
        context, length = contexts[b], len(inputs[b])
        drawn = 1 + len(_draft(context))
        tokens, draws = tokens + length - same, draws + drawn
        copies += settings.pages_for(context.ragged + same)
        if out and same >= LEAST and max(copies, draws) <= tokens <= settings.row_tokens:
            out[-1] = Tails([*out[-1].members, b], [*out[-1].common, same], tokens)
        else:
            tokens, copies, draws = length, 1, drawn
            out.append(Tails([b], [0], tokens))
    return out


def tail_row(
    settings: EngineSettings, contexts: Sequence[Context], common: Sequence[int], width: int
) -> tuple[launches.TailArrays, list[slice]]:
    """A packed row of tails and drafts behind one prefix; also where each one's samples will be.

    A token is to be sampled after each tail's last prompt token and after each draft token.
    `common` is of each tail how many of its tokens the one before it has, too (`alike`).
    """
    prefix = contexts[0].prefix
    start = prefix.length if prefix is not None else 0
    inputs = [_input(context) for context in contexts]
    rows = lay_out([[PrefixWithTails(tails=inputs, start=start, common=common)]], 1, width)
    table = np.zeros((1, prefix_pages(settings)), np.int32)
    if prefix is not None:
        table[0, : len(prefix.pages)] = prefix.pages
    target = np.full(width, settings.pages * settings.page_size, np.int32)
    sample_at = np.zeros(width, np.int32)
    counts = [
        len(ids) - len(context.tail) + 1 for context, ids in zip(contexts, inputs, strict=True)
    ]
    ends = list(itertools.accumulate(counts))
    at: np.ndarray = np.zeros(0, np.int64)
    for x, (context, ids, same, end) in enumerate(
        zip(contexts, inputs, common, rows.ends.tolist(), strict=True)
    ):
        # Where in the row this tail's tokens are: its own, behind those that the last one has, too.
        own = np.arange(end - len(ids) + same, end)
        at = np.concatenate([at[:same], own]) if same else own
        _place(settings, context, same, target[end - len(ids) + same : end])
        sample_at[ends[x] - counts[x] : ends[x]] = at[len(context.tail) - 1 :]
    found = masks.found(settings, contexts)
    arrays = launches.TailArrays(
        table=table,
        length=np.array([start], np.int32),
        tokens=rows.tokens,
        positions=rows.positions,
        kv_end=rows.kv_end,
        target=target,
        copies=_copies(_begun(settings, contexts, common), width),
        sample_at=sample_at,
        samples=np.int32(ends[-1]),
        draws=_draws(contexts, counts, width, found),
        adapters=np.full((1, 1), contexts[0].sampling.adapters, np.int32),
        masks=found.bits,
    )
    return arrays, [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _begun(
    settings: EngineSettings, contexts: Sequence[Context], common: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Of each page that a tail's own tokens do not begin: page to copy, its own page, tokens."""
    Z, found, before = settings.page_size, [], contexts[0]
    for context, same in zip(contexts, common, strict=True):
        if copied := context.ragged + same:
            source = before.pages if same else context.prefix.pages[-1:]
            for page in range(settings.pages_for(copied)):
                found.append((source[page], context.pages[page], min(Z, copied - page * Z)))
        before = context
    return found


def _copies(pages: Sequence[tuple[int, int, int]], size: int) -> launches.Copies:
    """Of each page to copy: which, where to, and how many of its tokens."""
    padded = np.zeros((3, size), np.int32)
    padded[:, : len(pages)] = np.array(pages, np.int32).reshape(-1, 3).T
    return launches.Copies(*padded, np.int32(len(pages)))


def decoded(context: Context) -> bool:
    """Whether a turn's tail is one token and nothing to verify: it is decoded, not prefilled."""
    return input_length(context) == 1


def input_length(context: Context) -> int:
    """How many tokens a turn brings into a tail row: its tail and its draft."""
    return len(context.tail) + len(_draft(context))


def _draft(context: Context) -> Tokens:
    """The draft, without a last stop token: nothing follows it."""
    draft = context.draft
    ends = len(draft) and int(draft[-1]) in context.sampling.stop_ids
    return draft[:-1] if ends else draft


def _input(context: Context) -> Tokens:
    return np.concatenate([context.tail, _draft(context)])


def _place(settings: EngineSettings, context: Context, first: int, out: np.ndarray) -> None:
    """Writes where in the cache a turn's tokens from `first` on belong, page by page.

    They are counted from the ragged ones on, and lie in the pages one after the other.
    """
    Z, at, done = settings.page_size, context.ragged + first, 0
    while done < len(out):
        page, offset = divmod(at + done, Z)
        begin, size = context.pages[page] * Z + offset, min(Z - offset, len(out) - done)
        out[done : done + size] = np.arange(begin, begin + size)
        done += size


def accepted(sampled: np.ndarray, context: Context) -> int:
    """How many sampled tokens are accepted: each is right given the draft tokens before it.

    Of a draft that is scored as many as it has: it stands, whatever was sampled.
    """
    if context.sampling.scored:
        return len(context.draft)
    n, stops = 1, context.sampling.stop_ids
    said, draft = sampled.tolist(), context.draft.tolist()
    while n < len(said) and said[n - 1] == draft[n - 1] and said[n - 1] not in stops:
        n += 1
    return min(n, context.sampling.max_new_tokens)


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
    draws = _draws(contexts, [1] * len(contexts), slots, found)
    return launches.SlotArrays(
        token,
        position,
        private_len,
        remaining,
        stops,
        adapters,
        draws,
        _copies(begun, slots),
        found.bits,
    )


def _draws(
    contexts: Sequence[Context], counts: Sequence[int], size: int, found: Masks
) -> launches.Draws:
    """How the next tokens of each turn are sampled, so many of each; greedy ones fill up."""
    who = [x for x, count in enumerate(counts) for _ in range(count)]
    sampled, used = [contexts[x].sampling for x in who], len(who)
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seed, index = np.zeros((size, 2), np.uint32), np.zeros(size, np.int32)
    temperature[:used] = [s.temperature for s in sampled]
    top_p[:used] = [s.top_p for s in sampled]
    seed[:used, 0] = [s.seed >> 32 & 0xFFFFFFFF for s in sampled]
    seed[:used, 1] = [s.seed & 0xFFFFFFFF for s in sampled]
    index[:used] = [c.made + k for c, n in zip(contexts, counts, strict=True) for k in range(n)]
    mask = None
    if found.bits is not None:
        mask = np.full(size, -1, np.int32)
        mask[:used] = [found.which[x] for x in who]
    return launches.Draws(temperature, top_p, seed, index, mask)
