"""Rows of data sets as they are published: jsonl, one JSON array, parquet; one row at a time.

For data sets whose rows can be parsed whole (HotpotQA, SQuAD, GoLongRL, LongMemEval). Rows
with one text of any length are read by `formats`, which leaves the texts where they lie. Above:
the readers in foreign; below: json_arrays, parquet and sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, json_arrays, parquet, sources
from notepad_jax.data.admission import Fault, OnFault


def rows(
    path: str | Path, on_fault: OnFault = admission.refuse
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number from 1, row) of a .jsonl, .json (one array of objects) or .parquet file.

    One row is held at a time (of parquet, a batch of 16). `on_fault` is told of rows with a column
    twice. Raises ValueError for anything that is not a table of JSON objects, or cut short.
    """
    name = str(path).lower()
    if name.endswith(".parquet"):
        yield from parquet.values(path)
        return
    if not name.endswith((".json", ".jsonl")):
        raise ValueError(f"{path} ends in none of .jsonl, .json and .parquet; rename or convert it")
    for number, _, _, row in spans(path):
        if isinstance(row, Fault):
            on_fault(row)
        else:
            yield number, row


def spans(
    path: str | Path, on_block: sources.OnBlock | None = None
) -> Iterator[tuple[int, int, int, dict[str, Any] | Fault]]:
    """Yields (row number from 1, its bytes [start, stop), row) of a .jsonl or .json file.

    For rows whose text is spread over them: a document comes back to these bytes (`row_at`). In
    the place of a row with a column twice, what is to be said of it. `on_block`, if given, is shown
    all bytes of the file, in order. Raises ValueError for what is no object, or cut short.
    """
    lines = str(path).lower().endswith(".jsonl")
    found = _line_spans(path, on_block) if lines else json_arrays.spans(path, on_block)
    for number, start, stop, row in found:
        if not isinstance(row, dict | Fault):
            raise ValueError(
                f"{path} row {number} is {type(row).__name__}, not an object with named columns"
            )
        yield number, start, stop, row


def row_at(path: str | Path, start: int, stop: int) -> Any:
    """Returns the JSON value at bytes [start, stop) of a file; ValueError if it has changed."""
    try:
        return json.loads(b"".join(sources.blocks(path, start, stop)))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(
            f"{path} changed after it was opened: bytes {start:,} to {stop:,} are no row any "
            f"more; start again"
        ) from None


def _line_spans(
    path: str | Path, on_block: sources.OnBlock | None
) -> Iterator[tuple[int, int, int, Any]]:
    for number, start, line in sources.open_lines(path, on_block=on_block):
        if line.strip():
            try:
                row = sources.parse(line, path, number, start)
            except Fault as fault:
                row = fault
            yield number, start, start + len(line), row
