"""User-defined reward functions: from a finished reading to numbers from 0 to 1.

    def reward(reading: nj.ReadingRecord) -> float: ...

A function returns one number, what the answer is worth, or one a turn: what each memory is worth,
and then the answer. It may be a coroutine function, or take a batch (`own_calls.reward`). Many
calls are under way at once, and results are in the order of the readings, whichever call ends
first. One by name runs in a process of its own (`own_worker.py`); one that was lent as an
object (`functions`) in threads here, or in an event loop of its own.

Time is kept by a loop that does nothing else: neither an engine that computes, nor a function that
blocks, nor a full pipe can hold it up. Whatever is not such a number ends in one line that names
function and row: a reward that fails is a mistake to mend, and no answer's fault. Above:
rollout.rewards; below: own_calls, worker and functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from notepad_jax import functions
from notepad_jax.scoring import own_calls, worker
from notepad_jax.scoring.own_calls import CallResult, Calls
from notepad_jax.scoring.reading_record import ReadingRecord, told
from notepad_jax.waiting import Loop

WORKER = pathlib.Path(__file__).parent / "own_worker.py"
START = 300.0  # seconds in which a module has to be imported

Worth = tuple[float, ...]  # of an answer alone, or of a reading's turns, or of its memories


class RewardFailed(ValueError):
    """A reward that failed, or is no number from 0 to 1."""


class Own:
    """A user's reward function, ready to be called."""

    def __init__(self, name: str, way: _Here | _There, memories: bool) -> None:
        self.name, self._way, self._memories = name, way, memories
        self._gate = asyncio.Semaphore(way.calls.at_once)

    async def judge(self, records: Sequence[ReadingRecord]) -> list[Worth]:
        """Returns what each reading of one question is worth, in their order.

        That is (answer,), or a number for each memory and then the answer's; of a reward of
        memories, a number for each. Raises RewardFailed, the first that came.
        """
        return await _clock(os.getpid()).awaited(self._judge(records))

    async def _judge(self, records: Sequence[ReadingRecord]) -> list[Worth]:
        if self._way.calls.batch:
            return self._of_batch(records, await self._call(records))
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._call([record])) for record in records]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        pairs = zip(records, calls, strict=True)
        return [self._worth(record, call.result().value, call.result()) for record, call in pairs]

    async def _call(self, records: Sequence[ReadingRecord]) -> CallResult:
        async with self._gate:
            seconds = self._way.calls.seconds
            try:
                await self._way.ready()
                async with asyncio.timeout(seconds):
                    outcome = await self._way.call(records)
            except TimeoutError:
                late = f"had not answered after {seconds:g} s{self._way.stop(seconds)}"
                raise self._failed(records, late) from None
            except _Broken as broken:
                raise self._failed(records, str(broken)) from None
        if outcome.raised:
            raise self._failed(records, f"raised {outcome.raised}") from outcome.problem
        return outcome

    def _of_batch(self, records: Sequence[ReadingRecord], outcome: CallResult) -> list[Worth]:
        values = outcome.value
        if not isinstance(values, list) or len(values) != len(records):
            raise self._failed(
                records,
                f"returned {outcome.shown:.80} for a batch of {len(records)} readings; it returns "
                f"a list with what each is worth",
            )
        pairs = zip(records, values, strict=True)
        return [self._worth(record, value, outcome) for record, value in pairs]

    def _worth(self, record: ReadingRecord, value: Any, outcome: CallResult) -> Worth:
        wanted = len(record.memories) if self._memories else record.turns
        if isinstance(value, float) and not self._memories:
            value, wanted = [value], 1
        if isinstance(value, list) and len(value) == wanted:
            if all(isinstance(one, float) and 0 <= one <= 1 for one in value):  # nan is not
                return tuple(value)
        said = f"returned {outcome.shown:.80}"
        if self._memories:
            rule = f"it returns a number from 0 to 1 for each memory, here {wanted}"
        else:
            rule = f"a reward is a number from 0 to 1, or one a turn, here {record.turns}"
        raise self._failed([record], f"{said}; {rule}")

    def _failed(self, records: Sequence[ReadingRecord], what: str) -> RewardFailed:
        where = f"row {records[0].row.get('id')!r}"
        if len(records) == 1:
            where += f", reading {records[0].sample}"
        return RewardFailed(f"the reward {self.name} {' '.join(what.split())} ({where})")


def named(name: str, key: str, memories: bool = False) -> Own:
    """Returns the reward of a name that `key` of a config holds; of `memories`, or of readings.

    Raises ValueError, in one line, where there is none, or it cannot be called.
    """
    function = functions.lent(name)
    if function is None and (name.startswith("__main__:") or "#" in name or "<" in name):
        functions.named(name, key)  # says where it can be found
    try:
        return Own(name, _There(name) if function is None else _Here(function), memories)
    except ValueError as problem:
        raise ValueError(f"{key} is {name!r}, {problem}") from None


@functools.cache
def _clock(process: int) -> Loop:
    """The loop that asks and keeps time; a fork has one of its own."""
    return Loop("rewards")


class _Broken(Exception):
    """A function that ended its process; its words say how."""


# ---------------------------------------------------------------- lent objects


class _Here:
    """A function in this process: in threads, or coroutines in one loop, made when it is needed.

    It is called as one by name is (`_There`).
    """

    def __init__(self, function: functions.Function) -> None:
        if fault := own_calls.fault(function):
            raise ValueError(fault)
        self.calls, self._function = own_calls.calls_of(function), function

    @functools.cached_property
    def _loop(self) -> Loop:
        loop = Loop("reward")
        weakref.finalize(self, _let_go, loop)
        return loop

    async def ready(self) -> None:
        pass

    async def call(self, records: Sequence[ReadingRecord]) -> CallResult:
        # Rows of its own: what it does to one, no other call sees.
        own = [dataclasses.replace(one, row=copy.deepcopy(dict(one.row))) for one in records]
        calling = own_calls.called(self._function, own if self.calls.batch else own[0])
        if not functions.is_coroutine(self._function):
            return await calling
        return await asyncio.wrap_future(self._loop.begun(calling))

    def stop(self, seconds: float) -> str:
        return ""  # a thread cannot be stopped, and a coroutine has been cancelled


def _let_go(loop: Loop) -> None:
    """Closes a loop without waiting for what blocks it."""
    threading.Thread(target=loop.close, daemon=True).start()


# ---------------------------------------------------------------- functions by name


class _There:
    """A function in a process of its own, which is begun anew when it has ended."""

    def __init__(self, name: str) -> None:
        self._command = [sys.executable, str(WORKER), name, os.getcwd()]
        self._process, self._beginning = _Process(self._command), asyncio.Lock()
        self.calls = Calls(**self._process.greeting)

    async def ready(self) -> None:
        """Returns when it can be called. Raises _Broken."""
        async with self._beginning:
            if self._process.over or self._process.owner != os.getpid():
                try:
                    self._process = await asyncio.to_thread(_Process, self._command)
                except ValueError as problem:
                    raise _Broken(f"cannot be called any more, {problem}") from None

    async def call(self, records: Sequence[ReadingRecord]) -> CallResult:
        """One call: with a batch, or with the one record. Raises _Broken."""
        return await self._process.ask([told(record) for record in records])

    def stop(self, seconds: float) -> str:
        """Ends a call that took too long; returns what became of it, in words."""
        self._process.stop(f"was stopped: another call had not answered after {seconds:g} s")
        return ", and was stopped"


class _Process:
    """The process and its pipes; every reply is found by its number. All but `__init__` is called
    in the clock's loop."""

    def __init__(self, command: Sequence[str]) -> None:
        self.owner, self.over, self._why = os.getpid(), False, ""
        self._numbers, self._asked = itertools.count(), {}
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        try:
            self.greeting = worker.greeting(self.popen, START)
        except BaseException:
            self.popen.kill()
            self.popen.wait()
            raise
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A Popen that is let go while its process runs is kept by subprocess, pipes and all.
        weakref.finalize(self, _close, self.owner, self._questions, self.popen.stdin)
        # No methods: the threads would hold on to the process, and so keep it running.
        writing = self._questions, self.popen.stdin
        reading = self.popen.stdout, _clock(os.getpid()), weakref.ref(self)
        threading.Thread(target=_write, args=writing, daemon=True).start()
        threading.Thread(target=_listen, args=reading, daemon=True).start()

    async def ask(self, readings: Sequence[dict[str, Any]]) -> CallResult:
        """Returns the reply. Raises _Broken where the process ends instead."""
        if self.over:
            raise self._broken()
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = reply
        question = json.dumps({"number": number, "readings": readings}).encode() + b"\n"
        self._questions.put(question)
        try:
            return await reply
        finally:
            self._asked.pop(number, None)

    def stop(self, why: str) -> None:
        """Ends the process; the other calls under way fail with the reason."""
        self._why, self.over = self._why or why, True
        self.popen.kill()

    def heard(self, line: bytes) -> None:
        """Takes a reply, or b"": its end."""
        if line:
            reply = json.loads(line)
            asked = self._asked.get(reply.pop("number"))
            if asked is not None and not asked.done():
                asked.set_result(CallResult(**reply))
            return
        self.over = True
        self.popen.wait()
        for asked in [*self._asked.values()]:
            if not asked.done():
                asked.set_exception(self._broken())

    def _broken(self) -> _Broken:
        return _Broken(self._why or f"ended its process (code {self.popen.returncode})")


def _close(owner: int, questions: queue.SimpleQueue[bytes | None], pipe: Any) -> None:
    """Has the pipe closed; in a fork, where no thread writes, closes its copy of it."""
    if os.getpid() == owner:
        questions.put(None)
    else:
        with contextlib.suppress(OSError, ValueError):
            os.close(pipe.fileno())


def _write(questions: queue.SimpleQueue[bytes | None], pipe: Any) -> None:
    """Writes questions, which may take as long as the process does not read; None closes the pipe,
    which ends the process."""
    with contextlib.suppress(OSError), pipe:  # of one that has ended, which `_listen` hears of
        for question in iter(questions.get, None):
            pipe.write(question)
            pipe.flush()


def _listen(replies: Any, loop: Loop, there: weakref.ref[_Process]) -> None:
    for line in itertools.chain(replies, [b""]):
        loop.begun(_heard(there, line))


async def _heard(there: weakref.ref[_Process], line: bytes) -> None:
    process = there()
    if process is not None:
        process.heard(line)
