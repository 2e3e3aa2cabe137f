"""Metrics of a rollout's groups: sums and counts that are divided once, at the end.

Reward and accuracy are reported over *all* sampled trajectories: over the kept ones alone they
would look the same at every stage of training. What kinds of task there are, `by_task` says, for
these numbers and for the trainer's. Above: dynamic_sampling and training.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from notepad_jax.rollout import overlong
from notepad_jax.types import Action, Finish, Group, Reading, Status, TurnKind

TASK, OTHERS = "task/", "others"  # the first word of a metric of one kind of task; all the rest
MOST = 20  # kinds of task with metrics of their own
LONGEST = 60  # letters of a kind's name in a metric's


@dataclasses.dataclass(frozen=True)
class TaskStats:
    """Sums and counts over the groups of one kind of task."""

    groups: int = 0
    informative: int = 0
    trajectories: int = 0
    reward_sum: float = 0.0
    reward_squares: float = 0.0

    def __add__(self, other: TaskStats) -> TaskStats:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return TaskStats(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def reward_std(self) -> float:
        """Standard deviation of all rewards, within and across groups: sqrt(E[R^2] - E[R]^2)."""
        n = max(1, self.trajectories)
        return math.sqrt(max(0.0, self.reward_squares / n - (self.reward_sum / n) ** 2))

    def metrics(self, name: str) -> dict[str, float]:
        """Returns the metrics of the kind `name`."""
        return {
            f"{TASK}{name}/groups": self.groups,
            f"{TASK}{name}/informative_share": self.informative / max(1, self.groups),
            f"{TASK}{name}/reward": self.reward_sum / max(1, self.trajectories),
            f"{TASK}{name}/reward_std": self.reward_std,
        }


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Sums and counts over every group that was sampled; add two with `+`."""

    rounds: int = 0
    groups_sampled: int = 0
    groups_informative: int = 0
    groups_failed: int = 0  # a reading failed; sampled, and nothing else is known of them
    groups_kept: int = 0  # in the batch
    groups_waiting: int = 0  # informative, and kept for the next step
    groups_stale: int = 0  # informative, and too old by the time there was room
    dropped_all_right: int = 0  # all judged 1
    dropped_all_wrong: int = 0  # all judged 0
    dropped_all_equal: int = 0  # all judged the same, in between
    trajectories: int = 0
    reward_sum: float = 0.0
    em_sum: float = 0.0
    normalised_em_sum: float = 0.0
    empty_sum: float = 0.0
    truncated_answers: int = 0
    update_turns: int = 0
    truncated_updates: int = 0  # memories cut at the limit
    memory_tokens: int = 0  # of all update turns, stop tokens included
    keep_turns: int = 0  # update turns that did this (`types.Action`)
    nothing_turns: int = 0
    exit_turns: int = 0
    again_turns: int = 0
    unwritten: int = 0  # trajectories that never wrote anything down
    answer_turns: int = 0  # contexts that answers took
    answer_tokens: int = 0
    overlong_sum: float = 0.0  # of what too long turns took off rewards
    tasks: Mapping[str, TaskStats] = dataclasses.field(default_factory=dict)  # by source

    def __add__(self, other: GroupStats) -> GroupStats:
        names = [field.name for field in dataclasses.fields(self) if field.name != "tasks"]
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        tasks = dict(self.tasks)
        for source, theirs in other.tasks.items():
            tasks[source] = tasks.get(source, TaskStats()) + theirs
        return GroupStats(**added, tasks=tasks)

    @property
    def informative_share(self) -> float:
        """The informative share of the groups sampled; 0 where none was."""
        return self.groups_informative / max(1, self.groups_sampled)

    @property
    def overlong(self) -> float:
        """The mean overlong penalty of a reward, 0 or less."""
        return self.overlong_sum / max(1, self.trajectories)

    def metrics(self) -> dict[str, float]:
        """Returns averages and counts under metric names; the one place that divides."""
        n, turns = max(1, self.trajectories), max(1, self.update_turns)
        named, of_kind = by_task(self.tasks), {}
        for source, sums in self.tasks.items():
            of_kind[named[source]] = of_kind.get(named[source], TaskStats()) + sums
        by_kind = (of_kind[name].metrics(name) for name in sorted(of_kind))
        return {
            "reward": self.reward_sum / n,
            "reward_std": sum(self.tasks.values(), TaskStats()).reward_std,
            "accuracy": self.em_sum / n,
            "accuracy_normalised": self.normalised_em_sum / n,
            "groups/rounds": self.rounds,
            "groups/sampled": self.groups_sampled,
            "groups/kept": self.groups_kept,
            "groups/informative_share": self.informative_share,
            "groups/waiting": self.groups_waiting,
            "groups/dropped_stale": self.groups_stale,
            "groups/dropped_failed": self.groups_failed,
            "groups/dropped_all_right": self.dropped_all_right,
            "groups/dropped_all_wrong": self.dropped_all_wrong,
            "groups/dropped_all_equal": self.dropped_all_equal,
            "rollout/trajectories": self.trajectories,
            "rollout/empty_answers": self.empty_sum / n,
            "rollout/truncated_answers": self.truncated_answers / n,
            "rollout/truncated_memories": self.truncated_updates / turns,
            "rollout/memory_tokens": self.memory_tokens / turns,
            "rollout/keep": self.keep_turns / turns,
            "rollout/nothing": self.nothing_turns / turns,
            "rollout/exit": self.exit_turns / n,
            "rollout/again": self.again_turns / n,
            "rollout/unwritten": self.unwritten / n,
            "rollout/answer_tokens": self.answer_tokens / n,
            "rollout/answer_turns": self.answer_turns / n,
            "rollout/update_turns": self.update_turns,
            **{name: value for metrics in by_kind for name, value in metrics.items()},
        }


def by_task(tasks: Mapping[str, TaskStats], batch: Sequence[Group] = ()) -> dict[str, str]:
    """Returns the name in metrics of each source, of those sampled and those in `batch`.

    The sources with most groups, MOST at most, have names of their own; the rest are OTHERS, and
    so is what has no letters of a metric's name. Sources whose names become the same are one.
    """
    sizes = dict.fromkeys((group.task.source for group in batch), 0)  # some may have waited
    sizes |= {source: sums.groups for source, sums in tasks.items()}
    largest = sorted(sizes, key=lambda source: (-sizes[source], source))
    return {
        source: _plain(source) if rank < MOST else OTHERS for rank, source in enumerate(largest)
    }


def _plain(source: str) -> str:
    """A source as every sink takes it in a metric's name: letters, digits, _ - . and /."""
    return re.sub(r"[^A-Za-z0-9_./-]+", "_", source)[:LONGEST].strip("_./-") or OTHERS


def ages(batch: Sequence[Group], now: int) -> dict[str, float]:
    """Returns staleness metrics of what policy version `now` learns from, in versions: a trajectory
    is as old as its oldest turn. Nothing for an empty batch."""
    old = [now - one.oldest_version for group in batch for one in group.trajectories]
    if not old:
        return {}
    return {"rollout/age_mean": sum(old) / len(old), "rollout/age_max": max(old)}


def mixture(batch: Sequence[Group], now: int) -> dict[str, float]:
    """Returns metrics of how many policy versions a reading has that version `now` learns from,
    and how old its turns are, in versions. Nothing for an empty batch."""
    said = [
        [turn.completion.policy_version for turn in one.turns]
        for group in batch
        for one in group.trajectories
    ]
    if not said:
        return {}
    old = [now - version for versions in said for version in versions]
    return {
        "rollout/versions": sum(len(set(versions)) for versions in said) / len(said),
        "rollout/turn_age_mean": sum(old) / len(old),
    }


def measure(groups: Sequence[Group], failed: int = 0, imitated: bool = False) -> GroupStats:
    """Returns the sums and counts of groups that were sampled, `failed` more that broke off."""
    whole = sum((_measure_one(group, imitated) for group in groups), GroupStats())
    return whole + GroupStats(groups_sampled=failed, groups_failed=failed)


def _measure_one(group: Group, imitated: bool) -> GroupStats:
    rewards, judged = group.rewards, [one.judged for one in group.trajectories]
    dropped = not group.teaches(imitated)
    right, wrong = dropped and min(judged) >= 1.0, dropped and max(judged) <= 0.0
    readings = [trajectory.reading for trajectory in group.trajectories]
    turns = [turn for reading in readings for turn in reading.turns]
    updates = [turn.completion for turn in turns if turn.kind is TurnKind.UPDATE]
    answers = [turn.completion for turn in turns if turn.kind is TurnKind.ANSWER]
    did = Counter(turn.action for turn in turns if turn.kind is TurnKind.UPDATE)

    def part(name: str) -> float:
        return sum(trajectory.reward_parts.get(name, 0.0) for trajectory in group.trajectories)

    return GroupStats(
        groups_sampled=1,
        groups_informative=int(not dropped),
        dropped_all_right=int(right),
        dropped_all_wrong=int(wrong),
        dropped_all_equal=int(dropped and not right and not wrong),
        trajectories=len(readings),
        reward_sum=float(rewards.sum()),
        em_sum=part("em"),
        normalised_em_sum=part("normalised_em"),
        empty_sum=part("empty"),
        truncated_answers=sum(reading.status is Status.TRUNCATED for reading in readings),
        update_turns=len(updates),
        truncated_updates=sum(update.finish is Finish.LENGTH for update in updates),
        memory_tokens=sum(len(update.tokens) for update in updates),
        keep_turns=did[Action.KEEP],
        nothing_turns=did[Action.NOTHING],
        exit_turns=did[Action.EXIT],
        again_turns=did[Action.AGAIN],
        unwritten=sum(map(_wrote_nothing, readings)),
        answer_turns=len(answers),
        answer_tokens=sum(len(answer.tokens) for answer in answers),
        overlong_sum=part(overlong.PART),
        tasks={
            group.task.source: TaskStats(
                groups=1,
                informative=int(not dropped),
                trajectories=len(readings),
                reward_sum=float(rewards.sum()),
                reward_squares=float((rewards**2).sum()),
            )
        },
    )


def _wrote_nothing(reading: Reading) -> bool:
    updates = [turn.action for turn in reading.turns if turn.kind is TurnKind.UPDATE]
    return bool(updates) and Action.WRITE not in updates
