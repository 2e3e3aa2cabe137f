"""Example readings for a page: which policy or method read, and how the memory changed.

`spread` chooses questions of every length, task and outcome, and the programs fetch their
traces. Readings of one question stand side by side: before and after learning, or one method
beside another. Of a memory that never rests the first and last changes are kept, so nothing
grows with the length of a document. Pages show them in `templates/pieces.html`, and
report.json has them too. Beside them stands how many have no plain answer (`Outcomes`).
Below: `eval.measure` and `eval.summary`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.measure import Result
from notepad_jax.eval.summary import Summary
from notepad_jax.reading.trace import MemoryChange
from notepad_jax.scoring import metrics
from notepad_jax.types import Finish

FIRST_CHANGES, LAST_CHANGES = 8, 4  # memory changes of an example that are kept
MOST = 40  # questions on a page

# How many read it, its length (the most and the longest come first), its task, each outcome.
Kind = tuple[int, int, str, tuple[tuple[str, str], ...]]

RIGHT, PARTLY, WRONG, NO_ANSWER = "right", "partly right", "wrong", "no answer"


@dataclasses.dataclass(frozen=True)
class Example:
    """An example reading: its reader, its result, and the memories it went through."""

    label: str  # the reader, such as "after RL" or "notepad"
    result: Result
    first: Sequence[MemoryChange]  # in the order in which they happened, as the last
    hidden: int  # changes between the first and the last
    last: Sequence[MemoryChange]

    @property
    def outcome(self) -> str:
        return outcome(self.result)


@dataclasses.dataclass(frozen=True)
class ExampleQuestion:
    """The readings of one question by all readers."""

    examples: Sequence[Example]

    @property
    def result(self) -> Result:
        """One of the results: question, gold answers, source and length are the same in all."""
        return self.examples[0].result

    @property
    def wanted(self) -> str:
        """The gold answers: "a or b" where any is right, "a, b and c" where all are wanted."""
        *others, last = self.result.gold
        if not others:
            return last
        if self.result.metric in metrics.ALL_WANTED:
            return f"{', '.join(others)} and {last}, all of them"
        return " or ".join(self.result.gold)


@dataclasses.dataclass(frozen=True)
class Filters:
    """The filters of a page's readings; one with a single choice is none and is left out."""

    lengths: Sequence[tuple[int, str]]
    sources: Sequence[str]
    outcomes: Sequence[tuple[str, Sequence[str]]]  # of each reader

    @property
    def who(self) -> list[str]:
        return [who for who, _ in self.outcomes]


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Counts of readings without a plain answer, over all lengths; 0 where each has one.

    Both pages print it below their tables (`pieces.outcomes`).
    """

    label: str  # the reader
    readings: int
    unanswered: int  # failed, or did not fit
    malformed: int  # empty, or not of the form asked for
    truncated: int

    @property
    def remarkable(self) -> bool:
        return bool(self.unanswered or self.malformed or self.truncated)


def example(label: str, result: Result, changes: Iterable[MemoryChange]) -> Example:
    """Returns an example with the first and last changes, or all if that is at most a line more."""
    begun = iter(changes)
    first = list(itertools.islice(begun, FIRST_CHANGES))
    last: collections.deque[MemoryChange] = collections.deque(maxlen=LAST_CHANGES + 1)
    after = 0
    for change in begun:
        last.append(change)
        after += 1
    if after <= LAST_CHANGES + 1:
        return Example(label, result, [*first, *last], 0, [])
    return Example(label, result, first, after - LAST_CHANGES, list(last)[1:])


def outcome(result: Result) -> str:
    """Says in a word or two what came of a reading."""
    # Where nothing is what was asked for, an empty answer is right.
    if result.finish is Finish.CANCELLED or (not result.answer.strip() and result.correct < 1):
        return NO_ANSWER
    return {1.0: RIGHT, 0.0: WRONG}.get(result.correct, PARTLY)


def outcomes(label: str, summaries: Sequence[Summary]) -> Outcomes:
    """Returns the counts of some summaries, added up."""
    n, unanswered, malformed, truncated = (
        sum(getattr(s, name) for s in summaries)
        for name in ("n", "unanswered", "malformed", "truncated")
    )
    return Outcomes(label, n, unanswered, malformed, truncated)


def spread(
    readings: Mapping[str, Sequence[Result]], most: int = MOST
) -> list[list[tuple[str, Result]]]:
    """Returns at most `most` questions, each as [(reader, reading)] with all its readers.

    Of repeated readings the first. Each question is of the length, task and outcomes that were
    taken least so far; of those that are alike, the longest read by most come first. The choice
    depends on what was read alone.
    """
    asked: dict[Hashable, dict[str, Result]] = collections.defaultdict(dict)
    for who, results in readings.items():
        for result in results:
            asked[result.length, result.task_id].setdefault(who, result)
    kinds: dict[Kind, list[dict[str, Result]]] = collections.defaultdict(list)
    for sides in asked.values():
        kinds[_kind(sides)].append(sides)
    left = {kind: iter(kinds[kind]) for kind in sorted(kinds)}
    taken: collections.Counter[Hashable] = collections.Counter()
    chosen: list[list[tuple[str, Result]]] = []
    while left and len(chosen) < most:
        kind = min(left, key=lambda kind: (taken[kind], sum(taken[part] for part in kind)))
        if (sides := next(left[kind], None)) is None:
            del left[kind]
            continue
        chosen.append(list(sides.items()))
        taken.update([kind, *kind])
    return chosen


def _kind(sides: Mapping[str, Result]) -> Kind:
    any_of = next(iter(sides.values()))
    outcomes = tuple((who, outcome(result)) for who, result in sides.items())
    return (-len(sides), -any_of.length, any_of.source, outcomes)


def questions(examples: Sequence[Example]) -> list[ExampleQuestion]:
    """Groups readings by question and length, in the order of the first."""
    asked: dict[Hashable, list[Example]] = collections.defaultdict(list)
    for one in examples:
        asked[one.result.length, one.result.task_id].append(one)
    return [ExampleQuestion(sides) for sides in asked.values()]


def filters(asked: Sequence[ExampleQuestion]) -> Filters:
    """Returns the choices by which the questions of a page can be narrowed down."""
    lengths = sorted({question.result.length for question in asked})
    outcomes: dict[str, set[str]] = collections.defaultdict(set)
    for question in asked:
        for side in question.examples:
            outcomes[side.label].add(side.outcome)
    order = (RIGHT, PARTLY, WRONG, NO_ANSWER)
    return Filters(
        lengths=[(length, format_length(length)) for length in lengths],
        sources=sorted({question.result.source for question in asked}),
        outcomes=[(who, [o for o in order if o in found]) for who, found in outcomes.items()],
    )
