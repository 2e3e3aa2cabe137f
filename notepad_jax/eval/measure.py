"""Many readings at once, each kept as a few lines: what an evaluation measures.

`measure` runs the same memory agent over the same completer as training does. Of a reading it
returns its answer, its scores and what became of the evidence; every memory goes to a
trace as it is written, so nothing held here grows with the length of a document or with
how often a policy rewrites its memory. Neighbours: methods (how a document is shown) and
recall (where an answer was lost) below, `readings` (results on disk) beside, the
programs above.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from notepad_jax.eval import methods
from notepad_jax.eval.recall import Recall
from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import Rules, TurnSampling
from notepad_jax.scoring import extraction, metrics
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import (
    NO_TOKENS,
    Chunks,
    Completer,
    CompleterFailed,
    Finish,
    Task,
    Tokens,
    Turn,
    TurnKind,
)

# Beside the task's own metric. The last is for comparison with published figures only.
REPORTED = ("em", "normalised_em", "token_f1", "sub_em", "sub_em_two_way")


@dataclasses.dataclass(frozen=True)
class MemoryChange:
    """After which chunk the memory became which text."""

    chunk: int
    memory: str
    tokens: int
    seconds: float  # since the reading began
    recall: float | None  # share of the evidence in this memory; None where none is known


@dataclasses.dataclass(frozen=True)
class Item:
    """One reading to be made."""

    task: Task
    method: str  # of methods.METHODS
    length: int  # the length asked for, tokens
    repeat: int  # 0-based; repeats of a question differ in their noise alone

    @property
    def key(self) -> Key:
        return (self.method, self.length, self.task.id, self.repeat)


Key = tuple[str, int, str, int]


@dataclasses.dataclass(frozen=True)
class Result:
    """One reading, scored; small, whatever was read. Its memories are in its trace."""

    task_id: str
    source: str
    method: str
    length: int
    repeat: int
    question: str
    gold: tuple[str, ...]
    answer: str
    correct: float  # the score by the task's own metric, in [0, 1]
    problem: str  # why a reading failed or an answer could not be scored; empty if neither
    scores: Mapping[str, float]  # by every metric of REPORTED
    finish: Finish  # of the answer turn; CANCELLED where there is no answer
    failed: bool  # the completer failed: counts as wrong, and going on makes it again
    turns: int
    tokens: int  # document tokens shown to the policy
    recall: float | None  # share of the evidence in the last memory
    lost: str  # recall.Recall.fate
    began: float  # wall clock, seconds since 1970
    seconds: float  # wall time of this reading, which shares the machine with others
    changes: int  # times that the memory changed

    @property
    def key(self) -> Key:
        return (self.method, self.length, self.task_id, self.repeat)


class Trace(Protocol):
    """Takes down one reading's memories as they change (readings.Readings makes them)."""

    def add(self, change: MemoryChange) -> None: ...


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a measurement stands; reported after every turn and every reading."""

    turns: int  # over all readings
    done: int  # readings
    total: int  # readings
    correct: float  # sum over finished readings


@dataclasses.dataclass(frozen=True)
class Reader:
    """Who reads, and how: what all readings of a measurement have in common.

    The noise of a reading depends on `sampling.seed` and its item alone, so neither the
    order nor `at_once` changes an answer. `excerpts` serves the methods of one turn.
    """

    completer: Completer
    tokenizer: Tokenizer
    template: Template
    rules: Rules
    sampling: TurnSampling
    chunks_of: Callable[[Task], Chunks]
    excerpts: methods.Excerpts
    at_once: int = 256


async def measure(
    items: Sequence[Item],
    reader: Reader,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    trace_of: Callable[[Item], Trace] | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
    on_failure: Callable[[Exception], None] = lambda failure: None,
) -> list[Result]:
    """Makes all readings, `reader.at_once` at a time; results come in the order of items.

    `on_result` is called as each reading ends. A reading that fails counts as wrong and says
    why; `on_failure` is told. A completer that is broken itself ends everything
    (CompleterFailed). What is wrong with the items themselves is raised before anything is
    read (`check`).
    """
    check(items, reader.tokenizer, reader.rules.max_question)
    gate = asyncio.Semaphore(reader.at_once)
    now = Progress(0, 0, len(items), 0.0)

    def turned() -> None:
        nonlocal now
        now = dataclasses.replace(now, turns=now.turns + 1)
        on_progress(now)

    async def one(item: Item) -> Result:
        nonlocal now
        async with gate:
            trace = trace_of(item) if trace_of else None
            result = await _read(item, reader, trace, turned, on_failure)
        on_result(result)
        now = dataclasses.replace(now, done=now.done + 1, correct=now.correct + result.correct)
        on_progress(now)
        return result

    return list(await asyncio.gather(*(one(item) for item in items)))


def check(items: Sequence[Item], tokenizer: Tokenizer, max_question: int) -> None:
    """Finds out what is wrong with items before any of them is read.

    Raises ValueError for two of one name, an unknown metric, contract or method, a question
    over the limit, and evidence without words.
    """
    seen: set[Key] = set()
    for item in items:
        if item.key in seen:
            raise ValueError(
                f"two tasks of length {item.length} are called {item.task.id!r}; ids are unique"
            )
        seen.add(item.key)
    for task in {id(item.task): item.task for item in items}.values():
        try:
            metrics.score("", task.answers, task.metric, task.contract)
        except ValueError as error:
            raise ValueError(f"task {task.id!r}: {error}") from error
        memory_agent.question_of(task, tokenizer, max_question)
        Recall(task.evidence)
    methods.check(item.method for item in items)


class _CountedChunks:
    """The chunks of a reading; counts the tokens it went through."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks, self._seen, self.tokens = chunks, -1, 0

    def __getitem__(self, k: int) -> Tokens:
        chunk = self._chunks[k]
        if k > self._seen:
            self._seen = k
            self.tokens += len(chunk)
        return chunk


@dataclasses.dataclass
class _Course:
    """How a reading went so far."""

    chunks: _CountedChunks
    recall: Recall
    turns: int = 0
    changes: int = 0
    shown: int = 0  # tokens, by a method of one turn
    finish: Finish = Finish.CANCELLED
    answer: str = ""
    failed: bool = False
    problem: str = ""


async def _read(
    item: Item,
    reader: Reader,
    trace: Trace | None,
    turned: Callable[[], None],
    on_failure: Callable[[Exception], None],
) -> Result:
    clock, began = time.time(), time.perf_counter()
    facts = item.task.evidence if item.method == methods.NOTEPAD else ()
    course = _Course(_CountedChunks(reader.chunks_of(item.task)), Recall(facts))
    question = memory_agent.question_of(item.task, reader.tokenizer, reader.rules.max_question)
    try:
        await _follow(item, question, reader, course, trace, began, turned)
    except methods.DoesNotFit as outcome:  # a result of the method, not a failure of ours
        course.problem = str(outcome)
    except CompleterFailed:  # nobody will be answered: what comes would all be wrong
        raise
    except Exception as failure:  # one broken reading must not cost the others
        on_failure(failure)
        course.failed, course.finish, course.answer = True, Finish.CANCELLED, ""
        course.problem = f"{type(failure).__name__}: {failure}"
    return _result(item, course, clock, time.perf_counter() - began)


async def _follow(
    item: Item,
    question: Tokens,
    reader: Reader,
    course: _Course,
    trace: Trace | None,
    began: float,
    turned: Callable[[], None],
) -> None:
    """Reads to the end, writing down in `course` and `trace` what happens."""
    memory: Tokens = NO_TOKENS
    async for turn, after in _turns(item, question, reader, course):
        course.turns += 1
        if not np.array_equal(after, memory):
            memory = after
            text = reader.tokenizer.decode(memory)
            course.changes += 1
            course.recall.see(text)
            if trace is not None:
                seconds = time.perf_counter() - began
                held = course.recall.final
                trace.add(MemoryChange(turn.chunk, text, len(memory), seconds, held))
        if turn.completion.finish is Finish.CANCELLED:
            course.failed, course.problem = True, "the completion was cancelled"
        elif turn.kind is TurnKind.ANSWER:
            course.finish = turn.completion.finish
            course.answer = reader.tokenizer.decode(memory_agent.written(turn.completion))
        turned()


def _turns(
    item: Item, question: Tokens, reader: Reader, course: _Course
) -> AsyncIterator[tuple[Turn, Tokens]]:
    seed = memory_agent.hashed_seed(
        "eval", reader.sampling.seed, item.method, item.length, item.task.id, item.repeat
    )
    sampling = dataclasses.replace(reader.sampling, seed=seed)
    how = (reader.completer, reader.template, reader.rules, question)
    if item.method == methods.NOTEPAD:
        return methods.read_with_memory(*how, course.chunks, sampling)
    excerpt, _ = reader.excerpts(item.task.document, item.method)
    course.shown = len(excerpt)
    return methods.read_at_once(*how, excerpt, sampling)


def _result(item: Item, course: _Course, began: float, seconds: float) -> Result:
    task, answered = item.task, course.finish is not Finish.CANCELLED
    score = metrics.score(course.answer, task.answers, task.metric, task.contract)
    # RULER's own scores look at all of an answer; the others at what stands in its box.
    contract = "auto" if task.contract == "plain" else task.contract
    said = extraction.extract(course.answer, contract).answer or ""
    correct = score.value if answered else 0.0
    return Result(
        task_id=task.id,
        source=task.source,
        method=item.method,
        length=item.length,
        repeat=item.repeat,
        question=task.question,
        gold=task.answers,
        answer=course.answer,
        correct=correct,
        problem=course.problem or (score.problem if answered else ""),
        scores={
            name: metrics.METRICS[name](said, task.answers) if answered else 0.0
            for name in REPORTED
        },
        finish=course.finish,
        failed=course.failed,
        turns=course.turns,
        tokens=course.chunks.tokens or course.shown,
        recall=course.recall.final,
        lost=course.recall.fate(correct == 1.0) if answered else "",
        began=began,
        seconds=seconds,
        changes=course.changes,
    )
