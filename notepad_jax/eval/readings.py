"""The results of an evaluation on disk, reading by reading: an interrupted one resumes there.

`readings.jsonl` is a trace file (`reading.trace`): a line per finished reading, with the
memories it went through, and where it is asked for every turn. `identity.json` says what all
readings of a folder have in common. Above: programs; beside: measure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from notepad_jax.eval.measure import Item, Key, Result
from notepad_jax.reading.trace import Kept, MemoryChange, Spool, TraceFile
from notepad_jax.reading.turns import Turns
from notepad_jax.telemetry.identity import settle
from notepad_jax.types import Finish, Turn

READINGS, IDENTITY = "readings.jsonl", "identity.json"
# Keys that came later, with the value under which a reading is what it was before them.
OLDER = {
    "reading.heads": 1, "reading.order": "serial", "reading.passes": 1,
    "reading.again": False, "reading.exits": False, "reading.exit_after": 0,
}  # fmt: skip


class OpenTrace:
    """The trace of a reading that has not ended; `turns` is None where they are not kept."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.memories, self.turns = Spool(), turns

    def add(self, change: MemoryChange) -> None:
        """Appends a change of the memory."""
        self.memories.add(change)

    def turn(self, turn: Turn) -> None:
        """Appends a turn, where turns are kept."""
        if self.turns is not None:
            self.turns.add(turn)

    def kept(self) -> Kept | None:
        """Returns all turns, once; None where they are not kept."""
        return None if self.turns is None else self.turns.kept()


class OpenTraces:
    """The traces of readings that have not ended, and of which of them all turns are kept."""

    def __init__(self) -> None:
        self._under_way: dict[Key, OpenTrace] = {}
        self._whole: dict[Key, Callable[[], Turns]] = {}  # those with turns that are kept

    def keep_turns(self, items: Iterable[Item], turns: Callable[[], Turns]) -> None:
        """Has every turn of the readings of `items` kept in `turns()`, if they begin after this."""
        self._whole.update((item.key, turns) for item in items)

    def keeps_turns(self, item: Item) -> bool:
        """Whether every turn of a reading is kept."""
        return item.key in self._whole

    def trace_of(self, item: Item) -> OpenTrace:
        """Returns the trace of a reading that begins now."""
        whole = self._whole.get(item.key)
        trace = self._under_way[item.key] = OpenTrace(whole() if whole else None)
        return trace

    def ended(self, result: Result) -> OpenTrace:
        """Returns the trace of a reading that has ended, and forgets it; empty if it had none."""
        return self._under_way.pop(result.key, None) or OpenTrace()


class Readings(OpenTraces):
    """The results in a folder; use as `with`. Opening it takes up what is there.

    A reading that failed is not taken up: going on makes it again. Raises ValueError if the
    folder's readings have another identity (of policy and settings; JSON values), and for a line
    that is no reading, naming file and line.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        settle(folder / IDENTITY, identity, "begin a run of another name", OLDER)
        super().__init__()
        self._number: dict[Key, int] = {}
        self._done: dict[Key, Result] = {}
        self._file = TraceFile(folder / READINGS)
        for number, fields in self._file.readings():
            self._take_up(number, fields)

    def __enter__(self) -> Readings:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()

    def missing(self, items: Iterable[Item]) -> list[Item]:
        """Returns the items that have no result yet, in their order.

        Raises ValueError for a result whose question, gold answers or metric are not the item's.
        """
        left = []
        for item in items:
            done = self._done.get(item.key)
            if done is None:
                left.append(item)
            elif (done.question, done.gold, done.metric) != (
                item.task.question, item.task.answers, item.task.metric
            ):  # fmt: skip
                raise ValueError(
                    f"task {item.task.id!r} was read in {self._folder} with another question, "
                    "other gold answers or another metric; begin a run of another name"
                )
        return left

    def of(self, items: Iterable[Item]) -> list[Result]:
        """Returns the results of `items`, in their order; KeyError if one is missing."""
        return [self._done[item.key] for item in items]

    def all(self) -> list[Result]:
        """Returns every result, as they were written."""
        return list(self._done.values())

    def add(self, result: Result) -> None:
        """Writes a finished reading and its memories."""
        trace = self.ended(result)
        self.take(result, trace.memories, trace.kept())

    def take(self, result: Result, memories: Spool, turns: Kept | None) -> None:
        """Writes a finished reading with its memories, and its turns where they are kept."""
        number = self._file.add(told(result), memories, turns)
        self._done[result.key], self._number[result.key] = result, number

    def trace(self, result: Result) -> Iterator[MemoryChange]:
        """Reads back how the memory of a reading changed."""
        return self._file.memories(self._number[result.key])

    def _take_up(self, number: int, fields: dict[str, Any]) -> None:
        try:
            result = understood(fields)
        except (ValueError, KeyError, TypeError):
            raise self._file.broken(number) from None
        self._done.pop(result.key, None)
        if not result.failed:
            self._done[result.key], self._number[result.key] = result, number


def results_in(folder: Path) -> list[Result]:
    """Returns every reading that a run's folder has, failed ones too; raises as `TraceFile`."""
    with TraceFile(folder / READINGS) as file:
        return [understood(fields) for _, fields in file.readings()]


def told(result: Result) -> dict[str, Any]:
    """Returns a result as JSON values."""
    return dataclasses.asdict(result) | {"finish": result.finish.value}


def understood(fields: Mapping[str, Any]) -> Result:
    """Returns the result that `told` told. Raises ValueError, KeyError or TypeError for others."""
    said = {name: tuple(fields[name]) for name in ("gold", "evidence") if name in fields}
    return Result(**{**fields, **said, "finish": Finish(fields["finish"])})
