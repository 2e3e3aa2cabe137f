"""Worker processes of an evaluation on a CPU: each reads whole documents with an engine of its own.

Engines of one process wait for each other at python's lock; in processes with cores of their own a
measurement takes .77 to .93 of its time (docs/performance.md). A worker loads the policy by its
name, gets the readings of a document, and of the next one when it has room; every result and trace
comes back and is written here. So a reading is what it is in one process, and an evaluation may go
on in either. Read here is less than `WORTH`, and whatever is this process's alone: a user's
function, a document that cannot be sent, a policy that is another one by now. Above: evaluate;
below: measuring and `child`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax

from notepad_jax import keys
from notepad_jax.child import Child, Died
from notepad_jax.eval.measure import EvalProgress, Item, Result
from notepad_jax.eval.readings import Readings
from notepad_jax.model import parameters
from notepad_jax.planner import memory
from notepad_jax.planner.machine import Look, look
from notepad_jax.programs import subjects
from notepad_jax.programs.beside import fingerprint_of
from notepad_jax.programs.eval_worker import Share, work
from notepad_jax.programs.measuring import Measured
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.shares import by_document
from notepad_jax.setup import builders, compiled
from notepad_jax.setup.config.whole import Config
from notepad_jax.setup.eval_jobs import EvalJob
from notepad_jax.telemetry.screen import Screen
from notepad_jax.types import CompleterFailed

# Turns times parameters from which on workers give more than their start takes, 5 seconds: 65
# thousand turns of the starter, a hundred of a policy of 135 million.
WORTH = 15e9
LARGEST = 2**20  # bytes of a reading that is sent; one with a corpus in it is read here


def count(
    config: Config, subject: subjects.Subject, jobs: Sequence[EvalJob], see: Look = look
) -> int:
    """Returns how many workers shall read the jobs; less than 2: none, they are read here."""
    policy, own = subject.policy, (config.reading.memory_update, config.evaluate.reward)
    if policy is None or not jobs or any(":" in name for name in own):
        return 0
    turns = sum(len(job.items) * job.turns for job in jobs)
    # Without a cache on disk each would compile what this process has compiled.
    if turns * parameters.count(policy.config) < WORTH or not jax.config.jax_compilation_cache_dir:
        return 0
    about = [by_document([item.task for item in job.items]) for job in jobs]
    most = min(max(map(len, about)), len(_cores()))
    longest = max((job.rules for job in jobs), key=lambda rules: rules.chunk_size)
    found = min(most, memory.processes(config.engine, policy, longest, subject.template, see))
    first = (job.items[one[0]] for job, its in zip(jobs, about, strict=True) for one in its)
    return found if all(map(_can_be_sent, first)) else 0


def _can_be_sent(item: Item) -> bool:
    try:
        return len(pickle.dumps(item)) <= LARGEST
    except Exception:  # whatever an object of a user's says to it
        return False


class EvalWorkers:
    """The workers of an evaluation; use as `async with`, once."""

    def __init__(
        self, config: Config, policy: builders.LoadedPolicy, number: int, readings: Readings,
        on_failure: Callable[[Exception], None], screen: Screen,
    ) -> None:  # fmt: skip
        one = {"policy": policy.name, "engine.per_cpu": 1, "engine.replicas": 1}
        self._work = functools.partial(work, keys.changed(config, one))
        self._policy, self._number = policy, number
        self._at_once, self._readings = config.evaluate.at_once, readings
        self._on_failure, self._screen = on_failure, screen
        self._alone = threading.Lock()  # callbacks come from a thread for each worker
        self._compiling = 0  # workers
        self._children: list[Child] = []

    async def __aenter__(self) -> EvalWorkers:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def begun(self) -> bool:
        """Starts the workers; whether all of them have loaded the policy that is here.

        If not, none is left. Raises OSError where a process cannot be started.
        """
        for cores in _shared_out(_cores(), self._number):
            self._children.append(Child(self._work, cores, {"JAX_PLATFORMS": "cpu"}))
        loaded = await self._each(functools.partial(self._loaded, fingerprint_of(self._policy)))
        if not loaded:
            self._end()
        return loaded

    def _end(self) -> None:
        while self._children:
            self._children.pop().close()
        compiled.watched().elsewhere(-self._compiling)
        self._compiling = 0

    def _loaded(self, fingerprint: str, child: Child) -> bool:
        while not isinstance(heard := child.receive(), Died):
            if heard[0] in ("loaded", "broken"):
                return heard == ("loaded", fingerprint)
            with self._alone:
                self._heard(*heard)
        return False

    async def _each(self, follow: Callable[[Child], bool]) -> bool:
        """Calls `follow` with each worker, in a thread of its own; whether all return True."""
        loop = asyncio.get_running_loop()
        with concurrent.futures.ThreadPoolExecutor(self._number) as pool:
            following = [loop.run_in_executor(pool, follow, child) for child in self._children]
            try:
                return all(await asyncio.gather(*following))
            except BaseException:  # no thread may wait for a worker any more
                for child in self._children:
                    child.kill()
                raise

    @contextlib.asynccontextmanager
    async def opened(self, limits: Rules) -> AsyncIterator[Measured]:
        """Yields what has the workers measure readings within `limits`."""
        yield functools.partial(self._measured, limits)

    async def _measured(
        self, limits: Rules, items: Sequence[Item], on_progress: Callable[[EvalProgress], None]
    ) -> None:
        job = _Job(len(items), on_progress)
        most = min(-(-len(items) // self._number), max(1, self._at_once // self._number))
        documents = [[items[k] for k in one] for one in by_document([i.task for i in items])]
        # The largest first, as `reading.shares` deals them out: what is left evens out.
        for number, own in enumerate(sorted(documents, key=len, reverse=True)):
            whole = tuple(filter(self._readings.keeps_turns, own))
            job.left.append(Share(number, limits, most, tuple(own), whole))
        await self._each(functools.partial(self._follow, job, most))

    def _follow(self, job: _Job, most: int, child: Child) -> bool:
        """Has a worker read documents until none is left, about `most` readings at a time."""
        under_way: dict[int, int] = {}  # readings that it was asked for, by share
        while True:
            with self._alone:
                shares = job.taken(under_way, most)
            for share in shares:
                child.send(share)
            if not under_way:
                return True
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


class _Job:
    """What is left of a job, and its progress, over all workers."""

    def __init__(self, total: int, on_progress: Callable[[EvalProgress], None]) -> None:
        self.left: collections.deque[Share] = collections.deque()
        self._on_progress, self._now = on_progress, EvalProgress(0, 0, total, 0.0)
        self._turns: dict[int, int] = {}  # by share

    def taken(self, under_way: dict[int, int], most: int) -> list[Share]:
        """Returns the next shares for a worker that has room, and writes them down there."""
        shares = []
        while self.left and not (
            under_way and sum(under_way.values()) + len(self.left[0].items) > most
        ):
            shares.append(self.left.popleft())
            under_way[shares[-1].number] = len(shares[-1].items)
        return shares

    def turned(self, share: int, turns: int) -> None:
        self._turns[share] = turns
        self._now = self._now._replace(turns=sum(self._turns.values()))
        self._on_progress(self._now)

    def ended(self, result: Result) -> None:
        now = self._now
        self._now = now._replace(
            done=now.done + 1, correct=now.correct + result.correct, ended=now.ended + result.turns
        )


def _cores() -> list[int]:
    """The cores that this process may use, as far as the system says so."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _shared_out(cores: Sequence[int], number: int) -> list[Sequence[int]]:
    """The cores of each of so many workers; where there are fewer, some have all."""
    return [cores[worker::number] or cores for worker in range(number)]


def _ended(died: Died) -> CompleterFailed:
    more = "; it may have had too little memory" if died.killed else ""
    return CompleterFailed(
        f"a worker process of the evaluation ended ({died.words}){more}. What was read is kept; "
        f"with --config.engine.per_cpu=1 all is read in one process"
    )
