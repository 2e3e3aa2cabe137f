"""The metric of tables, written as JSON: which rows are right, counted as a multiset.

A table is a list of rows, or an object whose `data` is that list (the form of GoLongRL's
tables), alone or in a Markdown fence; of several fences the last counts. A row is a list of
cells, a single cell, or an object; objects are compared by their keys where every row of
both tables is one, and by their values in the order written otherwise. Cells are compared
as folded text, except that numbers are numbers: 1, 1.0, "1" and 1e0 are one cell. Used by
metrics.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from notepad_jax.scoring import quantities
from notepad_jax.scoring.extraction import Malformed

_FENCE = re.compile(r"```[A-Za-z]{0,10}\s(.*?)```", re.DOTALL)


def row_iou(prediction: str, answers: Sequence[str]) -> float:
    """The best multiset Jaccard index of rows over the gold tables: common rows / all rows.

    Two empty tables are equal. Raises Malformed: `bad_json`, or `no_table` for JSON of
    another shape. Where the gold answer is no table every answer is worth 0.
    """
    said = _rows(prediction)
    best = 0.0
    for gold in answers:
        try:
            best = max(best, _jaccard(said, _rows(gold)))
        except Malformed:
            continue
    return best


def _jaccard(said: list[Any], gold: list[Any]) -> float:
    by_key = all(isinstance(row, Mapping) for row in (*said, *gold))
    ours = Counter(_row(row, by_key) for row in said)
    theirs = Counter(_row(row, by_key) for row in gold)
    union = (ours | theirs).total()
    return (ours & theirs).total() / union if union else 1.0


def _rows(text: str) -> list[Any]:
    try:
        # Numbers stay as they were written: no float rounds them, no integer grows.
        table = json.loads(_unfenced(text), parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        raise Malformed("bad_json") from None
    if isinstance(table, Mapping):
        table = table.get("data")
    if not isinstance(table, list):
        raise Malformed("no_table")
    return table


def _unfenced(text: str) -> str:
    """The content of the last Markdown fence, if there is one, whatever stands around it."""
    fenced = _FENCE.findall(text)
    return fenced[-1] if fenced else text


def _row(row: Any, by_key: bool) -> Hashable:
    if by_key:
        cells = ((_folded(key), _cell(value)) for key, value in row.items())
        return tuple(sorted(cells, key=lambda cell: cell[0]))
    if isinstance(row, Mapping):
        row = list(row.values())
    return tuple(map(_cell, row)) if isinstance(row, list) else (_cell(row),)


def _cell(value: Any) -> Hashable:
    """A Fraction for a number, else folded text; null is empty, nested values are JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    number = quantities.number(text.strip())
    return _folded(text) if number is None else number


def _folded(text: str) -> str:
    return " ".join(text.lower().split())
