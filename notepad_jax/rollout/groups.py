"""Dynamic sampling: a group whose rewards are all equal teaches nothing, so it is
dropped, counted, and replaced by a fresh one, for a bounded number of rounds.

Reward and accuracy are reported over *all* sampled trajectories: over the kept ones alone
they would look the same at every stage of training. Everything is a sum or a count;
`GroupStats.metrics` divides once. Above: programs.train; `collect` comes in as a function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from notepad_jax.types import Finish, Group, Status, Task, TurnKind

NextTasks = Callable[[int], Sequence[Task]]  # how many are missing -> tasks to read
Collect = Callable[[Sequence[Task]], Awaitable[list[Group]]]


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Sums and counts over every group that was sampled; add two with `+`."""

    rounds: int = 0
    groups_sampled: int = 0
    groups_kept: int = 0
    groups_surplus: int = 0  # informative, but more than were wanted
    dropped_all_right: int = 0  # every reward 1
    dropped_all_wrong: int = 0  # every reward 0
    dropped_all_equal: int = 0  # every reward the same, in between
    trajectories: int = 0
    cancelled: int = 0
    reward_sum: float = 0.0
    em_sum: float = 0.0
    normalised_em_sum: float = 0.0
    empty_sum: float = 0.0
    truncated_answers: int = 0
    update_turns: int = 0
    truncated_updates: int = 0  # memories cut at the limit
    memory_tokens: int = 0  # of all update turns, stop tokens included
    answer_tokens: int = 0

    def __add__(self, other: GroupStats) -> GroupStats:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return GroupStats(*(a + b for a, b in zip(mine, theirs, strict=True)))

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
            "groups/kept_share": self.groups_kept / max(1, self.groups_sampled),
            "groups/surplus": self.groups_surplus,
            "groups/dropped_all_right": self.dropped_all_right,
            "groups/dropped_all_wrong": self.dropped_all_wrong,
            "groups/dropped_all_equal": self.dropped_all_equal,
            "rollout/trajectories": self.trajectories,
            "rollout/cancelled": self.cancelled,
            "rollout/empty_answers": self.empty_sum / n,
            "rollout/truncated_answers": self.truncated_answers / n,
            "rollout/truncated_memories": self.truncated_updates / turns,
            "rollout/memory_tokens": self.memory_tokens / turns,
            "rollout/answer_tokens": self.answer_tokens / n,
            "rollout/update_turns": self.update_turns,
        }


async def collect_informative(
    next_tasks: NextTasks, collect: Collect, wanted_groups: int, max_rounds: int
) -> tuple[list[Group], GroupStats]:
    """Samples until `wanted_groups` informative groups are there, or the rounds are over.

    Each round asks `next_tasks` for as many tasks as groups are missing (it may give
    more, e.g. a whole document's questions, or none when the data is at its end).
    Returns at most `wanted_groups` groups, in the order they were drawn; with
    `max_rounds` = 1 nothing is replaced. The result can be empty: nothing to learn from.
    """
    if wanted_groups < 1 or max_rounds < 1:
        raise ValueError(
            f"wanted_groups is {wanted_groups} and max_rounds {max_rounds}; both must be at least 1"
        )
    kept: list[Group] = []
    stats = GroupStats()
    while len(kept) < wanted_groups and stats.rounds < max_rounds:
        tasks = next_tasks(wanted_groups - len(kept))
        if not tasks:
            break
        groups = await collect(tasks)
        stats += dataclasses.replace(measure(groups), rounds=1)
        kept += [group for group in groups if group.informative]
    surplus = max(0, len(kept) - wanted_groups)
    stats += GroupStats(groups_kept=len(kept) - surplus, groups_surplus=surplus)
    return kept[:wanted_groups], stats


def measure(groups: Sequence[Group]) -> GroupStats:
    """Returns the sums and counts of `groups`, all but rounds, kept and surplus."""
    return sum((_measure_one(group) for group in groups), GroupStats())


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
        dropped_all_right=int(right),
        dropped_all_wrong=int(wrong),
        dropped_all_equal=int(dropped and not right and not wrong),
        trajectories=len(readings),
        cancelled=sum(reading.status is Status.CANCELLED for reading in readings),
        reward_sum=float(rewards.sum()),
        em_sum=part("em"),
        normalised_em_sum=part("normalised_em"),
        empty_sum=part("empty"),
        truncated_answers=sum(reading.status is Status.TRUNCATED for reading in readings),
        update_turns=len(updates),
        truncated_updates=sum(update.finish is Finish.LENGTH for update in updates),
        memory_tokens=sum(len(update.tokens) for update in updates),
        answer_tokens=sum(len(answer.tokens) for answer in answers),
    )
