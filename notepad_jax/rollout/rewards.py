"""Rewards: a reading is scored by its task and becomes a trajectory with a reward and its parts.

The reward is the task's own metric on the final answer, found by the task's contract, or what a
run's config names instead: a metric, a function of the user's, or several of these by weight.
What the memory said on the way earns nothing, unless a config names a reward for memories, too,
or a function says a number for each turn: then a turn learns from what its own was worth. A
truncated answer is scored as it is, a malformed one scores 0, and both are counted.

A `Score` is pure and at once. What functions of the user's say (`scoring.own`), which may take
its time, is asked before, for all readings of a group together, and handed to it: that is
`Scoring`. Used by the collector; below: reading.memory_agent, scoring.metrics and scoring.own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from notepad_jax.reading import memory_agent, turn_credit
from notepad_jax.reading.rules import Rules
from notepad_jax.scoring import metrics, own, published
from notepad_jax.scoring.own import Own, RewardFailed, Worth
from notepad_jax.scoring.reading_record import ReadingRecord, Recorder
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Reading, Status, Task, Trajectory, TurnKind

Said = Mapping[Own, Worth]  # what each function says of one reading
Score = Callable[[Reading, Task, Said], Trajectory]
NOTHING: Said = MappingProxyType({})
PUBLISHED = "published"  # instead of a metric: what others published under each task's own
KEY = "tasks.reward"  # of a config: "boxed", "rewards:mine", or "rewards:mine=0.8,boxed=0.2"
MEMORY_KEY = "tasks.memory_reward"  # the same of memories; "": none
MEMORIES = "memories"  # of `Trajectory.reward_parts`: what they were worth on average


@dataclasses.dataclass(frozen=True)
class Shown:
    """Memories and records of a reading, for judges; made by replaying it."""

    tokenizer: Tokenizer
    template: Template
    rules: Rules

    def texts(self, reading: Reading) -> list[str]:
        """Returns what each update turn left: the memory, or its note."""
        played = memory_agent.played(self.rules, self.template, reading.turns)
        left = (
            turn_credit.left(self.rules, turn, before.memory_tokens, after.memory_tokens)
            for turn, before, after in played
            if turn.kind is TurnKind.UPDATE
        )
        return [self.tokenizer.decode(one) for one in left]

    def record(self, reading: Reading, task: Task) -> ReadingRecord:
        left = functools.partial(turn_credit.left, self.rules)
        recorder = Recorder(task, self.tokenizer.decode, left)
        memories = memory_agent.memories(self.rules, self.template, reading.turns)
        for turn, memory in zip(reading.turns, memories, strict=True):
            recorder.turn(turn, memory)
        status = reading.status.value
        return recorder.record(reading.sample, reading.answer, status, reading.chunks)

    def gains(self, reading: Reading, task: Task) -> Worth:
        """Returns what each update turn gained of the task's facts (`turn_credit`)."""
        decode = self.tokenizer.decode
        return turn_credit.gains(self.rules, self.template, decode, reading.turns, task)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The reward function of a run, with the user's functions that it asks."""

    score: Score
    functions: tuple[Own, ...] = ()  # what it wants to hear of each reading
    shown: Shown | None = None  # None: nothing is judged, only checked to be there

    async def of_group(
        self, readings: Sequence[Reading], task: Task, whole: Sequence[Reading] | None = None
    ) -> list[Trajectory]:
        """Scores readings of one task, in their order; `whole` are shown in their place.

        Raises ValueError naming a task that cannot be scored, and RewardFailed.
        """
        if not self.functions:
            return self._scored(readings, task, [NOTHING] * len(readings))
        with _naming(task):
            records = [self.shown.record(one, task) for one in whole or readings]
        return await self.of_records(readings, records, task)

    async def of_records(
        self, readings: Sequence[Reading], records: Sequence[ReadingRecord], task: Task
    ) -> list[Trajectory]:
        """Scores readings, as `of_group`, by records that the caller has."""
        every = await asyncio.gather(*(function.judge(records) for function in self.functions))
        said = [dict(zip(self.functions, worth, strict=True)) for worth in zip(*every, strict=True)]
        return self._scored(readings, task, said or [NOTHING] * len(readings))

    async def worth(self, task: Task, record: ReadingRecord) -> float:
        """Returns the score of an answer, unshaped: how validation and evaluation judge."""
        status = Status(record.status)
        reading = Reading(task.id, record.sample, (), record.answer, status)
        (found,) = await self.of_records([reading], [record], task)
        return found.judged

    def _scored(
        self, readings: Sequence[Reading], task: Task, said: Sequence[Said]
    ) -> list[Trajectory]:
        with _naming(task):
            pairs = zip(readings, said, strict=True)
            return [self.score(one, task, of_one) for one, of_one in pairs]


@contextlib.contextmanager
def _naming(task: Task) -> Iterator[None]:
    try:
        yield
    except RewardFailed:  # which names the row itself
        raise
    except ValueError as error:  # of the task, not of what was said
        raise ValueError(f"task {task.id!r}: {error}") from error


def of(said: str, key: str = KEY, shown: Shown | None = None) -> Scoring:
    """Returns a run's scoring by what its config says under `key`; functions start here.

    A name with a colon is a function (`scoring.own`), any other a metric (`by`). Of several the
    reward is the mean by weight, and `reward_parts` holds each as reward/NAME; a function that
    says nothing of memories says 0 of each. Raises ValueError for a name or a weight that there
    is not.
    """
    weights = _weights(said, key)
    asked = {name: own.named(name, key) for name in weights if ":" in name}
    judges = {name: _own(asked[name]) if name in asked else by(name, key) for name in weights}

    def weighed(reading: Reading, task: Task, said: Said = NOTHING) -> Trajectory:
        base = score(reading, task)
        worth = {name: judge(reading, task, said) for name, judge in judges.items()}
        (answer,) = _mean(weights, {name: (one.judged,) for name, one in worth.items()})
        memories = _mean(weights, {name: one.memory_rewards for name, one in worth.items()})
        parts = {f"reward/{name}": one.judged for name, one in worth.items()}
        return _with(Trajectory(reading, answer, {**base.reward_parts, **parts}), memories)

    only = next(iter(judges.values())) if len(judges) == 1 else weighed
    return Scoring(only, tuple(asked.values()), shown)


def with_memories(answers: Scoring, said: str) -> Scoring:
    """Returns `answers` with a reward for each memory on the way by `said`; "": none.

    A metric judges a memory as it would an answer that says it; a function says a number for
    each; `turn_credit.GAIN` is what each turn gained of the facts. What `answers` says of memories
    is added. Raises as `of`.
    """
    if not said:
        return answers
    weights = _weights(said, MEMORY_KEY)
    asked = {name: own.named(name, MEMORY_KEY, True) for name in weights if ":" in name}
    gained = turn_credit.GAIN in weights
    metric = [name for name in weights if name not in asked and name != turn_credit.GAIN]
    judges = {name: by(name, MEMORY_KEY) for name in metric}

    def scored(reading: Reading, task: Task, said: Said = NOTHING) -> Trajectory:
        found = answers.score(reading, task, said)
        worth = {name: said[function] for name, function in asked.items()}
        said_by = answers.shown.texts(reading) if judges else ()
        texts = [dataclasses.replace(reading, answer=text) for text in said_by]
        for name, judge in judges.items():
            worth[name] = tuple(judge(text, task, NOTHING).judged for text in texts)
        if gained:
            worth[turn_credit.GAIN] = answers.shown.gains(reading, task)
        memories = _mean(weights, worth)
        if found.memory_rewards:
            memories = tuple(map(sum, zip(memories, found.memory_rewards, strict=True)))
        return _with(found, memories)

    return Scoring(scored, (*answers.functions, *asked.values()), answers.shown)


def _mean(weights: Mapping[str, float], worth: Mapping[str, Worth]) -> Worth:
    """Returns the mean by weight, place by place; silence is 0s, unless all are silent."""
    whole, saying = sum(weights.values()), {name: said for name, said in worth.items() if said}
    places = zip(*saying.values(), strict=True)
    return tuple(
        sum(weights[n] * x for n, x in zip(saying, at, strict=True)) / whole for at in places
    )


def _with(found: Trajectory, memories: Worth) -> Trajectory:
    """Returns the trajectory with what its memories are worth, and their mean among its parts."""
    if not memories:
        return found
    parts = {**found.reward_parts, MEMORIES: sum(memories) / len(memories)}
    return dataclasses.replace(found, reward_parts=parts, memory_rewards=memories)


def _weights(said: str, key: str) -> dict[str, float]:
    if "," not in said and "=" not in said:
        return {said: 1.0}
    weights: dict[str, float] = {}
    for word in said.split(","):
        name, _, weight = (part.strip() for part in word.rpartition("="))
        if name in weights:
            raise ValueError(f"{key} has {name!r} twice; say it once, with both weights' sum")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < float("inf"):
            raise ValueError(f"{key} has {word!r}; write NAME=WEIGHT, with a weight above 0")
    return weights


def _own(function: Own) -> Score:
    def judged(reading: Reading, task: Task, said: Said = NOTHING) -> Trajectory:
        *memories, answer = said[function]
        return _with(dataclasses.replace(score(reading, task), judged=answer), tuple(memories))

    return judged


def by(metric: str, key: str = KEY) -> Score:
    """Returns the score function by one metric on the whole answer, or "" by each task's own.

    Tasks that want all of their answers keep their own: any one of them would do for most
    other metrics. PUBLISHED takes the published twin of each task's own metric, where it has
    one. Raises ValueError, naming the config's key, for a metric that there is not.
    """
    if not metric:
        return score
    if metric not in (PUBLISHED, *metrics.METRICS):
        raise ValueError(
            f"{key}: there is no metric {metric!r}; use one of {metrics.known()}, or {PUBLISHED}"
        )
    return lambda reading, task, said=NOTHING: score(reading, judged(metric, task), said)


def is_metric(said: str) -> bool:
    """Whether a config's reward is one metric (or "", each task's own), by name alone."""
    return said in ("", PUBLISHED, *metrics.METRICS)


def judged(metric: str, task: Task) -> Task:
    """Returns the task as a run that rewards by `metric` judges it; see `by`.

    What is no metric (a function, several by weight, nothing) leaves it its own.
    """
    if metric == PUBLISHED:
        return dataclasses.replace(task, metric=published.TWINS.get(task.metric, task.metric))
    if metric not in metrics.METRICS or task.metric in metrics.ALL_WANTED:
        return task
    return dataclasses.replace(task, metric=metric, contract="plain")


def score(reading: Reading, task: Task, said: Said = NOTHING) -> Trajectory:
    """Returns the scored reading; ValueError for a task's unknown metric or contract.

    Parts, each 0 or 1: `answered` (stopped by itself), `truncated`, `empty` (said nothing),
    `malformed` (holds no answer of the kind asked for), `em` and `normalised_em` of the
    answer.
    """
    judge = functools.partial(metrics.score, reading.answer, task.answers, contract=task.contract)
    worth = judge(metric=task.metric, question=task.question)
    parts = {
        "answered": float(reading.status is Status.ANSWERED),
        "truncated": float(reading.status is Status.TRUNCATED),
        "empty": float(not reading.answer.strip()),
        "malformed": float(bool(worth.problem)),
        "em": judge(metric="em").value,
        "normalised_em": judge(metric="normalised_em").value,
    }
    return Trajectory(reading, worth.value, parts)


PLAIN = Scoring(score)  # each task's own metric
