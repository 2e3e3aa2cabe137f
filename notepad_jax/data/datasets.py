"""In-memory datasets as a task file: rows of lists, generators, data sets with random access.

A row is a mapping with `question`, `answers` (a text or several; also `answer`) and `document`
(also `context`), or a `Task`. What it has beside the columns of `rows` is kept under `extra`, for
rewards of the user's. Written down once, row by row, rows are what every file of tasks is: drawn
by ordinal, known by their bytes when a run goes on, gone on with from the command line, too. A
program can mend its rows, so none is left out: the first that has a fault is refused.
Above: `api`; below: files and rows.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, files, formats, rows
from notepad_jax.data.foreign import longbench_v2, memagent
from notepad_jax.types import Task, TextDocument

COLUMNS = (
    "answer",
    "answers",
    "id",
    "question",
    "answers",
    "source",
    "metric",
    "contract",
    "length",
    "evidence",
    "note_script",
)


def write(dataset: Any, path: Path) -> int:
    """Writes rows to the .jsonl file `path`, whole or not at all; returns how many.

    Anything with `__len__` and `__getitem__` is read by number (lists, Hugging Face datasets,
    grain sources), anything else from its beginning to its end. Raises ValueError naming the
    row, counted from 1, for what is no row.
    """
    return files.write(path, _tasks(dataset, path), itertools.repeat(0))


def settle(dataset: Any, path: Path, mended: bool = False) -> int:
    """As `write`, for a run that goes on: the rows must be those that `path` holds already.

    With `mended` they take the place of those. Raises ValueError naming the first row that is
    another one.
    """
    beside = path.with_name(f"again-{os.getpid()}-{path.name}")
    if not path.is_file():
        raise ValueError(
            f"there is no {path}: this run did not begin with rows that a program gave; leave them "
            f"out, and it goes on with its own files"
        )
    try:
        count = files.write(beside, _tasks(dataset, path), itertools.repeat(0))
        if mended:
            os.replace(beside, path)
        elif not filecmp.cmp(beside, path, shallow=False):
            with beside.open("rb") as now, path.open("rb") as then:
                pairs = enumerate(itertools.zip_longest(now, then), start=1)
                number = next(number for number, (a, b) in pairs if a != b)
            raise ValueError(
                f"row {number} is not the one that {path} holds; go on with the same rows in the "
                f"same order (or none, and those of the file are taken), say mended=True if rows "
                f"were mended where they stand, or begin another run"
            )
    finally:
        beside.unlink(missing_ok=True)
    return count


def _tasks(dataset: Any, path: Path) -> Iterator[Task]:
    number, what = 0, path.stem  # dataset or validation: the argument that they came as
    first: dict[str, int] = {}
    for number, row in enumerate(_rows(dataset, what), start=1):
        where = f"row {number} of the {what}"
        task = row if isinstance(row, Task) else _task(row, where, number, path.name)
        admission.check(task, where)
        if (other := first.setdefault(task.id, number)) != number:
            raise ValueError(f"{where} has the id {task.id!r}, as row {other}; ids must be unique")
        yield task
    if not number:
        raise ValueError(f"the {what} has no rows; give at least one")


def _rows(dataset: Any, what: str) -> Iterable[Any]:
    if hasattr(dataset, "iterrows"):
        raise ValueError(f"the {what} is a table; give its rows: table.to_dict('records')")
    if isinstance(dataset, Mapping):
        raise ValueError(f"the {what} is a mapping of {', '.join(map(str, dataset))}; give one")
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        return (dataset[number] for number in range(len(dataset)))
    if not isinstance(dataset, Iterable):
        raise ValueError(
            f"the {what} is of type {type(dataset).__name__}; give rows, a list of them"
        )
    return dataset


def _task(row: Any, where: str, number: int, file: str) -> Task:
    if not isinstance(row, Mapping):
        kind = type(row).__name__
        raise ValueError(f"{where} is of type {kind}, and no mapping of columns: {row!r:.80}")
    columns = {str(name): value for name, value in row.items()}
    text = columns.pop("document", None)
    if text is not None and isinstance(columns.get("context"), str):
        raise ValueError(f"{where} has two texts, 'document' and 'context'; keep one")
    text = columns.pop("context", None) if text is None else text
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} has no text under 'document' or 'context'; it has {list(row)}")
    columns = json.loads(_json(columns, where))
    columns = {
        name: value for name, value in columns.items() if not (value is None and name in COLUMNS)
    }
    found = rows.Row(number, columns, TextDocument(text))
    if not (memagent.matches(columns) or longbench_v2.matches(columns)):
        extra = columns.pop("extra", {})
        if not isinstance(extra, Mapping):
            raise ValueError(
                f"{where}: 'extra' must be an object with columns, it is {extra!r:.80}"
            )
        others = {name: columns.pop(name) for name in sorted(set(columns) - set(COLUMNS))}
        columns["extra"] = {**others, **extra}
    return formats.task_of(found, where, f"{file}:{number}")[0]


def _json(columns: Mapping[str, Any], where: str) -> str:
    for name, value in columns.items():
        try:
            json.dumps(value, default=_plain)
        except (TypeError, ValueError):
            raise ValueError(
                f"{where}: JSON cannot hold the column {name!r} of type {type(value).__name__}; "
                f"leave it out, or make it numbers and texts"
            ) from None
    return json.dumps(columns, default=_plain)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy, and whatever else knows how to be plain."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError
