"""A reading and its task make a trajectory: the reward and what it consists of.

The reward is the task's own metric on the final answer, found by the task's contract, or what a
run's config names instead: a metric, a function of the user's, or several of these by weight.
What the memory said on the way earns nothing, unless a config names a reward for memories, too
(`with_memories`): then a turn learns from what its own was worth. A truncated answer is scored as
it is, a malformed one scores 0, and both are counted. Used by the collector; below:
scoring.metrics and scoring.own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from notepad_jax.scoring import metrics, own, published
from notepad_jax.types import Reading, Status, Task, Trajectory

Score = Callable[[Reading, Task], Trajectory]
PUBLISHED = "published"  # instead of a metric: what others published under each task's own
KEY = "tasks.reward"  # of a config: "boxed", "rewards:mine", or "rewards:mine=0.8,boxed=0.2"
MEMORY_KEY = "tasks.memory_reward"  # the same of memories; "": none
MEMORIES = "memories"  # of `Trajectory.reward_parts`: what they were worth on average


def of(said: str, key: str = KEY) -> Score:
    """Returns how a run rewards, by what its config says under `key`; functions start here.

    A name with a colon is a function (`scoring.own`), any other a metric (`by`). Of several the
    reward is the mean by weight, and `reward_parts` holds each as reward/NAME. Raises
    ValueError for a name or a weight that there is not.
    """
    weights = _weights(said, key)
    judges = {name: _own(name, key) if ":" in name else by(name) for name in weights}
    if len(judges) == 1:
        return next(iter(judges.values()))
    whole = sum(weights.values())

    def weighed(reading: Reading, task: Task) -> Trajectory:
        base = score(reading, task)
        worth = {name: judge(reading, task).judged for name, judge in judges.items()}
        reward = sum(weights[name] * value for name, value in worth.items()) / whole
        parts = {f"reward/{name}": value for name, value in worth.items()}
        return Trajectory(reading, reward, {**base.reward_parts, **parts})

    return weighed


def with_memories(answer: Score, memory: Score, told: Callable[[Reading], Sequence[str]]) -> Score:
    """Returns `answer`, and beside it what each memory on the way is worth by `memory`.

    That judges a memory as it would an answer that says it; `told` gives the memory after each
    update turn, as a text.
    """

    def scored(reading: Reading, task: Task) -> Trajectory:
        whole, said = answer(reading, task), told(reading)
        worth = [memory(dataclasses.replace(reading, answer=one), task).judged for one in said]
        mean = sum(worth) / max(1, len(worth))
        parts = {**whole.reward_parts, MEMORIES: mean}
        return dataclasses.replace(whole, reward_parts=parts, memory_rewards=tuple(worth))

    return scored


def _weights(said: str, key: str) -> dict[str, float]:
    if "," not in said and "=" not in said:
        return {said: 1.0}
    weights: dict[str, float] = {}
    for word in said.split(","):
        name, _, weight = (part.strip() for part in word.rpartition("="))
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < float("inf"):
            raise ValueError(f"{key} has {word!r}; write NAME=WEIGHT, with a weight above 0")
    return weights


def _own(name: str, key: str) -> Score:
    judge = own.named(name, key)

    def judged(reading: Reading, task: Task) -> Trajectory:
        row = {
            **task.extra,
            "id": task.id,
            "question": task.question,
            "answers": list(task.answers),
            "source": task.source,
            "metric": task.metric,
        }
        return dataclasses.replace(score(reading, task), judged=judge(reading.answer, row))

    return judged


def by(metric: str) -> Score:
    """Returns how a run rewards: by one metric on the whole answer, or "" by each task's own.

    Tasks that want all of their answers keep their own: any one of them would do for most
    other metrics. PUBLISHED takes the published twin of each task's own metric, where it has
    one. Raises ValueError for a metric that there is not.
    """
    if not metric:
        return score
    if metric not in (PUBLISHED, *metrics.METRICS):
        known = ", ".join(metrics.METRICS)
        raise ValueError(f"there is no metric {metric!r}; use one of {known}, or {PUBLISHED}")
    return lambda reading, task: score(reading, judged(metric, task))


def judged(metric: str, task: Task) -> Task:
    """Returns the task as a run that rewards by `metric` judges it; see `by`.

    What is no metric (a function, several by weight, nothing) leaves it its own.
    """
    if metric == PUBLISHED:
        return dataclasses.replace(task, metric=published.TWINS.get(task.metric, task.metric))
    if metric not in metrics.METRICS or task.metric in metrics.ALL_WANTED:
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
