"""`notepad_jax.score`: one answer, judged. Below: metrics; it needs no accelerator library."""

from __future__ import annotations

from collections.abc import Sequence

from notepad_jax.scoring import metrics


def score(answer: str, answers: str | Sequence[str], metric: str = "sub_em") -> float:
    """Returns what an answer is worth by a metric, from 0 to 1.

    `answers` are the gold ones; whether one or all of them are wanted, the metric says
    (docs/evaluation.md). Raises ValueError for a metric that there is not.
    """
    golds = (answers,) if isinstance(answers, str) else tuple(answers)
    if not golds:
        raise ValueError("there is no gold answer to compare with; give at least one")
    return metrics.score(answer, golds, metric, "plain").value
