"""Accuracy by document length: many readings at once, each remembered as a few lines.

`measure` runs the same agent over the same completer as training does, and keeps of every
reading only its answer, its scores and the moments at which its memory changed: a reading
of 3.5 million tokens has thousands of turns, and nothing here grows with them unless the
policy keeps rewriting. Neighbours: agent.memory_agent below (the loop), `report` and
`plots` beside it, the programs above.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from notepad_jax.agent import memory_agent
from notepad_jax.agent.memory_agent import Rules, TurnSampling
from notepad_jax.agent.prompts import Template
from notepad_jax.agent.tokenizer import Tokenizer
from notepad_jax.tasks.scoring import METRICS, wilson_interval
from notepad_jax.types import Chunks, Completer, Finish, Task, Tokens, Turn, TurnKind

REPORTED = ("em", "normalised_em", "token_f1", "sub_em")  # beside the task's own metric

_SUFFIX = {"": 1, "k": 1024, "m": 1024**2}


@dataclasses.dataclass(frozen=True)
class MemoryChange:
    """After which chunk the memory became which text."""

    chunk: int
    memory: str


@dataclasses.dataclass(frozen=True)
class Result:
    """One reading, scored."""

    task_id: str
    length: int  # the length asked for, tokens
    question: str
    gold: tuple[str, ...]
    answer: str
    correct: float  # the score by the task's own metric, in [0, 1]
    scores: Mapping[str, float]  # by every metric of REPORTED
    finish: Finish  # of the answer turn; CANCELLED also where the completer failed
    problem: str  # why a reading failed; empty if it did not
    turns: int
    tokens: int  # document tokens read
    began: float  # seconds since the measurement began
    seconds: float  # wall time of this reading, which shares the machine with others
    memory_changes: tuple[MemoryChange, ...]


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a measurement stands; reported after every turn and every reading."""

    length: int
    turns: int  # of this length, over all readings
    done: int  # readings
    total: int  # readings
    correct: float  # sum over finished readings


OnProgress = Callable[[Progress], None]


async def measure(
    tasks_by_length: Mapping[int, Sequence[Task]],
    completer: Completer,
    tokenizer: Tokenizer,
    template: Template,
    rules: Rules,
    sampling: TurnSampling,
    chunks_of: Callable[[Task], Chunks],
    on_progress: OnProgress,
    at_once: int = 256,
) -> list[Result]:
    """Reads every task, lengths one after the other, `at_once` readings at a time.

    The noise of a reading depends on `sampling.seed`, its length and its task id alone, so
    the order and `at_once` change the speed only. A reading whose completer fails counts
    as wrong and says why; when all readings of a length fail, the failure is raised.
    Results are ordered by length, then as the tasks were given.
    """
    _check(tasks_by_length)
    start = time.perf_counter()
    results: list[Result] = []
    for length, tasks in sorted(tasks_by_length.items()):
        reader = _Reader(completer, tokenizer, template, rules, sampling, chunks_of, length, start)
        results += await reader.read_all(tasks, on_progress, at_once)
    return results


def _check(tasks_by_length: Mapping[int, Sequence[Task]]) -> None:
    for length, tasks in tasks_by_length.items():
        names = [task.id for task in tasks]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two tasks of length {length} are called {twice!r}; ids are unique")
        for task in tasks:
            if task.metric not in METRICS:
                raise ValueError(
                    f"task {task.id!r} asks for metric {task.metric!r}; there are: "
                    f"{', '.join(METRICS)}"
                )


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
class _Reader:
    """Reads the tasks of one length."""

    completer: Completer
    tokenizer: Tokenizer
    template: Template
    rules: Rules
    sampling: TurnSampling
    chunks_of: Callable[[Task], Chunks]
    length: int
    start: float  # of the whole measurement, perf_counter

    async def read_all(
        self, tasks: Sequence[Task], on_progress: OnProgress, at_once: int
    ) -> list[Result]:
        gate = asyncio.Semaphore(at_once)
        now = Progress(self.length, 0, 0, len(tasks), 0.0)
        failures: list[Exception] = []

        def turned() -> None:
            nonlocal now
            now = dataclasses.replace(now, turns=now.turns + 1)
            on_progress(now)

        async def one(task: Task) -> Result:
            nonlocal now
            async with gate:
                result = await self._read(task, turned, failures)
            now = dataclasses.replace(now, done=now.done + 1, correct=now.correct + result.correct)
            on_progress(now)
            return result

        results = await asyncio.gather(*(one(task) for task in tasks))
        if failures and len(failures) == len(tasks):
            raise failures[0]
        return list(results)

    async def _read(
        self, task: Task, turned: Callable[[], None], failures: list[Exception]
    ) -> Result:
        began = time.perf_counter()
        chunks = _CountedChunks(self.chunks_of(task))
        changes: list[MemoryChange] = []
        turns, finish, answer, problem = 0, Finish.CANCELLED, "", ""
        question = memory_agent.encode_question(
            self.tokenizer, task.question, self.rules.max_question
        )
        state = memory_agent.start(question, chunks)
        seed = memory_agent.hashed_seed("eval", self.sampling.seed, self.length, task.id)
        sampling = dataclasses.replace(self.sampling, seed=seed)
        memory = state.memory_tokens
        try:
            async for turn, after in memory_agent.read(
                self.completer, self.template, self.rules, state, sampling
            ):
                turns += 1
                if not np.array_equal(after.memory_tokens, memory):
                    memory = after.memory_tokens
                    changes.append(MemoryChange(turn.chunk, self.tokenizer.decode(memory)))
                finish, answer, problem = self._end(turn)
                turned()
        except Exception as failure:  # one broken reading must not cost the others
            failures.append(failure)
            finish, answer, problem = Finish.CANCELLED, "", f"{type(failure).__name__}: {failure}"
        scores = {name: METRICS[name](answer, task.answers) for name in REPORTED}
        failed = finish is Finish.CANCELLED
        return Result(
            task_id=task.id,
            length=self.length,
            question=task.question,
            gold=task.answers,
            answer=answer,
            correct=0.0 if failed else METRICS[task.metric](answer, task.answers),
            scores={name: 0.0 for name in scores} if failed else scores,
            finish=finish,
            problem=problem,
            turns=turns,
            tokens=chunks.tokens,
            began=began - self.start,
            seconds=time.perf_counter() - began,
            memory_changes=tuple(changes),
        )

    def _end(self, turn: Turn) -> tuple[Finish, str, str]:
        """Returns (finish, answer, problem) if the reading ended with `turn`."""
        if turn.completion.finish is Finish.CANCELLED:
            return Finish.CANCELLED, "", "the completion was cancelled"
        if turn.kind is TurnKind.UPDATE:
            return Finish.CANCELLED, "", "the reading ended without an answer"
        answer = self.tokenizer.decode(memory_agent.written(turn.completion))
        return turn.completion.finish, answer, ""


# ---------------------------------------------------------------- summaries


@dataclasses.dataclass(frozen=True)
class Share:
    """A mean over n readings with Wilson's 95% interval.

    The interval takes readings as independent; questions about one document are not quite,
    so trust it less where few documents stand behind it.
    """

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class LengthSummary:
    """All readings of one length."""

    length: int
    n: int
    accuracy: Share
    scores: Mapping[str, Share]
    failed: int  # counted as wrong
    truncated: int  # answers cut at the limit, scored as they are
    turns: int
    tokens: int
    seconds: float  # wall, first beginning to last end


def share(values: Sequence[float]) -> Share:
    """Returns the mean of values in [0, 1] and its interval; (0, 0, 1) for no values."""
    total, n = float(sum(values)), len(values)
    low, high = wilson_interval(total, n)
    return Share(total / n if n else 0.0, low, high)


def summarise(results: Sequence[Result]) -> list[LengthSummary]:
    """Returns one summary per length, ascending."""
    return [
        _summary(length, [r for r in results if r.length == length])
        for length in sorted({r.length for r in results})
    ]


def _summary(length: int, results: Sequence[Result]) -> LengthSummary:
    ended = max(r.began + r.seconds for r in results)
    return LengthSummary(
        length=length,
        n=len(results),
        accuracy=share([r.correct for r in results]),
        scores={name: share([r.scores[name] for r in results]) for name in results[0].scores},
        failed=sum(r.finish is Finish.CANCELLED for r in results),
        truncated=sum(r.finish is Finish.LENGTH for r in results),
        turns=sum(r.turns for r in results),
        tokens=sum(r.tokens for r in results),
        seconds=ended - min(r.began for r in results),
    )


# ---------------------------------------------------------------- lengths as people write them


def parse_length(text: str) -> int:
    """Returns tokens: "512", "8k" = 8,192, "3.5m" = 3,670,016 (k is 1,024, m is k * k).

    So are the published lengths (7K, 14K, ..., 896K, 1.75M, 3.5M) doublings of each other.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no length; write tokens as 512, 8k or 3.5m")
    length = round(float(match[1]) * _SUFFIX[match[2].lower()])
    if length < 1:
        raise ValueError(f"a length of {text!r} is less than one token")
    return length


def format_length(length: int) -> str:
    """Returns "512", "8K", "3.5M": in 1,024s or 1,000s, whichever is the shorter to read."""
    if length < 1000:
        return str(length)
    return min((_with_suffix(length, base) for base in (1024, 1000)), key=len)


def _with_suffix(length: int, base: int) -> str:
    million = length >= 0.9995 * base**2
    value = length / (base**2 if million else base)
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    number = f"{value:.{digits}f}"
    return (number.rstrip("0").rstrip(".") if "." in number else number) + "KM"[million]
