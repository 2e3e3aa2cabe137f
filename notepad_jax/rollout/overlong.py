"""Overlong reward shaping: a penalty for turns near their token limit, the full one if cut.

A turn of L completion tokens, of which Lmax are allowed, gets 0 up to Lmax - Lc and falls from
there in a line to -1 at Lmax (DAPO's soft punishment, a turn at a time; Lc is the window). The
mean over a reading's turns, times a weight, is added to its reward as shaping: so a reading of many
chunks is not punished more for having more turns, and a group that was judged alike is none to
learn lengths from. An answer is one turn, however many contexts it took:
one that goes on in the next is not too long. Above: groups and training.rollout_settings;
below: rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from notepad_jax.rollout import rewards
from notepad_jax.types import Finish, Reading, Task, Trajectory, Turn, TurnKind

PART = "overlong"  # of `Trajectory.reward_parts`: what was added to the reward, 0 or less


@dataclasses.dataclass(frozen=True)
class Overlong:
    """Settings of the overlong penalty, in tokens, stop token included."""

    window: int  # Lc: tokens before the limit in which a turn begins to cost
    weight: float  # of the mean over a reading's turns
    max_memory: int  # Lmax of an update turn
    max_answer: int  # Lmax of an answer, all its contexts

    def __post_init__(self) -> None:
        for limit in ("max_memory", "max_answer"):
            if not 1 <= self.window <= getattr(self, limit):
                raise ValueError(
                    f"grpo.overlong_window is {self.window} and reading.{limit} "
                    f"{getattr(self, limit)}; the window is of the last tokens before a limit, so "
                    f"it must be at least 1 and at most that"
                )

    def penalties(self, turns: Sequence[Turn]) -> list[float]:
        """Returns the penalty of each update turn, and then of the answer, in [-1, 0].

        One that was cut costs all.
        """
        updates = [one for one in turns if one.kind is TurnKind.UPDATE]
        answer = [one for one in turns if one.kind is TurnKind.ANSWER]
        costs = [self._penalty([one], self.max_memory) for one in updates]
        return costs + ([self._penalty(answer, self.max_answer)] if answer else [])

    def _penalty(self, contexts: Sequence[Turn], limit: int) -> float:
        if contexts[-1].completion.finish is Finish.LENGTH:
            return -1.0
        into = sum(len(one.completion.tokens) for one in contexts) - (limit - self.window)
        return -min(max(into / self.window, 0.0), 1.0)


def shaped(score: rewards.Score, how: Overlong) -> rewards.Score:
    """Returns `score` with the overlong penalty added, and named in its parts."""

    def scored(reading: Reading, task: Task, said: rewards.Said = rewards.NOTHING) -> Trajectory:
        judged = score(reading, task, said)
        costs = how.penalties(reading.turns)
        added = how.weight * sum(costs) / max(1, len(costs))
        parts = {**judged.reward_parts, PART: added}
        return dataclasses.replace(judged, reward_parts=parts, shaping=judged.shaping + added)

    return scored
