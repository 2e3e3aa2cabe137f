"""Counts of readings without a plain answer: failed, malformed, or cut at a limit.

Both pages print it below their tables (`pieces.outcomes`). Below: `eval.summary`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from notepad_jax.eval.summary import Summary


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Counts over all lengths; all of them 0 for readings that are plain answers."""

    label: str  # the reader
    readings: int
    unanswered: int  # failed, or did not fit
    malformed: int  # empty, or not of the form asked for
    truncated: int

    @property
    def remarkable(self) -> bool:
        return bool(self.unanswered or self.malformed or self.truncated)


def outcomes(label: str, summaries: Sequence[Summary]) -> Outcomes:
    """Returns the counts of some summaries, added up."""
    n, unanswered, malformed, truncated = (
        sum(getattr(s, name) for s in summaries)
        for name in ("n", "unanswered", "malformed", "truncated")
    )
    return Outcomes(label, n, unanswered, malformed, truncated)
