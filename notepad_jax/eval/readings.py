"""Readings on disk, as they end: what an interrupted evaluation goes on from.

`readings.jsonl` has one line per finished reading. `traces.jsonl` has one line per change
of a memory: which chunk changed it, into what, how many tokens, after how many seconds,
and how much of the evidence it holds. While a reading goes on its trace lies in a
temporary file; when it ends, the trace is appended in one piece and then the reading's
line, which says where its trace stands. So whatever follows the last trace that is spoken
for belongs to a reading that never ended, and is cut off on resume. `identity.json` says
what all readings of a folder have in common. Above: programs; beside: measure.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from notepad_jax.eval.measure import Item, Key, MemoryChange, Result
from notepad_jax.telemetry.identity import settle
from notepad_jax.types import Finish

READINGS, TRACES, IDENTITY = "readings.jsonl", "traces.jsonl", "identity.json"
IN_MEMORY = 1 << 14  # bytes of an unfinished trace held before it moves to a temporary file


class Readings:
    """The results in a folder; use as `with`. Opening it takes up what is there.

    A reading that failed is not taken up: going on makes it again. Raises ValueError if the
    folder's readings have another identity (who reads, and how; JSON values), and for a line
    that is no reading, naming file and line.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        settle(folder / IDENTITY, identity, "begin a run of another name")
        self._traces: dict[Key, _Spool] = {}
        self._where: dict[Key, tuple[int, int]] = {}
        self._done: dict[Key, Result] = {}
        self._take_up()
        self._readings_file = (folder / READINGS).open("ab")
        self._traces_file = (folder / TRACES).open("ab")

    def __enter__(self) -> Readings:
        return self

    def __exit__(self, *_: object) -> None:
        for trace in self._traces.values():
            trace.file.close()
        self._readings_file.close()
        self._traces_file.close()

    def missing(self, items: Iterable[Item]) -> list[Item]:
        """Returns the items that have no result yet, in their order.

        Raises ValueError for a result whose question or gold answers are not the item's.
        """
        left = []
        for item in items:
            done = self._done.get(item.key)
            if done is None:
                left.append(item)
            elif (done.question, done.gold) != (item.task.question, item.task.answers):
                raise ValueError(
                    f"task {item.task.id!r} was read in {self._folder} with another question or "
                    "other gold answers; begin a run of another name"
                )
        return left

    def of(self, items: Iterable[Item]) -> list[Result]:
        """Returns the results of `items`, in their order; KeyError if one is missing."""
        return [self._done[item.key] for item in items]

    def all(self) -> list[Result]:
        """Returns every result, as they were written."""
        return list(self._done.values())

    def trace_of(self, item: Item) -> _Spool:
        """Returns where the memories of a reading that begins now are written."""
        spool = self._traces[item.key] = _Spool(item)
        return spool

    def add(self, result: Result) -> None:
        """Writes a finished reading and its trace."""
        start = self._traces_file.tell()
        spool = self._traces.pop(result.key, None)
        if spool is not None:
            spool.file.seek(0)
            shutil.copyfileobj(spool.file, self._traces_file)
            spool.file.close()
            self._traces_file.flush()
        place = (start, self._traces_file.tell())
        line = dataclasses.asdict(result) | {"finish": result.finish.value, "trace": place}
        self._readings_file.write(_json_line(line))
        self._readings_file.flush()
        self._done[result.key], self._where[result.key] = result, place

    def trace(self, result: Result) -> Iterator[MemoryChange]:
        """Reads back how the memory of a reading changed."""
        start, end = self._where[result.key]
        with (self._folder / TRACES).open("rb") as file:
            file.seek(start)
            while file.tell() < end:
                line = json.loads(file.readline())
                yield MemoryChange(**{f.name: line[f.name] for f in _CHANGE_FIELDS})

    def _take_up(self) -> None:
        path, traces = self._folder / READINGS, self._folder / TRACES
        whole, traced = 0, 0
        if not path.is_file():
            traces.unlink(missing_ok=True)
            return
        there = traces.stat().st_size if traces.is_file() else 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # killed in the middle of a line
                result, place = _parse(path, number, line)
                whole, traced = whole + len(line), max(traced, min(there, place[1]))
                if result.failed or place[1] > there:
                    self._done.pop(result.key, None)
                    continue
                self._done[result.key], self._where[result.key] = result, place
        with path.open("r+b") as file:
            file.truncate(whole)
        with traces.open("ab") as file:
            file.truncate(traced)


_CHANGE_FIELDS = dataclasses.fields(MemoryChange)


class _Spool:
    """The trace of a reading that has not ended."""

    def __init__(self, item: Item) -> None:
        self._name = {
            "task": item.task.id, "method": item.method, "length": item.length,
            "repeat": item.repeat,
        }  # fmt: skip
        self.file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)

    def add(self, change: MemoryChange) -> None:
        self.file.write(_json_line(self._name | dataclasses.asdict(change)))


def _json_line(value: object) -> bytes:
    # A policy may write lone surrogates; escaped, they are ASCII.
    return json.dumps(value, default=dict).encode("ascii") + b"\n"


def _parse(path: Path, number: int, line: bytes) -> tuple[Result, tuple[int, int]]:
    try:
        fields = json.loads(line)
        place = tuple(fields.pop("trace"))
        fields |= {"gold": tuple(fields["gold"]), "finish": Finish(fields["finish"])}
        return Result(**fields), place
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"line {number} of {path} is no reading of this version; begin a new run"
        ) from None
