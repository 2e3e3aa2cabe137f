"""Several engines of one process, side by side: as many `types.Completers`, with one policy.

A host has more chips than one engine of a small policy wants. Each engine is a service on a row
of the host's mesh, in a thread and an event loop of its own, so that it plans a round while
another waits for its chips; they share nothing, and what one launches never depends on how fast
another is. So each repeats bit by bit, as it would in a process of its own.

A policy is adopted on the mesh of all of them, a copy in each row, laid out once; every engine
takes its row's, which copies nothing. Above: programs.parts; below: `service` and `waiting.Loop`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from notepad_jax.engine.service import EngineService, EngineStats
from notepad_jax.parallel import place
from notepad_jax.types import PolicySnapshot
from notepad_jax.waiting import Loop

T = TypeVar("T")


class Engines:
    """What a service is to a run, of several; use as `async with`, once.

    `services` run on the rows of `mesh`, in order.
    """

    def __init__(self, services: Sequence[EngineService], mesh: Mesh):
        self.count = len(services)
        self._services, self._mesh = tuple(services), mesh
        self._loops: list[Loop] = []

    @property
    def version(self) -> int:
        """The version that new turns start on."""
        return self._services[0].version

    def start_with(self, snapshot: PolicySnapshot) -> None:
        """Sets the policy before the engines run; later ones are adopted."""
        for service, own in zip(self._services, self._rows(snapshot), strict=True):
            service.start_with(own)

    async def __aenter__(self) -> Engines:
        self._loops = [Loop(f"engine {number}") for number in range(self.count)]
        await self.each(lambda number, service: service.__aenter__())
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.each(lambda number, service: service.__aexit__(*error))
        finally:
            for loop in self._loops:
                loop.close()

    async def each(self, work: Callable[[int, EngineService], Coroutine[Any, Any, T]]) -> list[T]:
        """As `types.Completers` says."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(loop.awaited(work(number, service)))
                    for number, (loop, service) in enumerate(
                        zip(self._loops, self._services, strict=True)
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
