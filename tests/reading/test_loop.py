"""The one reading loop: order, no turn barrier, failures, cancellation, what is shared."""

import asyncio
import threading
import time

import pytest

from notepad_jax.reading.loop import Job, Reader, read_all
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.text.chunks import Documents
from notepad_jax.types import (
    CompleterFailed,
    Completion,
    Finish,
    Task,
    TextDocument,
    TurnKind,
    tokens,
)
from tests import fakes

LONG = TextDocument("the code of ann is red . " * 4)  # 28 tokens, 7 chunks
SHORT = TextDocument("bob says blue .")  # 1 chunk


def task(name: str, document=LONG, question: str = "who ?") -> Task:
    return Task(name, question, document, ("ann",), "test", "em")


def reader(completer, at_once: int | None = None) -> Reader:
    tokenizer = fakes.tokenizer()
    return Reader(
        completer, tokenizer, fakes.template(), fakes.rules(),
        TurnSampling(1.0, 1.0, tuple(tokenizer.stop_ids), 0), Documents(tokenizer, 4), at_once,
    )  # fmt: skip


class Seen:
    """Notes every turn of every reading in one list."""

    def __init__(self, notes, index):
        self.notes, self.index = notes, index

    def turn(self, turn, memory):
        self.notes.append((self.index, turn.kind))


def run(jobs, completer, at_once=None):
    notes = []
    how = reader(completer, at_once)
    ends = asyncio.run(
        read_all(jobs, how, lambda i: Seen(notes, i), lambda i, seen, end: (i, seen.index, end))
    )
    assert [end[:2] for end in ends] == [(i, i) for i in range(len(jobs))]
    return [end for *_, end in ends], notes


def test_a_short_reading_does_not_wait_for_a_long_one():
    ends, notes = run([Job(task("long"), 1), Job(task("short", SHORT), 2)], fakes.empty())
    assert notes.index((1, TurnKind.ANSWER)) < 5 and notes[-1] == (0, TurnKind.ANSWER)
    assert [end.tokens for end in ends] == [28, 4]


class Counting:
    """A completer that counts how many turns were under way at most."""

    def __init__(self):
        self.completer, self.most = fakes.Scripted(lambda prompt, sampling: [2], pauses=3), 0

    async def complete(self, prompt, sampling):
        self.most = max(self.most, self.completer.running + 1)
        return await self.completer.complete(prompt, sampling)


def test_no_more_than_at_once_are_under_way():
    for at_once, most in ((2, 2), (None, 7)):
        completer = Counting()
        run([Job(task(str(k)), k) for k in range(7)], completer, at_once)
        assert completer.most == most


def test_a_reading_of_one_turn_sees_its_excerpt():
    completer = fakes.empty()
    (end,), notes = run([Job(task("a"), 1, lambda: tokens([5, 6, 7]))], completer)
    assert end.tokens == 3 and notes == [(0, TurnKind.ANSWER)]
    assert completer.calls[0][0].shared.tolist()[:3] == [5, 6, 7]


class Failing(fakes.Scripted):
    """Raises at one call."""

    def __init__(self, at, failure):
        super().__init__(lambda prompt, sampling: [2], pauses=3)
        self.at, self.failure = at, failure

    async def complete(self, prompt, sampling):
        if len(self.calls) == self.at:
            self.calls.append((prompt, sampling))
            raise self.failure
        return await super().complete(prompt, sampling)


def test_a_failure_costs_its_own_reading_alone():
    ends, _ = run([Job(task(str(k)), k) for k in range(3)], Failing(7, OSError("gone")))
    assert [type(end.failure) for end in ends].count(OSError) == 1
    broken = next(end for end in ends if end.failure)
    assert (broken.answer, broken.finish) == ("", Finish.CANCELLED)
    assert all(end.finish is Finish.STOP for end in ends if not end.failure)


def test_a_cancelled_completion_is_a_failure():
    class Cancelling:
        async def complete(self, prompt, sampling):
            return Completion(tokens(), [], Finish.CANCELLED, 0)

    (end,), notes = run([Job(task("a"), 1)], Cancelling())
    assert str(end.failure) == "the completion was cancelled" and notes == []


@pytest.mark.parametrize("cause", [CompleterFailed("the engine failed"), None])
def test_what_ends_the_loop_leaves_nothing_running(cause):
    completer = Failing(5, cause) if cause else fakes.Scripted(lambda *_: [2], pauses=1000)

    async def attempt():
        jobs = [Job(task(str(k)), k) for k in range(4)]
        everything = asyncio.create_task(
            read_all(jobs, reader(completer), lambda i: Seen([], i), lambda *end: end)
        )
        await asyncio.sleep(0.01)
        if cause is None:
            everything.cancel()
        with pytest.raises(CompleterFailed if cause else asyncio.CancelledError):
            await everything
        assert completer.running == 0 and len(asyncio.all_tasks()) == 1

    asyncio.run(attempt())


def test_what_a_watcher_raises_is_no_reading_that_failed():
    class Full:
        def turn(self, turn, memory):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        asyncio.run(
            read_all([Job(task("a"), 1)], reader(fakes.empty()), lambda i: Full(), lambda *e: e)
        )


# ---------------------------------------------------------------- several completers


class Several:
    """Completers, each in a thread of its own for as long as it works."""

    def __init__(self, *completers):
        self.completers, self.count = completers, len(completers)

    async def each(self, work):
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(asyncio.to_thread(lambda k=k, c=c: asyncio.run(work(k, c))))
                for k, c in enumerate(self.completers)
            ]
        return [task.result() for task in tasks]


def test_the_longest_document_is_begun_first_and_results_stay_in_their_places():
    """Two at a time: the last of four is known to be the longest."""
    begun = []
    jobs = [Job(task(str(k), TextDocument("ann is red .")), k, length=k + 1) for k in range(4)]

    def watch(index):
        begun.append(index)
        return Seen([], index)

    how = reader(fakes.empty(), at_once=2)
    ends = asyncio.run(read_all(jobs, how, watch, lambda index, seen, end: index))
    assert begun == [3, 2, 1, 0] and ends == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("at_once", "most"), [(1, [1, 1, 1]), (5, [1, 2, 2]), (6, [2, 2, 2]), (None, [3, 3, 4])]
)
def test_several_completers_have_no_more_than_at_once_under_way_together(at_once, most):
    jobs = [Job(task(str(k), TextDocument("ann is red .")), k) for k in range(10)]
    completers = [Counting() for _ in most]
    run(jobs, Several(*completers), at_once)
    assert sorted(completer.most for completer in completers) == most


def test_without_a_limit_all_questions_about_a_document_are_under_way():
    completers = Counting(), Counting()
    run([Job(task(str(k)), k) for k in range(6)], Several(*completers))
    assert {completer.most for completer in completers} == {0, 6}


def test_several_completers_read_what_one_reads_and_watchers_are_never_disturbed():
    documents = [TextDocument("the code of ann is red . " * n) for n in range(1, 6)]
    jobs = [Job(task(f"{d}{k}", documents[d]), 10 * d + k) for d in range(5) for k in range(2)]
    busy = threading.Lock()

    class Alone(Seen):
        def turn(self, turn, memory):
            assert busy.acquire(blocking=False), "another thread is here"
            time.sleep(0.0005)
            super().turn(turn, memory)
            busy.release()

    def read(completer):
        notes = []
        ended = lambda i, seen, end: (i, end)  # noqa: E731
        return asyncio.run(read_all(jobs, reader(completer, 4), lambda i: Alone(notes, i), ended))

    several = [fakes.first_of_chunk() for _ in range(3)]
    assert read(Several(*several)) == read(fakes.first_of_chunk())
    assert all(completer.calls for completer in several)
