"""Several engines of one process, side by side: as many `types.Completers`, with one policy.

A host has more chips than one engine of a small policy wants. Each engine is a service on a row
of the host's mesh, in a thread and an event loop of its own, so that it plans a round while
another waits for its chips; they share nothing, and what one launches never depends on how fast
another is. So each repeats bit by bit, as it would in a process of its own.

A policy is adopted on the mesh of all of them, a copy in each row, laid out once; every engine
takes its row's, which copies nothing. Above: programs.parts; below: `service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from notepad_jax.engine.service import EngineService, EngineStats
from notepad_jax.parallel import place
from notepad_jax.types import PolicySnapshot

T = TypeVar("T")


class Engines:
    """What a service is to a run, of several; use as `async with`, once.

    `services` run on the rows of `mesh`, in order.
    """

    def __init__(self, services: Sequence[EngineService], mesh: Mesh):
        self.count = len(services)
        self._services, self._mesh = tuple(services), mesh
        self._threads: list[_Thread] = []

    @property
    def version(self) -> int:
        """The version that new turns start on."""
        return self._services[0].version

    def start_with(self, snapshot: PolicySnapshot) -> None:
        """Sets the policy before the engines run; later ones are adopted."""
        for service, own in zip(self._services, self._rows(snapshot), strict=True):
            service.start_with(own)

    async def __aenter__(self) -> Engines:
        self._threads = [_Thread(f"engine {number}") for number in range(self.count)]
        await self.each(lambda number, service: service.__aenter__())
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.each(lambda number, service: service.__aexit__(*error))
        finally:
            for thread in self._threads:
                thread.close()

    async def each(self, work: Callable[[int, EngineService], Coroutine[Any, Any, T]]) -> list[T]:
        """As `types.Completers` says."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(thread.run(work(number, service)))
                    for number, (thread, service) in enumerate(
                        zip(self._threads, self._services, strict=True)
                    )
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        return [task.result() for task in tasks]

    async def adopt(self, snapshot: PolicySnapshot, drain: bool = False) -> None:
        """As `EngineService.adopt`, of all."""
        rows = self._rows(snapshot)
        await self.each(lambda number, service: service.adopt(rows[number], drain))

    def take_stats(self) -> EngineStats:
        """Returns the counts of all engines so far and starts new ones; seconds add up, too."""
        every = [dataclasses.astuple(service.take_stats()) for service in self._services]
        return EngineStats(*map(sum, zip(*every, strict=True)))

    def rest(self) -> None:
        """Gives the caches' memory back until turns are asked for; RuntimeError while any runs."""
        for service in self._services:
            service.rest()

    def _rows(self, snapshot: PolicySnapshot) -> list[PolicySnapshot]:
        return [
            PolicySnapshot(snapshot.version, place.row(snapshot.params, self._mesh, number))
            for number in range(self.count)
        ]


class _Thread:
    """An event loop that runs in a thread of its own until it is closed."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        # Whoever leaves without closing it, in an error, must not wait for it.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work` over there; if the caller is cancelled, until it has ended, too."""
        here = asyncio.get_running_loop()
        ended: asyncio.Future[asyncio.Task] = here.create_future()
        tasks: list[asyncio.Task] = []

        def tell(task: asyncio.Task) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone
                here.call_soon_threadsafe(lambda: ended.done() or ended.set_result(task))

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(tell)

        self._loop.call_soon_threadsafe(begin)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # after `begin`
            await asyncio.wait([ended])
            raise
        return ended.result().result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
