"""A reading and its task make a trajectory: the reward and what it consists of.

The reward is the task's own metric on the final answer; what the memory said on the way
earns nothing. A truncated answer is scored as it is, a cancelled reading scores 0, and
both are counted. Used by the collector; below is tasks.scoring.
"""

from __future__ import annotations

from collections.abc import Callable

from notepad_jax.tasks import scoring
from notepad_jax.types import Reading, Status, Task, Trajectory

Score = Callable[[Reading, Task], Trajectory]


def score(reading: Reading, task: Task) -> Trajectory:
    """Returns the scored reading; ValueError if the task names an unknown metric.

    Parts, each 0 or 1 unless said otherwise: `answered` (stopped by itself), `truncated`,
    `empty` (said nothing), `em` and `normalised_em` of the answer.
    """
    metric = scoring.metric(task.metric)
    cancelled = reading.status is Status.CANCELLED
    parts = {
        "answered": float(reading.status is Status.ANSWERED),
        "truncated": float(reading.status is Status.TRUNCATED),
        "empty": float(not reading.answer.strip()),
        "em": 0.0 if cancelled else scoring.em(reading.answer, task.answers),
        "normalised_em": 0.0 if cancelled else scoring.normalised_em(reading.answer, task.answers),
    }
    return Trajectory(
        reading=reading,
        reward=0.0 if cancelled else metric(reading.answer, task.answers),
        reward_parts=parts,
    )
