"""Rows of data sets as they are published: jsonl, one JSON array, parquet; one row at a time.

For data sets whose rows are short enough to be parsed whole (HotpotQA, SQuAD, GoLongRL). Rows
with texts of any length are read by `formats`, which leaves the texts where they lie. Above: the
readers in foreign; below: json_arrays, parquet and sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notepad_jax.data import json_arrays, parquet, sources


def rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number from 1, row) of a .jsonl, .json (one array of objects) or .parquet file.

    One row is held at a time (of parquet, a batch of 16). Raises ValueError for anything
    that is not a table of JSON objects, or cut short.
    """
    name = str(path).lower()
    if name.endswith(".parquet"):
        found = parquet.values(path)
    elif name.endswith(".json"):
        found = json_arrays.values(path)
    elif name.endswith(".jsonl"):
        found = _lines(path)
    else:
        raise ValueError(f"{path} ends in none of .jsonl, .json and .parquet; rename or convert it")
    for number, row in found:
        if not isinstance(row, dict):
            raise ValueError(
                f"{path} row {number} is {type(row).__name__}, not an object with named columns"
            )
        yield number, row


def _lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    for number, start, line in sources.open_lines(path):
        if line.strip():
            yield number, sources.parse(line, path, number, start)
