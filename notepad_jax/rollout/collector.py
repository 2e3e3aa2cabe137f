"""The rollout collector: draws become groups, every question read G times and scored.

The noise of a reading is a function of (run seed, ordinal of its draw, question, sample): a task
that is drawn again is read with other noise, and a draw that is read again with the same. Members
of a group keep the shared parts of their prompts once between them, and no hints to an engine: what
is left of 16 readings is hardly more than one and 16 answers. Above: dynamic_sampling,
imitation, local and training.rollouts; below: reading.loop and rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from notepad_jax.reading.loop import Job, Reader, ReadingEnd, read_all
from notepad_jax.reading.sampling import hashed_seed
from notepad_jax.rollout import rewards
from notepad_jax.rollout.rewards import Scoring
from notepad_jax.types import (
    Draw,
    Finish,
    Group,
    Prompt,
    Reading,
    Status,
    Task,
    Tokens,
    Trajectory,
    Turn,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Failed:
    """A group of which a reading failed: it cannot be compared, so nothing is learnt from it."""

    task: Task
    ordinal: int
    question: int
    sample: int  # the first that failed
    failure: Exception

    @property
    def place(self) -> tuple[int, int]:
        """(ordinal, question), as a group's."""
        return self.ordinal, self.question

    def __str__(self) -> str:
        kind = type(self.failure).__name__
        return f"task {self.task.id!r}, sample {self.sample}: {kind}: {self.failure}"


def trajectory_seed(run_seed: int, ordinal: int, question: int, sample: int) -> int:
    """Returns the base seed of one reading (63 bits, blake2b): none is used twice in a run."""
    return hashed_seed("trajectory", int(run_seed), int(ordinal), int(question), int(sample))


async def collect(
    draws: Sequence[Draw],
    reader: Reader,
    group_size: int,
    run_seed: int,
    scoring: Scoring = rewards.PLAIN,
) -> tuple[list[Group], list[Failed]]:
    """Samples groups: reads every question of every draw `group_size` times.

    Returns (groups, failed groups), both in the order of the draws. Tasks that share a document
    object share its chunks. A group is judged when the last of its readings has ended, while
    others read on. Raises ValueError naming a task that cannot be scored, and CompleterFailed if
    the completer has failed.
    """
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be at least 1")
    asked = [(task, draw, question) for draw in draws for question, task in enumerate(draw.tasks)]
    jobs = [
        Job(
            task,
            trajectory_seed(run_seed, draw.ordinal, question, sample),
            length=draw.length,
        )
        for task, draw, question in asked
        for sample in range(group_size)
    ]
    kept: dict[bytes, Tokens] = {}
    read: list[list[Reading | Exception | None]] = [[None] * group_size for _ in asked]
    scored: list[list[Trajectory]] = [[] for _ in asked]

    async def judge(index: int, turns: _Turns, end: ReadingEnd) -> None:
        number, sample = divmod(index, group_size)
        task, members = jobs[index].task, read[number]
        members[sample] = end.failure or reading(task, sample, turns.turns, end)
        if all(isinstance(one, Reading) for one in members):
            scored[number] = await scoring.of_group(members, task)

    await read_all(jobs, reader, lambda index: _Turns(kept), lambda *end: None, judge)
    groups: list[Group] = []
    failed: list[Failed] = []
    for number, (task, draw, question) in enumerate(asked):
        broken = [(k, one) for k, one in enumerate(read[number]) if isinstance(one, Exception)]
        if broken:
            failed.append(Failed(task, draw.ordinal, question, *broken[0]))
        else:
            members = tuple(scored[number])
            groups.append(Group(task, members, draw.ordinal, question, draw.chunks))
    return groups, failed


def reading(task: Task, sample: int, turns: Sequence[Turn], end: ReadingEnd) -> Reading:
    """Returns a reading that ended with an answer."""
    status = Status.ANSWERED if end.finish is Finish.STOP else Status.TRUNCATED
    return Reading(task.id, sample, tuple(turns), end.answer, status, end.chunks)


class _Turns:
    """Watches one reading: its turns, as an update needs them."""

    def __init__(self, kept: dict[bytes, Tokens]) -> None:
        self.turns: list[Turn] = []
        self._kept = kept  # shared parts of prompts, one array of each

    def turn(self, turn: Turn, memory: Tokens) -> None:
        self.turns.append(dataclasses.replace(turn, prompt=shared_once(turn.prompt, self._kept)))


def shared_once(prompt: Prompt, kept: dict[bytes, Tokens]) -> Prompt:
    """Returns the prompt without hints, its shared part the one array of `kept` that is equal."""
    return Prompt(kept.setdefault(prompt.shared.tobytes(), prompt.shared), prompt.tail)
