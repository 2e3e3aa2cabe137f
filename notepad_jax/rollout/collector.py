"""Many readings at once: n tasks x G samples, each a coroutine of the same reading loop.

There is no turn barrier: a reading asks for its next turn as soon as its last one came
back, and the completer (the engine, or a fake) sees all waiting turns together.
Everything runs in one thread of asyncio, so nothing here needs a lock. If one reading
fails or the caller is cancelled, all the others are cancelled and awaited before
`collect` returns. Above: programs and groups; below: reading.memory_agent and rewards.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import Rules, TurnSampling
from notepad_jax.rollout import rewards
from notepad_jax.text.chunks import Documents
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import (
    Chunks,
    Completer,
    CompleterFailed,
    Group,
    MemoryState,
    Task,
    Tokens,
    Trajectory,
    Turn,
)

OnTurn = Callable[[Task, int, Turn, MemoryState], None]  # task, sample, turn, state after it


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a rollout reads: what all readings of a run have in common."""

    tokenizer: Tokenizer
    template: Template
    rules: Rules
    temperature: float  # 1 in training: behaviour logprobs are those of the policy itself
    top_p: float  # 1 in training
    group_size: int  # G samples of each task
    max_document: int | None  # tokens; longer documents are centre-truncated. None: none is

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; it must be at least 1")

    def documents(self) -> Documents:
        """Returns what cuts this reader's documents into chunks, and counts what it cuts off."""
        return Documents(self.tokenizer, self.rules.chunk_size, self.max_document)


def trajectory_seed(run_seed: int, step: int, task_id: str, sample: int) -> int:
    """Returns the base seed of one reading (63 bits, blake2b): none is used twice."""
    return memory_agent.hashed_seed("trajectory", int(run_seed), int(step), task_id, int(sample))


async def collect(
    tasks: Sequence[Task],
    completer: Completer,
    reader: Reader,
    run_seed: int,
    step: int,
    on_turn: OnTurn | None = None,
    score: rewards.Score = rewards.score,
    documents: Documents | None = None,
) -> list[Group]:
    """Reads every task G times and returns one scored group per task, in task order.

    Tasks that share a document object share its chunks; `documents` (`reader.documents()`
    if None) counts what was truncated. The ids of `tasks` must differ,
    or their readings would draw the same noise. Raises ValueError naming the task where
    its input is at fault (a question over the limit), ReadingFailed where anything else
    went wrong during a reading.
    """
    _check_ids(tasks)
    chunks_of = documents or reader.documents()
    questions = [
        memory_agent.question_of(task, reader.tokenizer, reader.rules.max_question)
        for task in tasks
    ]

    async def one(task: Task, question: Tokens, chunks: Chunks, sample: int) -> Trajectory:
        seed = trajectory_seed(run_seed, step, task.id, sample)
        return await _read_one(
            task, question, chunks, sample, seed, completer, reader, on_turn, score
        )

    try:
        async with asyncio.TaskGroup() as readings:
            running = [
                [
                    readings.create_task(one(task, question, chunks_of(task), k))
                    for k in range(reader.group_size)
                ]
                for task, question in zip(tasks, questions, strict=True)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [
        Group(task, tuple(reading.result() for reading in members))
        for task, members in zip(tasks, running, strict=True)
    ]


class ReadingFailed(RuntimeError):
    """A reading broke off; the message names the task and the sample."""


async def _read_one(
    task: Task,
    question: Tokens,
    chunks: Chunks,
    sample: int,
    seed: int,
    completer: Completer,
    reader: Reader,
    on_turn: OnTurn | None,
    score: rewards.Score,
) -> Trajectory:
    def tell(turn: Turn, state: MemoryState) -> None:
        if on_turn is not None:
            on_turn(task, sample, turn, state)

    try:
        reading = await memory_agent.read_through(
            completer,
            reader.tokenizer,
            reader.template,
            reader.rules,
            memory_agent.start(question, chunks),
            TurnSampling(reader.temperature, reader.top_p, reader.template.stop_ids, seed),
            task.id,
            sample,
            tell,
        )
        return score(reading, task)
    except CompleterFailed:
        raise  # nothing that this reading did: everybody's fails, with one cause
    except ValueError as error:
        raise ValueError(f"task {task.id!r}, sample {sample}: {error}") from error
    except Exception as error:
        raise ReadingFailed(
            f"task {task.id!r}, sample {sample}: {type(error).__name__}: {error}"
        ) from error


def _check_ids(tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise ValueError(
                f"task id {task.id!r} occurs twice in one rollout; give every question its own id"
            )
        seen.add(task.id)
