"""The loop that makes many readings concurrently, for rollouts, evaluations and `build`.

There is no turn barrier: a reading asks for its next turn as soon as its last one came back,
and the completer (the engine, an endpoint, a fake) sees all waiting turns together. Readings of
one completer run in one thread of asyncio. Where there are several (`types.Completers`) each
gets whole documents, whose readings share chunks, and reads them in its own thread; watchers are
called by one thread at a time.

A reading that fails costs itself: it ends with its `failure`, and the caller decides what that
means. A completer that is broken ends everything (CompleterFailed). Whatever ends the
loop, a failure or a cancellation, all readings are cancelled and awaited before it returns.
Above: rollout.collector and eval.measure, which watch; below: memory_agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from notepad_jax.reading import answer, memory_agent
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.shares import Homes, whole_documents
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import (
    Chunks,
    Completer,
    CompleterFailed,
    Completers,
    Finish,
    MemoryState,
    Task,
    Tokens,
    Turn,
    TurnKind,
)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Policy, rules and sampling: what all readings of a rollout or a measurement share."""

    completer: Completer | Completers
    tokenizer: Tokenizer
    template: Template
    rules: Rules
    sampling: TurnSampling  # its seed is each job's own
    chunks_of: Callable[[Task], Chunks]
    at_once: int | None = None  # readings under way, of all completers; None: all
    homes: Homes | None = None  # kept from one call to the next; None: each call shares out anew
    around: Callable[[Completer], Completer] = lambda one: one  # what each completer is asked by

    def __post_init__(self) -> None:
        self.rules.check(self.template)


@dataclasses.dataclass(frozen=True, eq=False)
class Again:
    """An update turn of an earlier reading, to be written once more (`memory_agent.rewrite`)."""

    turn: Turn
    memory: Tokens  # that it began with
    probed: bool  # whether the question is then answered from the memory that it leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One reading to be made: by the memory agent, or an answer to what `shown` returns.

    Or one turn of a reading that was made, `again`.
    """

    task: Task
    seed: int  # of all its noise; order and company change nothing
    shown: Callable[[], Tokens] | None = None
    max_answer: int | None = None  # tokens of all its contexts; None: as the reader's rules say
    again: Again | None = None
    length: int = 0  # tokens of its document, about; 0: not known

    @property
    def work(self) -> int:
        """Its relative cost: tokens, or 1 where these are not known, or for one turn."""
        return max(1, self.length) if self.whole else 1

    @property
    def whole(self) -> bool:
        """Whether the document is read, chunk by chunk."""
        return self.shown is None and self.again is None


class Watcher(Protocol):
    """The callbacks that observe one reading."""

    def turn(self, turn: Turn, memory: Tokens) -> None:
        """Called when a turn came back; `memory` is the memory after it."""


@dataclasses.dataclass(frozen=True)
class ReadingEnd:
    """The outcome of a reading."""

    answer: str  # all that its contexts wrote; "" where there is none
    finish: Finish  # of the last answer turn; CANCELLED where there is no answer
    tokens: int  # of the document that were shown to the policy
    failure: Exception | None = None
    chunks: tuple[int, ...] = ()  # tokens that each update turn read


W = TypeVar("W", bound=Watcher)
R = TypeVar("R")


async def read_all(
    jobs: Sequence[Job],
    reader: Reader,
    watch: Callable[[int], W],
    ended: Callable[[int, W, ReadingEnd], R],
    judge: Callable[[int, W, ReadingEnd], Coroutine[Any, Any, None]] | None = None,
) -> list[R]:
    """Makes all readings, at most `reader.at_once` at a time, or one of each completer.

    `watch` is called with a job's index as its reading begins, `ended` as it ends; what that
    returns of each job is returned, in the order of jobs. `judge` is awaited before `ended`, for
    what takes time and is no turn: others read on, and others are judged, meanwhile. Raises
    CompleterFailed, and whatever `watch`, the watchers, `judge` and `ended` raise.
    """
    # All chunks are made now: readings of one document share them however far apart they run.
    chunks = [reader.chunks_of(job.task) if job.whole else () for job in jobs]
    alone = threading.Lock()

    async def some(indices: Sequence[int], completer: Completer, at_once: int) -> list[R]:
        gate, completer = asyncio.Semaphore(at_once), reader.around(completer)

        async def one(index: int) -> R:
            async with gate:
                with alone:
                    watcher = watch(index)
                end = await _follow(jobs[index], chunks[index], reader, completer, watcher, alone)
            chunks[index] = ()  # the last reading of a document lets it go
            if judge is not None:
                await judge(index, watcher, end)
            with alone:
                return ended(index, watcher, end)

        with first_failure():
            async with asyncio.TaskGroup() as readings:
                running = [readings.create_task(one(index)) for index in indices]
        return [reading.result() for reading in running]

    several = isinstance(reader.completer, Completers)
    parts, homes = (reader.completer.count, reader.homes) if several else (1, None)
    shares = whole_documents([job.task for job in jobs], [job.work for job in jobs], parts, homes)
    at_once = reader.at_once or max(1, len(jobs)) * parts
    if several:  # k rounds the k-th share of `at_once`, and all together are `at_once`
        read = await reader.completer.each(
            lambda k, completer: some(shares[k], completer, max(1, (at_once + k) // parts))
        )
    else:
        read = [await some(shares[0], reader.completer, at_once)]
    found = dict(zip(itertools.chain(*shares), itertools.chain(*read), strict=True))
    return [found[index] for index in range(len(jobs))]


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """Raises the first of a group of failures as if it had been the only one."""
    try:
        yield
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__


async def _follow(
    job: Job, chunks: Chunks, reader: Reader, completer: Completer, watcher: Watcher,
    alone: threading.Lock,
) -> ReadingEnd:  # fmt: skip
    shown = 0  # tokens of the document; those that are read again count once
    course: AsyncIterator[tuple[Turn, memory_agent.State]] | None = None
    turn: Turn | None = None
    sizes: list[int] = []
    while True:
        try:
            if course is None:
                course, shown = _turns(job, chunks, reader, completer)
            turn, state = await anext(course)
            if turn.completion.finish is Finish.CANCELLED:
                raise Cancelled("the completion was cancelled")
        except StopAsyncIteration:
            if turn.kind is TurnKind.UPDATE:  # written again, and nothing was asked of it
                return ReadingEnd("", Finish.CANCELLED, shown)
            said = reader.tokenizer.decode(memory_agent.answered(state))
            return ReadingEnd(said, turn.completion.finish, shown, chunks=tuple(sizes))
        except CompleterFailed:
            raise  # nothing that this reading did: all readings fail, with one cause
        except Exception as failure:
            return ReadingEnd("", Finish.CANCELLED, shown, failure)
        if turn.kind is TurnKind.UPDATE:
            sizes.append(turn.size)
            shown += turn.size if turn.first_read else 0
        with alone:
            watcher.turn(turn, state.memory_tokens)


class Cancelled(RuntimeError):
    """A completion was cancelled by the completer's side, not by the reading."""


def _turns(
    job: Job, chunks: Chunks, reader: Reader, completer: Completer
) -> tuple[AsyncIterator[tuple[Turn, memory_agent.State]], int]:
    """Returns the turns to come, and how many tokens of the document are shown before them."""
    rules, template = reader.rules, reader.template
    if job.max_answer is not None:
        rules = rules.within(job.max_answer)
    question = memory_agent.question_of(job.task, reader.tokenizer, rules.max_question)
    sampling = dataclasses.replace(reader.sampling, seed=job.seed)
    if job.again is not None:
        old = job.again
        state = MemoryState(question, (), old.memory, old.turn.chunk)
        return memory_agent.rewrite(
            completer, template, rules, state, old.turn, sampling, old.probed
        ), 0
    excerpt = () if job.shown is None else job.shown()
    state = memory_agent.start(question, chunks)
    if job.shown is not None:
        state = answer.start(template.direct_prompt(question, excerpt))
    return memory_agent.read(completer, template, rules, state, sampling), len(excerpt)
