"""What a rollout sampled, in numbers: sums and counts that are divided once, at the end.

Reward and accuracy are reported over *all* sampled trajectories: over the kept ones alone
they would look the same at every stage of training. Above: dynamic_sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from notepad_jax.rollout import overlong
from notepad_jax.types import Finish, Group, Status, TurnKind


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
    dropped_all_right: int = 0  # every reward 1
    dropped_all_wrong: int = 0  # every reward 0
    dropped_all_equal: int = 0  # every reward the same, in between
    trajectories: int = 0
    reward_sum: float = 0.0
    em_sum: float = 0.0
    normalised_em_sum: float = 0.0
    empty_sum: float = 0.0
    truncated_answers: int = 0
    update_turns: int = 0
    truncated_updates: int = 0  # memories cut at the limit
    memory_tokens: int = 0  # of all update turns, stop tokens included
    answer_turns: int = 0  # contexts that answers took
    answer_tokens: int = 0
    overlong_sum: float = 0.0  # of what too long turns took off rewards

    def __add__(self, other: GroupStats) -> GroupStats:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return GroupStats(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def informative_share(self) -> float:
        """Of the groups sampled; 0 where none was."""
        return self.groups_informative / max(1, self.groups_sampled)

    @property
    def overlong(self) -> float:
        """What too long turns took off a reward on average, 0 or less."""
        return self.overlong_sum / max(1, self.trajectories)

    def metrics(self) -> dict[str, float]:
        """Returns averages and counts under metric names; the one place that divides."""
        n, turns = max(1, self.trajectories), max(1, self.update_turns)
        return {
            "reward": self.reward_sum / n,
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
            "rollout/answer_tokens": self.answer_tokens / n,
            "rollout/answer_turns": self.answer_turns / n,
            "rollout/update_turns": self.update_turns,
        }


def measure(groups: Sequence[Group], failed: int = 0) -> GroupStats:
    """Returns the sums and counts of groups that were sampled, `failed` more that broke off."""
    whole = sum((_measure_one(group) for group in groups), GroupStats())
    return whole + GroupStats(groups_sampled=failed, groups_failed=failed)


def _measure_one(group: Group) -> GroupStats:
    rewards = group.rewards
    dropped = not group.informative
    right, wrong = dropped and rewards.min() >= 1.0, dropped and rewards.max() <= 0.0
    readings = [trajectory.reading for trajectory in group.trajectories]
    turns = [turn for reading in readings for turn in reading.turns]
    updates = [turn.completion for turn in turns if turn.kind is TurnKind.UPDATE]
    answers = [turn.completion for turn in turns if turn.kind is TurnKind.ANSWER]

    def part(name: str) -> float:
        return sum(trajectory.reward_parts.get(name, 0.0) for trajectory in group.trajectories)

    return GroupStats(
        groups_sampled=1,
        groups_informative=int(group.informative),
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
        answer_turns=len(answers),
        answer_tokens=sum(len(answer.tokens) for answer in answers),
        overlong_sum=part(overlong.PART),
    )
