"""Data-parallel engine replicas of one process (`types.Completers`), all with one policy.

A host has more chips than one engine of a small policy wants. Each engine is a service on a row
of the host's mesh, in a thread and an event loop of its own, so that it plans a round while
another waits for its chips; they share nothing, and what one launches never depends on how fast
another is. So each repeats bit by bit, as it would in a process of its own.

A policy is adopted on the mesh of all of them, replicated over its rows, laid out once; every
engine takes its row's copy without copying. Engines may share a row: CPUs run what several threads
launch on one device at the same time. Above: setup.builders; below: `service` and `waiting.Loop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from notepad_jax.engine.metered import EngineStats
from notepad_jax.engine.service import EngineService
from notepad_jax.parallel import place
from notepad_jax.types import Completion, Piece, PolicySnapshot, Prompt, SamplingParams
from notepad_jax.waiting import Loop

T = TypeVar("T")


class Engines:
    """Engine replicas that a run uses as it does one service; use as `async with`, once.

    `services` run on the rows of `mesh`, in order; where there are more, by turns.
    """

    def __init__(self, services: Sequence[EngineService], mesh: Mesh):
        self.count = len(services)
        self._services, self._mesh = tuple(services), mesh
        self._loops: list[Loop] = []
        self._seated = [0] * self.count  # readings with a seat at each engine

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
        """Runs `work` on every engine, in that engine's loop; as `types.Completers` says."""
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

    @contextlib.contextmanager
    def seat(self, adapters: int = 0) -> Iterator[Seat]:
        """A seat at the least loaded engine: a `types.Streamer`, for any event loop.

        A reading keeps its seat from turn to turn: there its prefixes are cached. All its turns
        are of the same `adapters` (`SamplingParams`).
        """
        number = self._seated.index(min(self._seated))
        self._seated[number] += 1
        try:
            yield Seat(self._loops[number], self._services[number], adapters)
        finally:
            self._seated[number] -= 1

    @contextlib.contextmanager
    def one(self) -> Iterator[One]:
        """The least loaded engine, as `types.Completers` of one; it counts as a seat."""
        with self.seat() as seat:
            yield One(seat.loop, seat.service)

    async def adopt(self, snapshot: PolicySnapshot, drain: bool = False) -> None:
        """Adopts a policy on all engines (`EngineService.adopt`); if one refuses, none does."""

        async def checked(number: int, service: EngineService) -> None:
            service.check_new(snapshot.version)

        await self.each(checked)
        rows = self._rows(snapshot)
        await self.each(lambda number, service: service.adopt(rows[number], drain))

    def take_stats(self) -> EngineStats:
        """Returns the counts of all engines so far and starts new ones; seconds add up, too."""
        every = [dataclasses.astuple(service.take_stats()) for service in self._services]
        return EngineStats(*map(sum, zip(*every, strict=True)))

    def rest(self, weights: bool = False) -> None:
        """Frees the KV caches of all engines (`EngineService.rest`)."""
        for service in self._services:
            service.rest(weights)

    def _rows(self, snapshot: PolicySnapshot) -> list[PolicySnapshot]:
        rows = [
            PolicySnapshot(snapshot.version, place.row(snapshot.params, self._mesh, number))
            for number in range(min(self.count, self._mesh.shape["fsdp"]))
        ]
        return [rows[number % len(rows)] for number in range(self.count)]


@dataclasses.dataclass(frozen=True)
class One:
    """One of several engines, as `types.Completers`, for callers that deal out the readings."""

    loop: Loop
    service: EngineService
    count: int = 1

    async def each(self, work: Callable[[int, EngineService], Coroutine[Any, Any, T]]) -> list[T]:
        """Runs `work` on this engine, in its loop; as `types.Completers` says."""
        return [await self.loop.awaited(work(0, self.service))]


class Seat:
    """A client of one engine for coroutines of another event loop (`Engines.seat` makes it).

    Its thread makes tokens while the caller's does other things. Failures are `EngineService`'s.
    """

    def __init__(self, loop: Loop, service: EngineService, adapters: int) -> None:
        self.loop, self.service, self._adapters = loop, service, adapters

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Samples one completion, as `EngineService.complete`."""
        sampling = dataclasses.replace(sampling, adapters=self._adapters)
        return await self.loop.awaited(self.service.complete(prompt, sampling))

    async def stream(self, prompt: Prompt, sampling: SamplingParams) -> AsyncIterator[Piece]:
        """Streams one completion, as `EngineService.stream`; closing frees its slot and pages."""
        sampling = dataclasses.replace(sampling, adapters=self._adapters)
        caller = asyncio.get_running_loop()
        told: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        def tell(what: Piece | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone
                caller.call_soon_threadsafe(told.put_nowait, what)

        async def made() -> None:
            try:
                async with contextlib.aclosing(self.service.stream(prompt, sampling)) as pieces:
                    async for piece in pieces:
                        tell(piece)
            except Exception as problem:
                tell(problem)

        making = asyncio.ensure_future(self.loop.awaited(made()))
        try:
            while True:
                piece = await told.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish is not None:
                    return
        finally:
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await making
