"""A reading and its task make a trajectory: the reward and what it consists of.

The reward is the task's own metric on the final answer, found by the task's contract; what
the memory said on the way earns nothing. A truncated answer is scored as it is, a malformed
one scores 0, and both are counted. Used by the collector; below is scoring.metrics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from notepad_jax.scoring import metrics
from notepad_jax.types import Reading, Status, Task, Trajectory

Score = Callable[[Reading, Task], Trajectory]


def by(metric: str) -> Score:
    """Returns how a run rewards: by one metric on the whole answer, or "" by each task's own.

    Tasks that want all of their answers keep their own: any one of them would do for most
    other metrics. Raises ValueError for a metric that there is not.
    """
    if not metric:
        return score
    metrics.score("", ("",), metric, "plain")
    return lambda reading, task: score(reading, judged(metric, task))


def judged(metric: str, task: Task) -> Task:
    """Returns the task as a run that rewards by `metric` judges it; see `by`."""
    if not metric or task.metric in metrics.ALL_WANTED:
        return task
    return dataclasses.replace(task, metric=metric, contract="plain")


def score(reading: Reading, task: Task) -> Trajectory:
    """Returns the scored reading; ValueError for a task's unknown metric or contract.

    Parts, each 0 or 1: `answered` (stopped by itself), `truncated`, `empty` (said nothing),
    `malformed` (holds no answer of the kind asked for), `em` and `normalised_em` of the
    answer.
    """
    judge = functools.partial(metrics.score, reading.answer, task.answers, contract=task.contract)
    worth = judge(metric=task.metric)
    parts = {
        "answered": float(reading.status is Status.ANSWERED),
        "truncated": float(reading.status is Status.TRUNCATED),
        "empty": float(not reading.answer.strip()),
        "malformed": float(bool(worth.problem)),
        "em": judge(metric="em").value,
        "normalised_em": judge(metric="normalised_em").value,
    }
    return Trajectory(reading, worth.value, parts)
