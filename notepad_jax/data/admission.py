"""Validates the rows of task files: each is checked when its file is opened, before any step.

A fault of one row (nothing to read, an unknown metric, a column that stands twice) leaves that row
out, and a `RowCounts` counts it under its reason, with the first row of each; code that opens a
file for a program that can mend it says `refuse` instead. A fault of the file (cut short, no JSON,
ids that repeat, no row that can be used) is a plain ValueError for every caller. What takes long to
find out about a large file is remembered by its bytes. Above: rows and all that scans a file;
below: scoring, which has the names that a row may be judged by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from notepad_jax.scoring import extraction, metrics
from notepad_jax.telemetry import identity
from notepad_jax.types import Task

NO_TEXT, NO_QUESTION, NO_GOLD = "no text to read", "no question", "no gold answer"
METRIC, CONTRACT = "an unknown metric", "an unknown contract"
TYPE, TWICE = "a column of the wrong kind", "a column that stands twice"
BEFORE, LONG = "a fault when this run began", "a question that is too long"

RULES = 2  # another number where the same bytes may be judged otherwise
LARGE = 16 << 20  # bytes of a file of which is remembered what was found
ENTRIES = 64  # that are kept, the newest


class Fault(ValueError):
    """The error of one row of a file whose other rows can be used."""

    def __init__(self, problem: str, why: str = TYPE) -> None:
        super().__init__(problem)
        self.why = why  # in few words, for counting
        self.place: int | None = None  # among the rows of its file, from 0, once that is known


OnFault = Callable[[Fault], None]


def refuse(fault: Fault) -> None:
    """Raises the fault: no row may have one."""
    raise fault


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Rows that one reason leaves out."""

    why: str
    count: int
    first: str  # file, row, what is wrong with it and the mend


class RowCounts:
    """Counts the rows that are left out of all files that a command opens."""

    def __init__(self) -> None:
        self._found: dict[str, LeftOut] = {}

    def leave_out(self, fault: Fault) -> None:
        known = self._found.get(fault.why, LeftOut(fault.why, 0, str(fault)))
        self._found[fault.why] = dataclasses.replace(known, count=known.count + 1)

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """The rows left out, by reason, in the order in which they were met."""
        return tuple(self._found.values())

    @property
    def count(self) -> int:
        return sum(one.count for one in self.left_out)

    def lines(self, kept: int) -> list[str]:
        """Returns what is said of `kept` rows and of those left out; nothing where all are kept."""
        return [
            f"left out: {one.count:,} of {kept + self.count:,} rows, with {one.why}; the first is "
            f"{one.first}"
            for one in self.left_out
        ]


def check(task: Task, where: str) -> None:
    """Raises Fault, beginning with `where`, for a task that cannot be asked or judged."""
    if not isinstance(task.question, str) or not task.question.strip():
        raise Fault(f"{where} has a blank question: {task.question!r:.80}", NO_QUESTION)
    texts = isinstance(task.answers, tuple | list) and task.answers
    if not texts or not all(isinstance(gold, str) and gold.strip() for gold in task.answers):
        raise Fault(f"{where} has a blank gold answer: {task.answers!r:.80}", NO_GOLD)
    if not isinstance(task.metric, str) or task.metric not in metrics.METRICS:
        known = metrics.known()
        raise Fault(f"{where}: there is no metric {task.metric!r:.40}; use one of {known}", METRIC)
    if not isinstance(task.contract, str) or task.contract not in extraction.CONTRACTS:
        known = ", ".join(extraction.CONTRACTS)
        raise Fault(
            f"{where}: there is no contract {task.contract!r:.40}; use one of {known}", CONTRACT
        )
    if not all(fact.text.strip() for fact in task.evidence):
        raise Fault(f"{where} has evidence without a word; give the words to look for")


# ---------------------------------------------------------------- remembered by a file's bytes

Memo = Callable[[Callable[[], Any]], Any]


def anew(find: Callable[[], Any]) -> Any:
    """Returns what `find` finds: a `Memo` that remembers nothing."""
    return find()


def remembered(kind: str, digest: str, find: Callable[[], Any]) -> Any:
    """Returns what `find` found (JSON) of the bytes with this digest, now or in an earlier process.

    It lies among the user's caches. A folder that cannot be used, and an entry that cannot be
    read, cost the time of finding it again.
    """
    known = [RULES, sorted(metrics.METRICS), sorted(extraction.CONTRACTS), kind, digest]
    name = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    with contextlib.suppress(LookupError, RuntimeError, ValueError):  # RuntimeError: no home
        return identity.read_json(identity.caches() / "rows" / f"{name}.json", "")["found"]
    found = find()
    with contextlib.suppress(OSError, RuntimeError):
        folder = identity.caches() / "rows"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity.write_json(folder / f"{name}.json", {"found": found})
        entries = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime)
        for stale in entries[:-ENTRIES]:
            stale.unlink(missing_ok=True)
    return found
