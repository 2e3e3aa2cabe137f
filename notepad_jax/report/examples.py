"""Readings to look at: who read, and how the memory changed on the way to the answer.

The programs choose the examples; both pages show excerpts of them (`templates/pieces.html`),
and report.json has them whole. Below: `eval.measure`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from notepad_jax.eval.measure import Result
from notepad_jax.reading.trace import MemoryChange

FIRST_CHANGES, LAST_CHANGES = 8, 4  # memory changes of an example that are shown


@dataclasses.dataclass(frozen=True)
class Example:
    """One reading to look at, who read, and the memories it went through."""

    label: str  # such as "after RL" or "notepad, ruler/vt"
    result: Result
    memory_changes: Sequence[MemoryChange]  # in the order in which they happened


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """What a page shows of an example: of a memory that never rests, the first and last."""

    label: str
    result: Result
    first: Sequence[MemoryChange]
    hidden: int  # changes between the first and the last
    last: Sequence[MemoryChange]


def excerpt(example: Example) -> Excerpt:
    """Returns all changes of a memory, unless leaving some out saves more than one line."""
    changes = example.memory_changes
    hidden = len(changes) - FIRST_CHANGES - LAST_CHANGES
    if hidden <= 1:
        return Excerpt(example.label, example.result, changes, 0, ())
    first, last = changes[:FIRST_CHANGES], changes[-LAST_CHANGES:]
    return Excerpt(example.label, example.result, first, hidden, last)
