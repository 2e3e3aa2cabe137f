"""Summary statistics of readings: means with confidence intervals, by method, task and length.

A question that was read several times counts once, with the mean of its scores, because
its repeats are not independent: the intervals are over questions. Questions about one
document are not independent either: where their scores go together, an interval is that of
as many questions as are worth the same (`worth`). Below is measure; above are report and the
programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

from notepad_jax.eval.measure import Result
from notepad_jax.types import Action, Finish

ALL = "all"  # the source of a summary over all tasks


@dataclasses.dataclass(frozen=True)
class Share:
    """A mean of values in [0, 1] over questions, with Wilson's 95% interval."""

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """All readings of one method, task source and length."""

    method: str  # of methods.METHODS
    source: str  # Task.source, or ALL
    length: int  # tokens asked for
    questions: int
    n: int  # readings: questions times repeats
    accuracy: Share  # by each task's own metric
    scores: Mapping[str, Share]  # by every metric of measure.REPORTED
    recall: Share | None  # evidence in the last memory; None where no evidence is known
    lost: Mapping[str, int]  # readings with a wrong answer by what became of the evidence
    unanswered: int  # readings that failed or could not be shown; they count as wrong
    malformed: int  # answers that are empty or not of the form asked for (no box): worth 0
    truncated: int  # answers cut at their limit, scored as they are
    turns: int
    tokens: int  # document tokens read
    seconds: float  # wall, while at least one of them was under way
    captured: Share | None = None  # evidence that was ever written
    retained: Share | None = None  # of what was, the share in the last memory
    actions: Mapping[str, int] = dataclasses.field(default_factory=dict)  # update turns by Action

    def did(self, action: Action) -> float:
        """Returns the share of update turns that did this."""
        return self.actions.get(action.value, 0) / max(1, sum(self.actions.values()))


def share(values: Sequence[float], documents: Sequence[Hashable] | None = None) -> Share:
    """Returns the mean of values in [0, 1] and its interval; (0, 0, 1) for no values.

    `documents` names what each value's question is about; None: each about another.
    """
    total, n = float(sum(values)), len(values)
    independent = n if documents is None else worth(values, documents)
    low, high = wilson_interval(total * (independent / n) if n else 0.0, independent)
    return Share(total / n if n else 0.0, low, high)


def worth(values: Sequence[float], documents: Sequence[Hashable]) -> float:
    """Returns the effective sample size of the mean: n over the design effect.

    The variance of a mean over whole documents, linearised (Kish 1965): with m documents and
    e_d the sum of (value - mean) over one, m / (m - 1) sum(e_d^2) / n^2, against the
    mean (1 - mean) / n of independent ones (Korn and Graubard 1998 put it into a score
    interval). Never more than n. Of one document it cannot be known: n, which then is about that
    document.
    """
    n, mean = len(values), sum(values) / len(values) if values else 0.0
    apart: dict[Hashable, float] = defaultdict(float)
    for value, document in zip(values, documents, strict=True):
        apart[document] += value - mean
    m, spread = len(apart), sum(e * e for e in apart.values())
    if m < 2 or m == n or not 0 < mean < 1:
        return n
    return min(n, mean * (1 - mean) * n * n * (m - 1) / (m * spread)) if spread else n


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a share: honest at 0, at n and for small n.

    Wilson (1927), score interval without continuity correction; (0, 1) for n = 0.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is no share; need 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    z2 = 1.959963984540054**2
    share = successes / n
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(share * (1 - share) / n * z2 + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return low, high


def by_length(results: Sequence[Result]) -> list[Summary]:
    """Returns one summary over all tasks per method and length, ascending in length."""
    return _summaries(results, lambda r: (r.method, ALL, r.length))


def by_task(results: Sequence[Result]) -> list[Summary]:
    """Returns one summary per method, task source and length."""
    return _summaries(results, lambda r: (r.method, r.source, r.length))


def measured_by(metric: str, summaries: Sequence[Summary]) -> list[Summary]:
    """Returns the summaries with the accuracy by another metric than each task's own.

    `metric` is one of measure.REPORTED; those that were not scored by it are left out.
    """
    return [
        dataclasses.replace(s, accuracy=s.scores[metric]) for s in summaries if metric in s.scores
    ]


def _summaries(
    results: Sequence[Result], key: Callable[[Result], tuple[str, str, int]]
) -> list[Summary]:
    groups: dict[tuple[str, str, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)
    return [_summary(*name, groups[name]) for name in sorted(groups)]


def _summary(method: str, source: str, length: int, results: Sequence[Result]) -> Summary:
    recalls = [r for r in results if r.recall is not None]
    seen = [r for r in recalls if r.captured is not None]
    written = [r for r in seen if r.captured]
    return Summary(
        method=method,
        source=source,
        length=length,
        questions=len({r.task_id for r in results}),
        n=len(results),
        accuracy=_over_questions(results, lambda r: r.correct),
        scores={
            name: _over_questions(results, lambda r, name=name: r.scores[name])
            for name in results[0].scores
        },
        recall=_over_questions(recalls, lambda r: r.recall) if recalls else None,
        lost=dict(sorted(Counter(r.lost for r in results if r.lost).items())),
        unanswered=sum(r.finish is Finish.CANCELLED for r in results),
        malformed=sum(_malformed(r) for r in results),
        truncated=sum(r.finish is Finish.LENGTH for r in results),
        turns=sum(r.turns for r in results),
        tokens=sum(r.tokens for r in results),
        seconds=_busy(results),
        captured=_over_questions(seen, lambda r: r.captured) if seen else None,
        retained=_over_questions(written, lambda r: r.recall / r.captured) if written else None,
        actions=dict(sum((Counter(r.actions) for r in results), Counter())),
    )


def _over_questions(results: Sequence[Result], value: Callable[[Result], float]) -> Share:
    """Returns the mean over questions of the mean over a question's repeats."""
    questions: dict[str, list[float]] = defaultdict(list)
    document: dict[str, Hashable] = {}
    for result in results:
        questions[result.task_id].append(value(result))
        document[result.task_id] = result.document or result.task_id
    means = [sum(values) / len(values) for values in questions.values()]
    return share(means, [document[name] for name in questions])


def _malformed(result: Result) -> bool:
    """Whether there is an answer turn, and in it nothing that could be judged."""
    answered = result.finish is not Finish.CANCELLED
    return answered and (bool(result.problem) or not result.answer.strip())


def _busy(results: Sequence[Result]) -> float:
    """Returns how long at least one reading was under way: a pause between two runs is none."""
    total, until = 0.0, 0.0
    for began, seconds in sorted((r.began, r.seconds) for r in results):
        total += max(0.0, began + seconds - max(began, until))
        until = max(until, began + seconds)
    return total
