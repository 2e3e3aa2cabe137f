"""Task files with random access: one row a record (ArrayRecord).

The form for training sets of many short documents, which are decoded whole, when asked
for. Above: files, and records, which draws from them; below: rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from array_record.python import array_record_data_source, array_record_module

from notepad_jax.data import rows, sources
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
            raise ValueError(f"{where} has no text under 'document'; every task needs one")
        if not document.strip():
            raise ValueError(f"{where} has an empty document; remove it")
        name = f"{Path(self._path).name}:{index + 1}"
        return rows.task_of(columns, TextDocument(document), where, name)
