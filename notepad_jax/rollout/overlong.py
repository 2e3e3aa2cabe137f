"""Overlong shaping: turns that come near their limit cost a little, turns that are cut cost all.

A turn of L completion tokens, of which Lmax are allowed, gets 0 up to Lmax - Lc and falls from
there in a line to -1 at Lmax (DAPO's soft punishment, a turn at a time; Lc is the window). The
mean over a reading's turns, times a weight, is added to its reward: so a reading of many chunks
is not punished more for having more turns. Above: programs.rollouts; beside: rewards.
"""

from __future__ import annotations

import dataclasses

from notepad_jax.rollout import rewards
from notepad_jax.types import Finish, Reading, Task, Trajectory, Turn, TurnKind

PART = "overlong"  # of `Trajectory.reward_parts`: what was added to the reward, 0 or less


@dataclasses.dataclass(frozen=True)
class Overlong:
    """How long is too long, in tokens, stop token included."""

    window: int  # Lc: tokens before the limit in which a turn begins to cost
    weight: float  # of the mean over a reading's turns
    max_memory: int  # Lmax of an update turn
    max_answer: int  # Lmax of an answer turn

    def __post_init__(self) -> None:
        for limit in ("max_memory", "max_answer"):
            if not 1 <= self.window <= getattr(self, limit):
                raise ValueError(
                    f"grpo.overlong_window is {self.window} and reading.{limit} "
                    f"{getattr(self, limit)}; the window is of the last tokens before a limit, so "
                    f"it must be at least 1 and at most that"
                )

    def penalty(self, turn: Turn) -> float:
        """Returns what a turn costs, in [-1, 0]; one that was cut costs all."""
        if turn.completion.finish is Finish.LENGTH:
            return -1.0
        limit = self.max_memory if turn.kind is TurnKind.UPDATE else self.max_answer
        into = len(turn.completion.tokens) - (limit - self.window)
        return -min(max(into / self.window, 0.0), 1.0)


def shaped(score: rewards.Score, how: Overlong) -> rewards.Score:
    """Returns `score` with what the lengths of its turns cost added, and named in its parts."""

    def scored(reading: Reading, task: Task) -> Trajectory:
        judged = score(reading, task)
        costs = [how.penalty(turn) for turn in reading.turns]
        added = how.weight * sum(costs) / max(1, len(costs))
        parts = {**judged.reward_parts, PART: added}
        return Trajectory(reading, judged.reward + added, parts)

    return scored
