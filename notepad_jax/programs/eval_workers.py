"""Worker processes of an evaluation on a CPU: each reads whole documents with an engine of its own.

Engines of one process wait for each other at python's lock; processes with cores of their own make
1.1 to 1.3 times as many turns (docs/performance.md). A worker loads the policy by its name, gets
the readings of a document, and of the next one when it has room; every result and trace comes back
and is written here. So a reading is what it is in one process, and an evaluation may go on in
either. Less than `WORTH` is read here, as is whatever is this process's alone: a user's function, a
document that cannot be sent. Above: evaluate; below: measuring and `child`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from notepad_jax import keys
from notepad_jax.child import Child, Died, sendable
from notepad_jax.eval.measure import REFRESH, EvalProgress, Item, Key, Result
from notepad_jax.eval.readings import OpenTrace, Readings
from notepad_jax.model import parameters
from notepad_jax.planner import memory
from notepad_jax.planner.machine import Look, look
from notepad_jax.programs import measuring, subjects
from notepad_jax.programs.measuring import Measured
from notepad_jax.reading.loop import first_failure
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.turns import Turns
from notepad_jax.setup import compiled, process
from notepad_jax.setup.config.whole import Config
from notepad_jax.setup.eval_jobs import EvalJob
from notepad_jax.telemetry.screen import Screen, SilentScreen
from notepad_jax.types import CompleterFailed

# Turns times parameters from which on workers give more than their start takes, 5 seconds: 65
# thousand turns of the starter, a hundred of a policy of 135 million.
WORTH = 15e9


def count(
    config: Config, subject: subjects.Subject, jobs: Sequence[EvalJob], see: Look = look
) -> int:
    """Returns how many workers shall read the jobs; less than 2: none, they are read here."""
    policy, own = subject.policy, (config.reading.memory_update, config.evaluate.reward)
    if policy is None or not jobs or any(":" in name for name in own):
        return 0
    turns = sum(len(job.items) * job.turns for job in jobs)
    if turns * parameters.count(policy.config) < WORTH or not all(map(_can_be_sent, jobs)):
        return 0
    longest = max((job.rules for job in jobs), key=lambda rules: rules.chunk_size)
    return memory.processes(config.engine, policy, longest, subject.template, see)


def _can_be_sent(job: EvalJob) -> bool:
    try:
        return bool(pickle.dumps(job.items[0]))
    except Exception:  # whatever an object of a user's says to it
        return False


@dataclasses.dataclass(frozen=True)
class _Share:
    """What a worker is asked for: readings of one document."""

    number: int
    limits: Rules
    items: tuple[Item, ...]
    whole: frozenset[Key]  # those of which every turn is kept


class EvalWorkers:
    """The workers of an evaluation; use as `async with`, once."""

    def __init__(
        self, config: Config, policy: str, number: int, readings: Readings,
        on_failure: Callable[[Exception], None], screen: Screen,
    ) -> None:  # fmt: skip
        one = {"policy": policy, "engine.per_cpu": 1, "engine.replicas": 1}
        self._work = functools.partial(_work, keys.changed(config, one))
        self._at_once, self._number = config.evaluate.at_once, number
        self._readings, self._on_failure, self._screen = readings, on_failure, screen
        self._alone = threading.Lock()  # callbacks come from a thread for each worker
        self._compiling = 0  # workers
        self._children: list[Child] = []
        self._warned: set[str] = set()

    async def __aenter__(self) -> EvalWorkers:
        for cores in _cores(self._number):
            self._children.append(Child(self._work, cores, {"JAX_PLATFORMS": "cpu"}))
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children:
            child.close()
        compiled.watched().elsewhere(-self._compiling)

    @contextlib.asynccontextmanager
    async def opened(self, limits: Rules) -> AsyncIterator[Measured]:
        """Yields what has the workers measure readings within `limits`."""
        yield functools.partial(self._measured, limits)

    async def _measured(
        self, limits: Rules, items: Sequence[Item], on_progress: Callable[[EvalProgress], None]
    ) -> None:
        documents: dict[int, list[Item]] = {}
        for item in items:
            documents.setdefault(id(item.task.document), []).append(item)
        whole = frozenset(item.key for item in items if self._readings.keeps_turns(item))
        job = _Job(len(items), on_progress)
        for number, own in enumerate(documents.values()):
            kept = whole.intersection(item.key for item in own)
            job.left.append(_Share(number, limits, tuple(own), kept))
        most = -(-min(self._at_once or len(items), len(items)) // self._number)
        loop = asyncio.get_running_loop()
        with concurrent.futures.ThreadPoolExecutor(self._number) as pool:
            following = [
                loop.run_in_executor(pool, self._follow, child, job, most)
                for child in self._children
            ]
            try:
                await asyncio.gather(*following)
            except BaseException:  # no thread may wait for a worker any more
                for child in self._children:
                    child.kill()
                raise

    def _follow(self, child: Child, job: _Job, most: int) -> None:
        """Has a worker read documents until none is left."""
        under_way: dict[int, int] = {}  # readings that it was asked for, by share
        while True:
            with self._alone:
                shares = []
                while job.left and sum(under_way.values()) < most:
                    shares.append(job.left.popleft())
                    under_way[shares[-1].number] = len(shares[-1].items)
            for share in shares:
                child.send(share)
            if not under_way:
                return
            heard = child.receive()
            if isinstance(heard, Died):
                raise _ended(heard)
            with self._alone:
                what, *told = heard
                if what == "ended":
                    del under_way[told[0]]
                elif what == "result":
                    self._readings.take(*told)
                    job.ended(told[0])
                elif what == "turns":
                    job.turned(*told)
                else:
                    self._heard(what, *told)

    def _heard(self, what: str, *told: Any) -> None:
        match what:
            case "broken":
                raise told[0]
            case "failure":
                self._on_failure(told[0])
            case "work":
                self._screen.work(*told)
            case "compiling":
                self._compiling += told[0]
                compiled.watched().elsewhere(told[0])
            case "warn" if told[0] not in self._warned:
                self._warned.add(told[0])
                self._screen.warn(told[0])


class _Job:
    """What is left of a job, and its progress, over all workers."""

    def __init__(self, total: int, on_progress: Callable[[EvalProgress], None]) -> None:
        self.left: collections.deque[_Share] = collections.deque()
        self._on_progress, self._total = on_progress, total
        self._turns: dict[int, int] = {}  # by share
        self._done, self._correct, self._ended = 0, 0.0, 0

    def turned(self, share: int, turns: int) -> None:
        self._turns[share] = turns
        all_turns = sum(self._turns.values())
        self._on_progress(
            EvalProgress(all_turns, self._done, self._total, self._correct, self._ended)
        )

    def ended(self, result: Result) -> None:
        self._done += 1
        self._correct += result.correct
        self._ended += result.turns


def _cores(number: int) -> list[list[int]]:
    """The cores of each worker; those of all, where a system cannot bind a process to some."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * number
    there = sorted(os.sched_getaffinity(0))
    return [there[worker::number] or there for worker in range(number)]


def _ended(died: Died) -> CompleterFailed:
    more = "; it may have had too little memory" if died.killed else ""
    return CompleterFailed(
        f"a worker process of the evaluation ended ({died.words}){more}. What was read is kept; "
        f"with --config.engine.per_cpu=1 all is read in one process"
    )


# ---------------------------------------------------------------- in a worker


def _work(config: Config, pipe: Connection) -> None:
    process.prepared(config)
    said = _Said(pipe)
    try:
        asyncio.run(_serve(config, pipe, said))
    except Exception as error:
        said.send("broken", sendable(error))


async def _serve(config: Config, pipe: Connection, said: _Said) -> None:
    loop, asked = asyncio.get_running_loop(), asyncio.Queue[_Share]()
    threading.Thread(target=_listen, args=(pipe, loop, asked), daemon=True).start()
    subject = subjects.named(config, said)
    limits: Rules | None = None
    with first_failure():
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            while True:
                share = await asked.get()
                if share.limits != limits:  # then nothing is under way
                    await stack.aclose()
                    opened = measuring.here(config, subject, said, said.failed, None, share.limits)
                    measured, limits = await stack.enter_async_context(opened), share.limits
                    turns = measuring.turns_of(config, subject, limits)
                said.keep_turns(share.whole, turns)
                group.create_task(_read(share, measured, said))


async def _read(share: _Share, measured: Measured, said: _Said) -> None:
    await measured(share.items, lambda now: said.send("turns", share.number, now.turns))
    said.tell()
    said.send("ended", share.number)


def _listen(
    pipe: Connection, loop: asyncio.AbstractEventLoop, asked: asyncio.Queue[_Share]
) -> None:
    while True:
        try:
            share = pipe.recv()
        except (EOFError, OSError):  # no process is left to read for
            os._exit(0)
        loop.call_soon_threadsafe(asked.put_nowait, share)


class _Said(SilentScreen):
    """What a worker tells: its readings (`measuring.Keeps`), and its screen's lines and work."""

    def __init__(self, pipe: Connection) -> None:
        self._whole: dict[Key, Callable[[], Turns]] = {}  # those with turns that are kept
        self._pipe, self._alone = pipe, threading.Lock()
        self._under_way: dict[Key, OpenTrace] = {}
        self._worked = (0, 0, 0.0)  # tokens, turns and seconds of engines, not told yet
        self._busy, self._compiling = compiled.watched(), 0
        threading.Thread(target=self._tell_on, daemon=True).start()

    def send(self, what: str, *told: Any) -> None:
        with self._alone:
            self._pipe.send((what, *told))

    def keep_turns(self, whole: Iterable[Key], turns: Callable[[], Turns]) -> None:
        self._whole.update(dict.fromkeys(whole, turns))

    def trace_of(self, item: Item) -> OpenTrace:
        turns = self._whole.pop(item.key, None)
        trace = OpenTrace(turns() if turns else None)
        self._under_way[item.key] = trace
        return trace

    def add(self, result: Result) -> None:
        trace = self._under_way.pop(result.key)
        self.send("result", result, trace.memories, trace.kept())

    def failed(self, failure: Exception) -> None:
        self.send("failure", sendable(failure))

    def warn(self, text: str) -> None:
        self.send("warn", text)

    def work(self, tokens: int, turns: int, seconds: float) -> None:
        with self._alone:
            a, b, c = self._worked
            self._worked = a + tokens, b + turns, c + seconds

    def tell(self) -> None:
        """Tells what engines did since the last time, and whether jax compiles now."""
        with self._alone:
            worked, self._worked = self._worked, (0, 0, 0.0)
            change = bool(self._busy()) - self._compiling
            self._compiling += change
        if any(worked):
            self.send("work", *worked)
        if change:
            self.send("compiling", change)

    def _tell_on(self) -> None:
        while True:
            time.sleep(REFRESH)
            self.tell()
