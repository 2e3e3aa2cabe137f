"""The packed rows of tails and drafts: planned, written, and what came of the drafts.

A plan is what neither pages nor noise change: who lies where, what is computed once for several,
where tokens are sampled. Readings whose memories stand still bring the same arrays turn after turn,
so that their rows are planned once. Pure numpy. Above: `executor`; beside: `layout`, which writes
what all launches have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from notepad_jax import packing
from notepad_jax.engine import launches, layout, masks
from notepad_jax.engine.scheduler import Context
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.engine.shapes import cover, prefix_pages, tail_widths
from notepad_jax.packing import PrefixWithTails, lay_out
from notepad_jax.types import SamplingParams, Tokens

LEAST = 8  # tokens that tails begin alike with to be computed together: pages are copied for it


class Tails(NamedTuple):
    """Tails of one packed row, each beginning as the one before it does."""

    members: list[int]  # which of the contexts
    common: list[int]  # of each, tokens that the one before it has, too
    tokens: int  # what they are written with


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


@dataclasses.dataclass(frozen=True, eq=False)
class RowPlan:
    """A row of tails behind one prefix, as far as neither pages nor noise change it.

    Pages are named by their place in a list: those of all members, one after the other.
    """

    members: list[int]  # which of the group's contexts
    rows: packing.Rows
    page: np.ndarray  # int64 [used]: in which of the pages each token is written
    offset: np.ndarray  # int32 [used]: and where in it
    copies: np.ndarray  # int64 [3, n]: page to copy (-1: the prefix's last one), own page, tokens
    sample_at: np.ndarray  # int32 [T]
    counts: np.ndarray  # int64 [members]: samples of each
    spans: list[slice]  # and which they are
    drafts: list[list[int]]  # of each, all of it


class RowPlans:
    """Plans the rows of turns behind one prefix; where a group has the same arrays, once.

    Readings whose memories stand still bring the same tails and drafts, turn after turn. Token
    ids are read-only (`types.tokens`).
    """

    KEPT = 64  # groups: more than an engine usually has side by side

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        # With the arrays that a key has the ids of: while they live nothing else has these.
        self._found: dict[Hashable, tuple[list[Tokens], list[RowPlan]]] = {}

    def of(self, contexts: Sequence[Context]) -> list[RowPlan]:
        """The rows of all `contexts` that bring more than one token (`decoded`)."""
        key = _start(contexts[0]), *[
            (id(c.tail), id(c.draft), len(c.pages), c.shares, c.sampling.stop_ids) for c in contexts
        ]  # fmt: skip
        if (found := self._found.get(key)) is None:
            arrays = [array for c in contexts for array in (c.tail, c.draft)]
            found = self._found[key] = arrays, self._planned(contexts)
            if len(self._found) > self.KEPT:
                del self._found[next(iter(self._found))]
        return found[1]

    def _planned(self, contexts: Sequence[Context]) -> list[RowPlan]:
        settings = self._settings
        group = [b for b, context in enumerate(contexts) if not decoded(context)]
        tails = alike(settings, contexts, group)
        plans = []
        for width, chosen in cover([one.tokens for one in tails], tail_widths(settings)):
            members = [b for i in chosen for b in tails[i].members]
            common = [same for i in chosen for same in tails[i].common]
            plans.append(row_plan(settings, [contexts[b] for b in members], common, width, members))
        return plans


def row_plan(
    settings: EngineSettings, contexts: Sequence[Context], common: Sequence[int], width: int,
    members: list[int],
) -> RowPlan:  # fmt: skip
    """The plan of one packed row of tails and drafts.

    A token is to be sampled after each tail's last prompt token and after each draft token.
    `common` is of each tail how many of its tokens the one before it has, too (`alike`).
    """
    Z, inputs = settings.page_size, [_input(context) for context in contexts]
    piece = PrefixWithTails(tails=inputs, start=_start(contexts[0]), common=common)
    rows = lay_out([[piece]], 1, width)
    first_page = [0, *itertools.accumulate(len(context.pages) for context in contexts)]
    counts = [len(ids) - len(c.tail) + 1 for c, ids in zip(contexts, inputs, strict=True)]
    ends = [0, *itertools.accumulate(counts)]
    sample_at = np.zeros(width, np.int32)
    at: np.ndarray = np.zeros(0, np.int64)
    pages, offsets, copies = [], [], []
    for x, (context, ids, same, end) in enumerate(
        zip(contexts, inputs, common, rows.ends.tolist(), strict=True)
    ):
        # Where in the row this tail's tokens are: its own, behind those that the last one has, too.
        at = np.concatenate([at[:same], np.arange(end - len(ids) + same, end)])
        sample_at[ends[x] : ends[x + 1]] = at[len(context.tail) - 1 :]
        # In the cache they are counted from the ragged ones on.
        page, offset = np.divmod(np.arange(context.ragged + same, context.ragged + len(ids)), Z)
        pages.append(first_page[x] + page)
        offsets.append(offset)
        # Each page that a tail's own tokens do not begin is a copy: of the tail's before it, which
        # has the same tokens, or of the prefix's last.
        copied = context.ragged + same
        for number in range(settings.pages_for(copied)):
            source = first_page[x - 1] + number if same else -1
            copies.append((source, first_page[x] + number, min(Z, copied - number * Z)))
    return RowPlan(
        members=members,
        rows=rows,
        page=np.concatenate(pages),
        offset=np.concatenate(offsets).astype(np.int32),
        copies=np.array(copies, np.int64).reshape(-1, 3).T,
        sample_at=sample_at,
        counts=np.array(counts),
        spans=[slice(first, end) for first, end in itertools.pairwise(ends)],
        drafts=[context.draft.tolist() for context in contexts],
    )


def tail_row(
    settings: EngineSettings, plan: RowPlan, contexts: Sequence[Context]
) -> launches.TailArrays:
    """The arrays of a planned row of tails; `contexts` are its members."""
    prefix, width = contexts[0].prefix, plan.rows.tokens.shape[1]
    table = np.zeros((1, prefix_pages(settings)), np.int32)
    pages = [page for context in contexts for page in context.pages]
    if prefix is not None:
        table[0, : len(prefix.pages)] = prefix.pages
        pages.append(prefix.pages[-1])
    own = np.array(pages, np.int32)
    target = np.full(width, settings.pages * settings.page_size, np.int32)
    target[: len(plan.page)] = own[plan.page] * settings.page_size + plan.offset
    source, to, count = plan.copies
    found = masks.found(settings, contexts)
    return launches.TailArrays(
        table=table,
        length=np.array([_start(contexts[0])], np.int32),
        tokens=plan.rows.tokens,
        positions=plan.rows.positions,
        kv_end=plan.rows.kv_end,
        target=target,
        copies=layout.copies((own[source], own[to], count), width),
        sample_at=plan.sample_at,
        samples=np.int32(plan.spans[-1].stop),
        draws=layout.draws(contexts, plan.counts, width, found),
        adapters=np.full((1, 1), contexts[0].sampling.adapters, np.int32),
        masks=found.bits,
    )


def _start(context: Context) -> int:
    """The position of a tail's first token."""
    return context.prefix.length if context.prefix is not None else 0


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


def accepted(sampled: list[int], draft: list[int], sampling: SamplingParams) -> int:
    """How many sampled tokens are accepted: each is right given the draft tokens before it.

    Of a draft that is scored as many as it has: it stands, whatever was sampled.
    """
    if sampling.scored:
        return len(draft)
    n, stops = 1, sampling.stop_ids
    while n < len(sampled) and sampled[n - 1] == draft[n - 1] and sampled[n - 1] not in stops:
        n += 1
    return min(n, sampling.max_new_tokens)
