"""ArrayRecord task files: random access, one row a record.

The form for training sets of many short documents, which are decoded whole, when asked
for; `admitted` looks at each of them once, when the file is opened. Above: files, and records,
which draws from them; below: rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from array_record.python import array_record_data_source, array_record_module

from notepad_jax.data import admission, rows, sources
from notepad_jax.data.admission import NO_TEXT, Fault, Memo, OnFault
from notepad_jax.data.rows import Pair
from notepad_jax.types import TextDocument


def write(name: str, pairs: Iterable[Pair]) -> int:
    """Writes a record a task to the local file `name`, each held whole; returns how many."""
    count = 0
    writer = array_record_module.ArrayRecordWriter(name, "group_size:1")
    try:
        for task, length in pairs:
            writer.write(b"".join(rows.written(task, length)))
            count += 1
    finally:
        writer.close()
    return count


class ArrayRecords(Sequence):
    """The tasks of an .array_record file, each decoded when it is asked for.

    It owns an open file. Indexing raises IndexError past the end and ValueError, naming
    file and record, for a record that is no task.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if not Path(path).is_file():
            raise ValueError(f"{path} is missing")
        try:
            self._records = array_record_data_source.ArrayRecordDataSource([path])
            self._count = len(self._records)
        except (RuntimeError, ValueError) as problem:
            raise ValueError(
                f"{path} is no whole ArrayRecord file ({sources.first_line(problem)}); "
                f"build or copy it again"
            ) from None
        if not self._count:
            raise ValueError(f"{path} has no tasks")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Pair:
        if not -self._count <= index < self._count:
            raise IndexError(f"{self._path} has {self._count} tasks; there is no number {index}")
        index %= self._count
        where = f"{self._path} record {index + 1}"
        try:
            raw = self._records[index]
        except (RuntimeError, ValueError) as problem:
            raise ValueError(
                f"{where} is broken ({sources.first_line(problem)}); copy the file again"
            ) from None
        columns = rows.parsed(raw, where)
        document = columns.pop("document", None)
        if not isinstance(document, str):
            raise Fault(f"{where} has no text under 'document'; every task needs one", NO_TEXT)
        if not document.strip():
            raise Fault(f"{where} has an empty document; remove it", NO_TEXT)
        name = f"{Path(self._path).name}:{index + 1}"
        pair = rows.task_of(columns, TextDocument(document), where, name)
        admission.check(pair[0], where)
        return pair


class Chosen(Sequence):
    """A subset of a file's tasks, read when they are asked for."""

    def __init__(self, pairs: Sequence[Pair], numbers: np.ndarray) -> None:
        self._pairs, self._numbers = pairs, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Pair:
        return self._pairs[int(self._numbers[index])]

    @property
    def held(self) -> bool:
        """Whether the tasks are in memory, but for their texts."""
        return in_memory(self._pairs)


def in_memory(pairs: Sequence[Pair]) -> bool:
    """Whether asking for a task reads no file."""
    return isinstance(pairs, list) or (isinstance(pairs, Chosen) and pairs.held)


def admitted(
    path: str | Path, records: ArrayRecords, on_fault: OnFault, memo: Memo = admission.anew
) -> Sequence[Pair]:
    """Returns the records that can be used, having read each; `on_fault` is told of the others.

    Raises ValueError for two records of one id, and for a file of which nothing is left.
    """

    def find() -> list[int]:
        wrong: list[int] = []
        known: dict[str, int] = {}
        for number in range(len(records)):
            try:
                task, _ = records[number]
            except Fault:
                wrong.append(number)
                continue
            first = known.setdefault(task.id, number)
            if first != number:
                raise ValueError(
                    f"{path} record {number + 1} has the id {task.id!r} of record {first + 1}; "
                    f"ids must differ"
                )
        return wrong

    found, first = memo(find), None
    for number in found:
        try:
            records[number]
        except Fault as fault:
            fault.place = number
            on_fault(fault)
            first = first or fault
    if len(found) == len(records):
        raise rows.nothing_left(path, len(found), first)
    return Chosen(records, np.delete(np.arange(len(records)), found)) if found else records
