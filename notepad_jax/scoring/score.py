"""`notepad_jax.score`: the score of one answer. Below: metrics; it needs no accelerator library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from notepad_jax.scoring import metrics


def score(answer: str, answers: str | Sequence[str], metric: str = "sub_em") -> float:
    """Returns the score of an answer by a metric, from 0 to 1.

    `answers` are the gold ones; whether one or all of them are wanted, the metric says
    (docs/evaluation.md). Raises ValueError for a metric that there is not, and for what is no text.
    """
    several = isinstance(answers, Iterable) and not isinstance(answers, str)
    golds = tuple(answers) if several else (answers,)
    for one in (answer, *golds):
        if not isinstance(one, str):
            raise ValueError(f"answers are texts, and {one!r:.80} is of type {type(one).__name__}")
    if blank := [gold for gold in golds if not gold.strip()]:
        raise ValueError(f"the gold answer {blank[0]!r} is blank, and nothing is compared with it")
    if not golds:
        raise ValueError("there is no gold answer to compare with; give at least one")
    return metrics.score(answer, golds, metric, "plain").value
