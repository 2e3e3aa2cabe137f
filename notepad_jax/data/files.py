"""Task files: tasks written down, one JSON object each, and read back with lazy documents.

A `.jsonl` file has one task per line and documents of any length (`jsonl`); an
`.array_record` file holds the same objects with random access (`array_records`). The name
of a file says which it is. Above: formats, records, and the programs that build and
evaluate; below: jsonl, array_records and rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from notepad_jax.data import admission, array_records, jsonl, rows, sources
from notepad_jax.data.admission import OnFault
from notepad_jax.data.rows import Pair
from notepad_jax.telemetry.identity import sync
from notepad_jax.types import Task

FORMS = ("jsonl", "array_record")  # of task files, and how their names end


def write(path: str | Path, tasks: Iterable[Task], lengths: Iterable[int]) -> int:
    """Writes tasks and their lengths (tokens) to a .jsonl or .array_record file; returns how many.

    All or nothing: the file takes its name when it is whole. The same tasks give the same
    bytes. `lengths` may be endless (`itertools.repeat(8192)`), but not shorter than `tasks`.
    A document of a .jsonl is streamed; one of an .array_record is held whole.

    Raises ValueError for two tasks of one id, an empty document, text that is not Unicode
    (half a surrogate pair), or a path of another kind, in a bucket or not to be written to.
    """
    form = jsonl if _kind(path) == "jsonl" else array_records
    path = Path(_local(path))
    for stale in path.parent.glob(f".{path.name}.*.part"):  # of a writer that was killed
        stale.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = form.write(str(beside), _checked(path, tasks, lengths))
        sync(beside)
        os.replace(beside, path)
    except OSError as problem:
        raise ValueError(f"{path} cannot be written: {problem.strerror or problem}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    return count


def _checked(path: Path, tasks: Iterable[Task], lengths: Iterable[int]) -> Iterator[Pair]:
    """Pairs tasks with lengths, and refuses what a reader would."""
    known: set[str] = set()
    coming = iter(lengths)
    for task in tasks:
        if task.id in known:
            raise ValueError(f"{path}: two tasks have the id {task.id!r}; ids must be unique")
        known.add(task.id)
        for name in ("id", "source"):
            if not getattr(task, name):
                raise ValueError(f"{path}: task {task.id!r} has an empty {name}")
        admission.check(task, f"{path}: task {task.id!r}")
        length = next(coming, None)
        if length is None:
            raise ValueError(f"{path}: there are more tasks than lengths ({len(known) - 1})")
        yield task, int(length)


def read(
    path: str | Path, on_block: sources.OnBlock | None = None,
    on_fault: OnFault = admission.refuse,
) -> Sequence[Pair]:  # fmt: skip
    """Returns the tasks of a file with their lengths, in the file's order.

    `on_block`, if given, is shown all bytes of the file, in order; `on_fault` is told of every
    row that is left out (of an .array_record when it is asked for: `array_records.admitted`
    looks at all).

    A .jsonl (local or in a bucket) is scanned and checked as a whole, in memory that grows
    with the metadata and not with the documents; raises ValueError naming file and row for
    a missing column, a wrong type, an empty document, no gold answer, an id used twice,
    invalid JSON, a row cut short, bytes that are not UTF-8. An .array_record (local) is
    checked when it is opened for being one, and record by record when these are asked for.
    """
    if _kind(path) == "array_record":
        found = array_records.ArrayRecords(_local(path))
        if on_block is not None:
            for block in sources.blocks(path):
                on_block(block)
        return found
    return rows.pairs(path, Path(str(path)).name, jsonl.scan(path, on_block), _own, on_fault)


def _own(row: rows.Row, where: str, name: str) -> list[Pair]:
    return [rows.task_of(row.columns, row.document, where, name)]


def _kind(path: str | Path) -> str:
    name = str(path).lower()
    for form in FORMS:
        if name.endswith("." + form):
            return form
    raise ValueError(f"{path} is no task file; its name must end in .{' or .'.join(FORMS)}")


def _local(path: str | Path) -> str:
    if sources.is_remote(path):
        raise ValueError(
            f"{path}: task files are written, and ArrayRecord files read, on a local disk; "
            f"copy them to or from the bucket"
        )
    return str(path)
