"""Imitation data: a teacher's readings in the place of the policy's own, for supervised learning.

A teacher says what the notes become after each chunk, and the answer: the script of a task whose
good notes are known (`of_script`), or a reading of the task that was right, by this policy or a
stronger one, out of a trace (`of_readings`). Prompts are the memory agent's own, made again from
the task's document, so a policy that has learnt these turns reads as it is measured, and the
teacher may have been a model with another tokenizer. Such a reading is a group of one whose reward
is its weight (`advantages.imitation`); nothing else of a training run knows that it was not
sampled. Above: training.rollouts; below: collector and memory_agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from notepad_jax.reading import memory_agent
from notepad_jax.reading.loop import Reader, ReadingEnd
from notepad_jax.reading.trace import Trace
from notepad_jax.rollout.collector import Failed, reading, shared_once
from notepad_jax.rollout.rewards import Scoring
from notepad_jax.types import (
    NO_TOKENS,
    Completion,
    Draw,
    Finish,
    Group,
    MemoryState,
    Reading,
    Task,
    Tokens,
    Turn,
    TurnKind,
    tokens,
)

SCRIPT = "script"  # the teacher that says what a task's script does
LINES = ("set_f1", "pairwise")  # metrics whose answers stand on lines of their own
RIGHT = 1.0  # what a reading must have been worth to be imitated


class Teaching(Protocol):
    """A teacher's notes and answer for one document."""

    answer: str
    chunks: int | None  # of the document as the teacher read it; None: any

    def notes(self, number: int, before: str, both: str) -> str | None:
        """Returns the notes after chunk `number`; None: it changes nothing.

        `before` is the text of the chunk before it, `both` that of the two together.
        """


Teacher = Callable[[Task], Teaching | None]  # None: of this task the teacher knows nothing


# ---------------------------------------------------------------- teachers


@dataclasses.dataclass(frozen=True)
class _Scripted:
    task: Task
    answer: str
    chunks: int | None = None

    def notes(self, number: int, before: str, both: str) -> str | None:
        """A sentence counts in the chunk in which it ends, also where it begins in `before`."""
        ended = [n for n in self.task.script if n.sentence in both and n.sentence not in before]
        return ended[-1].notes or None if ended else None


@dataclasses.dataclass(frozen=True)
class _Read:
    memories: Mapping[int, str]  # by chunk, where they changed
    answer: str
    chunks: int | None

    def notes(self, number: int, before: str, both: str) -> str | None:
        return self.memories.get(number)


def of_script(task: Task) -> Teaching:
    """The teacher that follows tasks' scripts; ValueError for a task without one."""
    if not task.script:
        raise ValueError(
            f"task {task.id!r} has no script of good notes, which rollout.teacher={SCRIPT!r} "
            f"follows; train on stories (tasks.stories), on rows with a script, or name a run "
            f"whose right readings are the teacher"
        )
    return _Scripted(task, answer(task))


def of_readings(traces: Sequence[Trace]) -> tuple[Teacher, int]:
    """Returns the teacher that repeats the right readings of traces, and of how many tasks.

    Of several right readings of a task the one that changed its notes least is repeated.
    """
    lessons: dict[str, _Read] = {}
    for trace in traces:
        for number, told in trace.readings():
            if told.get("reward", told.get("correct", 0.0)) < RIGHT:
                continue
            if told.get("method", "notepad") != "notepad":
                continue
            memories = {change.chunk: change.memory for change in trace.memories(number)}
            known = lessons.get(told["task_id"])
            if known is None or len(memories) < len(known.memories):
                chunks = told["turns"] - told.get("answer_turns", 1)
                lessons[told["task_id"]] = _Read(memories, told["answer"], chunks)
    return lambda task: lessons.get(task.id), len(lessons)


def answer(task: Task) -> str:
    """Returns a task's answer as a script says it: items in the order in which notes have them.

    A reader that lists what it noted need not sort it, unless the metric looks at the order.
    """
    items, separator = list(task.answers), "\n" if task.metric in LINES else ", "
    noted = task.script[-1].notes
    if task.metric != "pairwise" and all(item in noted for item in items):
        items = sorted(items, key=noted.find)
    several = task.metric in (*LINES, "ruler_all")
    return separator.join(items) if several else items[0]


# ---------------------------------------------------------------- readings


async def collect(
    draws: Sequence[Draw], reader: Reader, teacher: Teacher, version: int, scoring: Scoring
) -> tuple[list[Group], list[Failed]]:
    """Returns the teacher's reading of every question as a group of one, and those that failed.

    Questions of which the teacher knows nothing are passed over. `version` is that of the policy
    that learns. Raises ValueError as the teacher does, and naming a task that cannot be scored.
    """
    made: list[tuple[Task, Draw, int, Reading]] = []
    failed: list[Failed] = []
    kept: dict[bytes, Tokens] = {}
    for draw in draws:
        for question, task in enumerate(draw.tasks):
            if (lesson := teacher(task)) is None:
                continue
            try:
                turns = _turns(task, lesson, reader, version, kept)
            except ValueError as failure:
                failed.append(Failed(task, draw.ordinal, question, 0, failure))
                continue
            said = memory_agent.written(turns[-1].completion)
            chunks = reader.chunks_of(task)
            sizes = tuple(len(chunks[k]) for k in range(len(turns) - 1))
            end = ReadingEnd(reader.tokenizer.decode(said), Finish.STOP, sum(sizes), chunks=sizes)
            made.append((task, draw, question, reading(task, 0, turns, end)))
    judged = await asyncio.gather(*(scoring.of_group([read], task) for task, *_, read in made))
    groups = [
        Group(task, tuple(scored), draw.ordinal, question, draw.chunks)
        for (task, draw, question, _), scored in zip(made, judged, strict=True)
    ]
    return groups, failed


def _turns(
    task: Task, lesson: Teaching, reader: Reader, version: int, kept: dict[bytes, Tokens]
) -> list[Turn]:
    """Returns the turns of a whole reading; `kept` has the shared parts of prompts.

    Raises ValueError for notes or an answer longer than the reading allows, and for a document
    that the teacher read in other chunks.
    """
    rules, template, tokenizer = reader.rules, reader.template, reader.tokenizer
    asked = memory_agent.question_of(task, tokenizer, rules.max_question)
    chunks = reader.chunks_of(task)
    state: memory_agent.State = memory_agent.start(asked, chunks)
    turns: list[Turn] = []
    before = NO_TOKENS
    while not turns or turns[-1].kind is TurnKind.UPDATE:
        kind, prompt = memory_agent.prompt(rules, template, state)
        if kind is TurnKind.ANSWER:
            said = tokenizer.encode(lesson.answer)
        else:
            chunk = chunks[state.next_chunk]
            both = tokenizer.decode(np.concatenate([before, chunk]))
            notes = lesson.notes(state.next_chunk, tokenizer.decode(before), both)
            said = _same(reader, state) if notes is None else tokenizer.encode(notes)
            before = chunk
        limit = rules.max_memory if kind is TurnKind.UPDATE else rules.max_answer
        if len(said) >= limit:
            raise ValueError(
                f"task {task.id!r}: its teacher says {len(said)} tokens in a turn of at most "
                f"{limit}, the stop token included; raise reading.max_memory or max_answer"
            )
        whole = tokens(np.concatenate([said, template.stop_ids[:1]]))
        unsampled = np.zeros(len(whole), np.float32)
        completion = Completion(whole, unsampled, Finish.STOP, version)
        prompt = shared_once(prompt, kept)
        turns.append(memory_agent.turn_of(rules, template, state, prompt, completion))
        state = memory_agent.after(rules, template, state, turns[-1])
    if lesson.chunks not in (None, len(turns) - 1):
        raise ValueError(
            f"task {task.id!r} has {len(turns) - 1} chunks here, and its teacher read "
            f"{lesson.chunks}; read with the same reading.chunk_size, chunk_ends and tokenizer"
        )
    return turns


def _same(reader: Reader, state: MemoryState) -> Tokens:
    """Returns what leaves the notes as they are."""
    if reader.rules.keeps:
        return reader.template.keep
    return reader.template.shown_memory(state.memory_tokens)
