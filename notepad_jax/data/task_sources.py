"""Task files opened for training: their tasks by source, and what is known of them before a step.

`by_source` opens files and takes a digest of their bytes in the same pass, so that a run goes on
with the files that it began with (`records.Records.check`). `without_long_questions` finds the
questions that no reading could hold here, where they are counted, and not in the step that draws
them. Above: records, which draws from them, and setup.task_stream; below: formats.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from notepad_jax.data import admission, formats, sources
from notepad_jax.data.admission import BEFORE, Fault, OnFault
from notepad_jax.data.array_records import Chosen
from notepad_jax.data.rows import Pair
from notepad_jax.telemetry.screen import Screen

PATIENCE = 2.0  # seconds that an activity may take before it shows a bar


@dataclasses.dataclass(frozen=True)
class TaskFile:
    """A task file as it was when it was opened: its digest, size and rows."""

    path: str
    digest: str  # sha256 of its bytes and its tasks' ids, the first 32 hexadecimal digits
    size: int = 0  # bytes
    rows: int = 0  # those left out included
    left_out: tuple[int, ...] = ()  # places of rows with a fault, from 0


@dataclasses.dataclass(frozen=True)
class TaskSources:
    """The opened task files of training: tasks by source, and their files. Never empty."""

    tasks: Mapping[str, Sequence[Pair]]
    files: Mapping[str, tuple[TaskFile, ...]]  # by source: those that hold its tasks, in order
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by source, if any
    held_out: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by source, if any
    held_out_by: str = ""  # documents or questions
    shared: int = 0  # of those held out, how many are about a document of others
    # By source, if any: not drawn, for they ask what is asked of a document that is held out.
    withheld: Mapping[str, int] = dataclasses.field(default_factory=dict)
    max_question: int | None = None  # tokens; longer ones are left out. None: not looked at


@dataclasses.dataclass(frozen=True)
class LongQuestions:
    """The questions of a source that were left out as too long."""

    source: str
    count: int
    total: int  # tasks of the source, those left out included
    longest_id: str  # the task with the longest question
    longest: int  # tokens


def by_source(
    paths: Iterable[str | Path],
    screen: Screen,
    on_fault: OnFault = admission.refuse,
    before: Sequence[Collection[int]] = (),
) -> TaskSources:
    """Opens files of tasks, of any known format, and sorts their tasks by `Task.source`.

    `on_fault` is told of every row that is left out, which are those with a fault and, of the k-th
    file, those that stand in the places before[k] (from 0), mended or not. An .array_record is one
    source, named after the file, since its records are not held. Every file is read once, with a
    bar if that takes a while, and what was found of a large one is remembered by its bytes. Raises
    ValueError for what `formats.read_any` refuses, for two ArrayRecord files of one name, and for
    a task id that stands in two files.
    """
    found: dict[str, Any] = {}
    files: dict[str, list[TaskFile]] = {}
    known: dict[str, str | Path] = {}
    for number, path in enumerate(paths):
        out = before[number] if number < len(before) else ()
        pairs, file = _opened(path, screen, on_fault, frozenset(out))
        if not isinstance(pairs, list):
            name = Path(path).stem
            if name in found:
                raise ValueError(f"{path}: there is a source {name!r} already; rename the file")
            found[name], files[name] = pairs, [file]
            continue
        for task, length in pairs:
            if task.id in known:
                raise ValueError(
                    f"{path} has task {task.id!r}, and so has {known[task.id]}; give each file "
                    f"once, and files of one name another one"
                )
            known[task.id] = path
            own = found.setdefault(task.source, [])
            if not isinstance(own, list):
                raise ValueError(f"{path}: an ArrayRecord file is named {task.source!r}, too")
            own.append((task, length))
        for name in {task.source for task, _ in pairs}:
            files.setdefault(name, []).append(file)
    return TaskSources(found, {name: tuple(own) for name, own in files.items()})


def _opened(
    path: str | Path, screen: Screen, on_fault: OnFault, out: frozenset[int]
) -> tuple[Sequence[Pair], TaskFile]:
    digest, seen = hashlib.sha256(), 0
    known = not sources.is_remote(path) and Path(path).is_file()
    size = Path(path).stat().st_size if known else None
    bar = LateBar(screen, f"opening {Path(path).name}", size, "bytes")

    def on_block(block: bytes) -> None:
        nonlocal seen
        digest.update(block)
        seen += len(block)
        bar.advance(len(block))

    def memo(find: Callable[[], Any]) -> Any:  # is asked when all bytes have been seen
        kind = str(path).lower().rpartition(".")[2]
        return remembered(kind, digest.hexdigest(), seen, find)

    faulty: set[int] = set()

    def leave_out(fault: Fault) -> None:
        faulty.add(fault.place)
        on_fault(fault)

    pairs = formats.read_any(path, on_block, on_fault=leave_out, memo=memo)
    bar.finish()
    rows = len(pairs) + len(faulty)
    if mended := [place for place in sorted(out - faulty) if place < rows]:
        there = [place for place in range(rows) if place not in faulty]
        kept = [number for number, place in enumerate(there) if place not in out]
        for place in mended:
            faulty.add(place)
            on_fault(Fault(f"{path} row {place + 1}, which a new run would draw", BEFORE))
        pairs = _some(pairs, kept)
    if isinstance(pairs, list):  # ids that a path tells (RULER's) decide a reading's noise, too
        for task, _ in pairs:
            digest.update(json.dumps(task.id).encode())
    file = TaskFile(str(path), digest.hexdigest()[:32], seen, rows, tuple(sorted(faulty)))
    return pairs, file


def _some(pairs: Sequence[Pair], numbers: Sequence[int]) -> Sequence[Pair]:
    if isinstance(pairs, list):
        return [pairs[number] for number in numbers]
    return Chosen(pairs, np.array(numbers, np.int64))


def remembered(kind: str, digest: str, size: int, find: Callable[[], Any]) -> Any:
    """As `admission.remembered`, of so many bytes; what of few is found is not written down."""
    if size < admission.LARGE:
        return find()
    return admission.remembered(kind, digest, find)


def shares(tasks: Mapping[str, Sequence[Any]], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the weight of every source that is to be drawn from, in order of name.

    A source that is not in `weights` has 1; one of weight 0 is left out. Raises ValueError for
    a weight of nothing, or below 0, and where no source is left.
    """
    for name, weight in weights.items():
        if name not in tasks:
            raise ValueError(f"no source {name!r} to weigh; there are {', '.join(sorted(tasks))}")
        if not 0 <= weight < float("inf"):
            raise ValueError(f"the weight of {name!r} is {weight}; it must be 0 or more")
    found = {name: float(weights.get(name, 1)) for name in sorted(tasks)}
    found = {name: weight for name, weight in found.items() if weight}
    if not found:
        raise ValueError("there is no source to draw from; give a file, or a weight above 0")
    return found


# ---------------------------------------------------------------- questions that are too long


def without_long_questions(
    opened: TaskSources,
    count: Callable[[str], int],
    limit: int,
    weights: Mapping[str, float],
    screen: Screen,
) -> tuple[TaskSources, tuple[LongQuestions, ...]]:
    """Leaves out the tasks whose question has more than `limit` tokens by `count`.

    Looks at every task of the sources that `weights` draws from (of an ArrayRecord file: reads
    every record), with a bar if that takes a while. Returns the sources, in which the others
    stand in their old order, and what was left out of each that lost something.

    Raises ValueError naming a source of which nothing would be left.
    """
    tasks, left_out, report = dict(opened.tasks), {}, []
    for name in shares(opened.tasks, weights):
        bar = LateBar(screen, f"questions of {name}", len(tasks[name]), "tasks")
        kept, long = _divided(name, tasks[name], count, limit, bar)
        if long is None:
            continue
        if not len(kept):
            raise ValueError(
                f"all {long.total:,} questions of source {name!r} have more than {limit:,} tokens "
                f"(the longest, task {long.longest_id!r}, {long.longest:,}); allow longer ones "
                f"(reading.max_question), or give it the weight 0"
            )
        tasks[name], left_out[name] = kept, long.count
        report.append(long)
    found = dataclasses.replace(opened, tasks=tasks, left_out=left_out, max_question=limit)
    return found, tuple(report)


def _divided(
    name: str, pairs: Sequence[Pair], count: Callable[[str], int], limit: int, bar: LateBar
) -> tuple[Sequence[Pair], LongQuestions | None]:
    """Returns the pairs that stay (`pairs` itself if all do), and what is told of the others."""
    kept: list[int] = []
    longest, longest_id = 0, ""
    for number in range(len(pairs)):
        task, _ = pairs[number]
        tokens = count(task.question)
        if tokens <= limit:
            kept.append(number)
        elif tokens > longest:
            longest, longest_id = tokens, task.id
        bar.advance(1)
    bar.finish()
    if not longest:
        return pairs, None
    long = LongQuestions(name, len(pairs) - len(kept), len(pairs), longest_id, longest)
    return _some(pairs, kept), long


class LateBar:
    """A bar that shows itself only where its activity takes more than `PATIENCE` seconds."""

    def __init__(self, screen: Screen, label: str, total: int | None, unit: str) -> None:
        self._begin = lambda: screen.bar(label, total, unit)
        self._bar = None
        self._done, self._began = 0, time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        if self._bar is not None:
            self._bar.advance(amount)
        elif time.monotonic() - self._began > PATIENCE:
            self._bar = self._begin()
            self._bar.advance(self._done)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.finish()
