"""The picture of a reading in rounds: each round's tree of turns, level by level.

The document's chunks are the lowest level, the merges of notes lie above, the memory is at the
top. A level of thousands of turns is drawn as at most `MOST` cells of several neighbours each, so
a picture fits its pane and every cell can be seen and pressed. All of it is decided here, from the
turns' records; the page's script puts it where it says. Above: trace_page; below: reading.trace.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from notepad_jax.reading.trace import TurnRecord

MOST = 100  # cells of a level


@dataclasses.dataclass(frozen=True)
class TreeCell:
    """A cell of neighbouring turns of one level; turns are counted as `Turn.chunk` does."""

    first: int
    last: int
    unit: int  # of the first: which chunk of its level it read
    opens: int  # the turn to look at: the first that lost a fact, or wrote a note, or is there
    notes: int  # turns that wrote one
    same: int  # of these, which say what an earlier one of the level says: no turn reads them
    holds: int  # of the evidence, facts that stand in these notes
    lost: int  # facts that a turn was shown and did not write down


@dataclasses.dataclass(frozen=True)
class Picture:
    """The picture of one round."""

    levels: tuple[tuple[TreeCell, ...], ...]  # the document's first
    lines: tuple[tuple[int, int, int], ...]  # level, cell, and the cell above that read its notes
    memory: tuple[int, int] | None  # level and cell whose note it became; None: it stayed


def pictures(turns: Sequence[TurnRecord], held: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the picture of each round, as JSON values; [] of a reading that was serial.

    `held` says of each turn which facts of the evidence stand in what it wrote, as "101".
    """
    updates = [pair for pair in zip(turns, held, strict=True) if pair[0].kind == "update"]
    if all(one.noted is None for one, _ in updates):
        return []
    facts = {one.chunk: held for one, held in updates}
    rounds = itertools.groupby((one for one, _ in updates), lambda one: one.round)
    return [dataclasses.asdict(_picture(list(some), turns, facts)) for _, some in rounds]


def _same(level: list[TurnRecord], turns: Sequence[TurnRecord]) -> set[int]:
    """Returns the turns of a level whose notes no turn read; of one that never ended, none."""
    if level[-1].chunk >= turns[-1].chunk:
        return set()
    read = {note for one in turns for note in one.reads}
    return {one.chunk for one in level if one.noted and one.chunk not in read}


def _picture(
    round_: list[TurnRecord], turns: Sequence[TurnRecord], held: dict[int, str]
) -> Picture:
    levels = [list(some) for _, some in itertools.groupby(round_, lambda one: one.level)]
    cells = [list(_cells(level)) for level in levels]
    place = {
        one.chunk: (k, n)
        for k, level in enumerate(cells)
        for n, cell in enumerate(level)
        for one in cell
    }
    lines = {
        (*place[below], place[one.chunk][1])
        for one in itertools.chain(*levels[1:])
        for below in one.reads
    }
    same = set().union(*(_same(level, turns) for level in levels))
    made = tuple(tuple(_cell(cell, held, same) for cell in level) for level in cells)
    return Picture(made, tuple(sorted(lines)), place.get(_writer(round_, turns)))


def _cells(level: list[TurnRecord]) -> Iterator[list[TurnRecord]]:
    each = -(-len(level) // MOST)
    for first in range(0, len(level), each):
        yield level[first : first + each]


def _writer(round_: list[TurnRecord], turns: Sequence[TurnRecord]) -> int:
    """Returns the turn whose note was the memory after the round; -1 where there is none."""
    following = next((one for one in turns if one.chunk > round_[-1].chunk), None)
    return following.reads[0] if following is not None and following.reads else -1


def _cell(turns: list[TurnRecord], held: dict[int, str], same: set[int]) -> TreeCell:
    noted = [one.chunk for one in turns if one.noted]
    lost = {one.chunk: len(_lost(one, held)) for one in turns}
    holds = {k for chunk in noted for k, fact in enumerate(held[chunk]) if fact == "1"}
    losing = [chunk for chunk, count in lost.items() if count]
    opens = [*losing, *noted, turns[0].chunk][0]
    return TreeCell(
        turns[0].chunk, turns[-1].chunk, turns[0].unit, opens, len(noted),
        len(same.intersection(noted)), len(holds), sum(lost.values()),
    )  # fmt: skip


def _lost(turn: TurnRecord, held: dict[int, str]) -> set[int]:
    """Returns the facts that it was shown in notes and that are nowhere in what it leaves."""
    if not turn.noted and turn.level <= 0:
        return set()  # the memory stays as it is
    shown = {k for note in turn.reads for k, fact in enumerate(held[note]) if fact == "1"}
    return {k for k in shown if not turn.noted or held[turn.chunk][k] != "1"}
