"""The engine's async service, which coroutines call: the Completer of this project.

Many readings run as coroutines; each awaits `complete` once per turn. The service lets them
run until none can go on, then does one round for all of them: the scheduler admits, the
executor reads missing prefixes, starts the admitted tails and decodes every slot, and what
came out wakes the readings. There is no turn barrier: a reading whose draft was verified is
on its next chunk while another still decodes. One thread, no clock in any decision: the same
requests in the same order give the same launches, so a run can be repeated bit by bit.

Two versions of the weights may be resident: after `adopt`, new turns start on the new one
while running turns end on the old one. Every completion has exactly one version. If a launch
fails, every caller that waits or comes later is told why; none waits for ever.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from notepad_jax import packing
from notepad_jax.engine.executor import Executes, Sampled
from notepad_jax.engine.metered import EngineStats
from notepad_jax.engine.scheduler import Admission, Context, Scheduler
from notepad_jax.types import (
    CompleterFailed,
    Completion,
    Piece,
    PolicySnapshot,
    Prompt,
    SamplingParams,
    tokens,
)


@dataclasses.dataclass(eq=False)
class _Ticket:
    """A caller's claim on a running or waiting turn, with the futures that wake it."""

    context: Context
    done: asyncio.Future  # of nothing; what was sampled is in the context
    tell: Callable[[], None] = lambda: None  # wakes who streams the turn


@dataclasses.dataclass(frozen=True, eq=False)
class _Adoption:
    """A policy that waits to be adopted."""

    snapshot: PolicySnapshot
    begun: asyncio.Future


class EngineService:
    """The async service over one engine's scheduler and weights; use as `async with`, once."""

    def __init__(
        self,
        executor: Executes,
        snapshot: PolicySnapshot,
        *,
        share_prefixes: bool = True,
        use_drafts: bool = True,
    ):
        self.stats = EngineStats()
        self.scheduler = Scheduler(
            executor.settings, snapshot.version, share_prefixes=share_prefixes,
            use_drafts=use_drafts,
        )  # fmt: skip
        self._executor = executor
        self._params = self._weights(snapshot)  # of the resident versions
        self._adoptions: collections.deque[_Adoption] = collections.deque()
        self._drained: list[asyncio.Future] = []  # of callers that wait for the newest to be alone
        self._tickets: dict[Context, _Ticket] = {}
        self._submitted = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task | None = None
        self._failure: BaseException | None = None

    @property
    def version(self) -> int:
        """The version that new turns start on."""
        return self.scheduler.version

    def start_with(self, snapshot: PolicySnapshot) -> None:
        """Sets the policy before the service runs; later ones are adopted."""
        if self._task is not None:
            raise RuntimeError("the engine is running; use `await service.adopt(snapshot)`")
        self.scheduler.adopt(snapshot.version)
        self._params = self._weights(snapshot)

    def _weights(self, snapshot: PolicySnapshot) -> dict[int, Any]:
        params = snapshot.params  # None where the policy is set later
        return {snapshot.version: None if params is None else self._executor.weights(params)}

    async def __aenter__(self) -> EngineService:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._failure is None:  # cancelled before its first step: it told no caller
            self._failure = asyncio.CancelledError()
            self._tell_everybody()

    def take_stats(self) -> EngineStats:
        """Returns the counts so far and starts new ones."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    def rest(self, weights: bool = False) -> None:
        """Frees the KV cache until a turn is asked for; RuntimeError while any runs.

        With `weights` those, too: a policy must be adopted then before anything is asked for,
        which may be the same version again.
        """
        self.scheduler.forget()
        self._executor.rest()
        if weights:
            self._params = dict.fromkeys(self._params)

    # ------------------------------------------------------------ what callers do

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Samples one completion of `prompt`.

        Cancelling the coroutine frees its slot and pages.

        Raises:
          PromptTooLong: before any work is done, if it would not fit were it alone.
          CompleterFailed: a launch failed, now or earlier (its cause is chained), or the
            service was left.
        """
        ticket = self._submit(prompt, sampling)
        try:
            await ticket.done
        finally:
            self._withdraw(ticket)
        context = ticket.context
        logprobs = np.array(context.logprobs, np.float32)
        return Completion(tokens(context.tokens), logprobs, context.finish, context.version)

    async def stream(self, prompt: Prompt, sampling: SamplingParams) -> AsyncIterator[Piece]:
        """Yields a completion's tokens as they are made; together they are `complete`'s.

        Nothing waits for a slow consumer: its next piece is longer. Closing the iterator frees
        slot and pages. Raises as `complete` does.
        """
        ticket, given = self._submit(prompt, sampling), 0
        context, more = ticket.context, asyncio.Event()
        ticket.tell = more.set
        try:
            while True:
                await more.wait()
                more.clear()
                ended = ticket.done.done()
                if ended:
                    ticket.done.result()
                new, logprobs = context.tokens[given:], context.logprobs[given:]
                top = tuple(context.top[given:])
                given += len(new)
                yield Piece(
                    tokens(new),
                    np.asarray(logprobs, np.float32),
                    context.finish if ended else None,
                    context.version,
                    top,
                    context.cached,
                )
                if ended:
                    return
        finally:
            self._withdraw(ticket)

    async def adopt(self, snapshot: PolicySnapshot, drain: bool = False) -> None:
        """Returns once new turns start on `snapshot`.

        If two versions are resident already, that is when the older one's turns have ended.
        With `drain`, it returns when no turn runs on another version and their arrays are let
        go. Raises ValueError for a version that is resident or waits to be, CompleterFailed as
        `complete` does.
        """
        self.check_alive()
        self.check_new(snapshot.version)
        loop = asyncio.get_running_loop()
        adoption = _Adoption(snapshot, loop.create_future())
        self._adoptions.append(adoption)
        self._wake.set()
        await adoption.begun
        self.check_alive()  # it may have begun and failed before we were told
        if drain:
            self._drained.append(loop.create_future())
            self._wake.set()
            await self._drained[-1]

    def check_new(self, version: int) -> None:
        """Raises ValueError for a version that is resident or waits to be."""
        resident = {v for v in self.scheduler.resident if self._params.get(v) is not None}
        if version in resident | {a.snapshot.version for a in self._adoptions}:
            raise ValueError(
                f"version {version} is resident or waits to be; give other weights another version"
            )

    # ------------------------------------------------------------ tickets

    def _submit(self, prompt: Prompt, sampling: SamplingParams) -> _Ticket:
        self.check_alive()
        if self._params.get(self.version) is None:
            raise RuntimeError("the engine gave its weights back; let it adopt a policy")
        context = self.scheduler.submit(prompt, sampling)
        ticket = _Ticket(context, asyncio.get_running_loop().create_future())
        self._tickets[context] = ticket
        self._submitted += 1
        self._wake.set()
        return ticket

    def _withdraw(self, ticket: _Ticket) -> None:
        """Forgets a ticket; what it still had is free again."""
        if self._tickets.pop(ticket.context, None) is not None:
            self.scheduler.cancel(ticket.context)
            self._wake.set()

    def check_alive(self) -> None:
        """Raises CompleterFailed, or RuntimeError before the service runs."""
        if self._failure is not None:
            raise self._failed()
        if self._task is None:
            raise RuntimeError("the engine service is not running; use `async with service:`")

    def _failed(self) -> CompleterFailed:
        """A new exception for each caller: their tracebacks are their own."""
        error = CompleterFailed(
            "the engine service was left"
            if isinstance(self._failure, asyncio.CancelledError)
            else f"the engine failed: {type(self._failure).__name__}: {self._failure}"
        )
        error.__cause__ = self._failure
        return error

    # ------------------------------------------------------------ the loop

    async def _run(self) -> None:
        try:
            while True:
                await self._settle()
                self._change_versions()
                if self.scheduler.idle:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    self._round()
        except BaseException as error:
            self._failure = error
            self._tell_everybody()
            if not isinstance(error, Exception):  # others reach every caller that waits or comes
                raise

    async def _settle(self) -> None:
        """Lets coroutines run until none of them submits anything more."""
        quiet, before = 0, self._submitted
        while quiet < 4:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._submitted == before else 0
            before = self._submitted

    def _tell_everybody(self) -> None:
        open_ones = [ticket.done for ticket in self._tickets.values()]
        open_ones += [adoption.begun for adoption in self._adoptions] + self._drained
        for future in open_ones:
            if not future.done():
                future.set_exception(self._failed())
                future.exception()  # seen: one whose waiter is gone says nothing at exit
        for ticket in self._tickets.values():
            ticket.tell()
        self._params.clear()

    def _change_versions(self) -> None:
        """Adopts waiting policies, at most two versions at once, and frees unused weights."""
        while self._adoptions and self.scheduler.may_adopt(self._adoptions[0].snapshot.version):
            adoption = self._adoptions[0]
            if not adoption.begun.done():  # else the caller that asked was cancelled
                params = self._weights(adoption.snapshot)  # where it fails its caller is told
                self.scheduler.adopt(adoption.snapshot.version)
                self._params |= params
                adoption.begun.set_result(None)
            self._adoptions.popleft()
        resident = self.scheduler.resident
        self._params = {v: params for v, params in self._params.items() if v in resident}
        if len(resident) == 1:
            for drained in self._drained:
                if not drained.done():
                    drained.set_result(None)
            self._drained.clear()

    def _round(self) -> None:
        """One round over all turns: reads prefixes, starts tails, decodes.

        Callers of ended turns are woken in the order of ends, and streams of turns that go on
        after them: whether a turn is streamed changes no turn's place in the queue.
        """
        self.stats.rounds += 1
        begin = time.perf_counter()
        self._start(self.scheduler.admit())
        started = time.perf_counter()
        for version in sorted(self._params):
            contexts = [c for c in self.scheduler.running if c.version == version]
            self._record(contexts, self._executor.decode(self._params[version], contexts))
        for context in self.scheduler.running:
            self._tickets[context].tell()
        self.stats.prefill_seconds += started - begin
        self.stats.decode_seconds += time.perf_counter() - started

    def _start(self, admission: Admission) -> None:
        params, contexts = self._params[admission.version], admission.contexts
        if admission.prefixes:
            self._executor.read(params, admission.prefixes)
        self.stats.prefix_tokens += sum(prefix.length for prefix in admission.prefixes)
        self.stats.pairs += sum(packing.triangle(prefix.length) for prefix in admission.prefixes)
        self.stats.prefix_tokens_saved += admission.saved
        self.stats.tail_tokens += sum(len(context.tail) for context in contexts)
        if contexts:
            sampled = self._executor.start(params, contexts)
            drafted = sum(max(len(some.tokens) - 1, 0) for some in sampled)
            self.stats.draft_tokens += drafted
            self.stats.decode_tokens -= drafted
            self._record(contexts, sampled)

    def _record(self, contexts: Sequence[Context], sampled: Sequence[Sampled]) -> None:
        for context, some in zip(contexts, sampled, strict=True):
            self.scheduler.record(context, *some)
            self.stats.decode_tokens += len(some.tokens)
            ticket = self._tickets[context]
            if not context.remaining:
                del self._tickets[context]
                self.stats.turns += 1
                self.stats.pairs += context.pairs
                if not ticket.done.done():  # cancelled, and not yet withdrawn
                    ticket.done.set_result(None)
                ticket.tell()
