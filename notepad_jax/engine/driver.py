"""The driver: continuous batching for coroutines, and the Completer of this project.

Many readings run as coroutines; each awaits `complete` once per turn. The driver lets them
run until none can go on, then does one round of device work for all of them: prefixes that
are missing, the tails that wait, one `generate` for the slots that decode; results wake
their readings, and so on. There is no turn barrier: a reading whose draft was verified is on
its next chunk while another still decodes. One thread, no clock in any decision: the same
requests in the same order give the same launches, so a run can be repeated bit by bit.

A new policy is adopted at a turn boundary: no new turn starts while one is asked for,
running turns end (they are bounded), parameters swap, prefixes of the old version are
forgotten. Every completion has exactly one policy version.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time

import numpy as np

from notepad_jax.engine.layout import Tail
from notepad_jax.engine.paged_engine import DecodeState, PagedEngine, Started
from notepad_jax.engine.pages import CachedPrefix, OutOfPages, PrefixCache
from notepad_jax.types import (
    Completion,
    Finish,
    PolicySnapshot,
    Prompt,
    SamplingParams,
    Tokens,
    tokens,
)


class PromptTooLong(ValueError):
    """A prompt or completion does not fit the engine's limits."""


@dataclasses.dataclass(eq=False)
class Request:
    """One completion that is asked for, from submission to its future's result."""

    prompt: Prompt
    sampling: SamplingParams
    future: asyncio.Future
    prefix: CachedPrefix | None = None
    slot: int = -1
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class DriverStats:
    """Counts since the last `take_stats`; tokens and seconds."""

    prefix_tokens: int = 0  # prefilled as shared prefixes
    prefix_tokens_saved: int = 0  # shared prompt tokens that were already cached
    tail_tokens: int = 0  # prefilled as private tails, drafts not counted
    draft_tokens: int = 0  # completion tokens that came from verified drafts
    decode_tokens: int = 0  # completion tokens that were decoded one by one
    turns: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class EngineDriver:
    """Owns the engine's decode state and the policy it runs. Use as `async with`."""

    def __init__(
        self,
        engine: PagedEngine,
        snapshot: PolicySnapshot,
        *,
        share_prefixes: bool = True,
        read_ahead: bool = False,
        use_drafts: bool = True,
    ):
        self.engine = engine
        self.stats = DriverStats()
        self._state: DecodeState = engine.init_decode_state()
        self._snapshot = snapshot
        self._next_snapshot: PolicySnapshot | None = None
        self._adopted: asyncio.Event = asyncio.Event()
        self._share, self._ahead, self._drafts = share_prefixes, read_ahead, use_drafts
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}  # slot -> request
        self._live: dict[int, Request] = {}  # everything submitted and not yet answered
        self._submitted = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task | None = None

    @property
    def version(self) -> int:
        return self._snapshot.version

    def start_with(self, snapshot: PolicySnapshot) -> None:
        """Sets the policy before the driver runs; later ones are adopted."""
        if self._task is not None:
            raise RuntimeError("the driver is running; use `await driver.adopt(snapshot)`")
        self._snapshot = snapshot

    async def __aenter__(self) -> EngineDriver:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None

    def take_stats(self) -> DriverStats:
        """Returns the counts so far and starts new ones."""
        stats, self.stats = self.stats, DriverStats()
        return stats

    # ------------------------------------------------------------ what callers do

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Samples one completion of `prompt`. Raises PromptTooLong before any work is done."""
        self._check(prompt, sampling)
        if self._task is None or self._task.done():
            raise RuntimeError("the engine driver is not running; use `async with driver:`")
        request = Request(prompt, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._live[id(request)] = request
        self._submitted += 1
        self._wake.set()
        try:
            return await request.future
        finally:
            del self._live[id(request)]

    async def adopt(self, snapshot: PolicySnapshot) -> None:
        """Swaps the policy once all running turns have ended."""
        self._adopted.clear()
        self._next_snapshot = snapshot
        self._wake.set()
        await self._adopted.wait()

    def _check(self, prompt: Prompt, sampling: SamplingParams) -> None:
        s = self.engine.settings
        length = len(prompt.shared) + len(prompt.tail)
        if length > s.max_prompt:
            raise PromptTooLong(
                f"a prompt of {length} tokens exceeds the engine's {s.max_prompt}; "
                f"lower the chunk, question or memory limit, or raise engine.max_prompt"
            )
        if sampling.max_new_tokens > s.max_new_tokens:
            raise PromptTooLong(
                f"max_new_tokens is {sampling.max_new_tokens} and the engine allows "
                f"{s.max_new_tokens}; raise engine.max_new_tokens"
            )
        draft = len(prompt.draft) if self._drafts else 0
        tail = len(prompt.tail) + draft
        tail += 0 if self._shares(prompt.shared) else len(prompt.shared)
        if tail > s.row_tokens:
            raise PromptTooLong(
                f"a prompt's private part has {tail} tokens and a packed row holds "
                f"{s.row_tokens}; raise engine.row_tokens"
            )

    # ------------------------------------------------------------ the loop

    async def _run(self) -> None:
        try:
            while True:
                await self._settle()
                self._drop_cancelled()
                if self._next_snapshot is not None and not self._running:
                    self._swap()
                elif self._running or (self._waiting and self._next_snapshot is None):
                    self.stats.rounds += 1
                    self._prefill()
                    self._decode()
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:
            # Every reading learns of it; raising here as well would only say it twice.
            for request in list(self._live.values()):
                if not request.future.done():
                    request.future.set_exception(error)

    async def _settle(self) -> None:
        """Lets coroutines run until none of them submits anything more."""
        quiet, before = 0, self._submitted
        while quiet < 4:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._submitted == before else 0
            before = self._submitted

    def _swap(self) -> None:
        self._snapshot, self._next_snapshot = self._next_snapshot, None
        self._state.prefixes.drop_unused()
        self._adopted.set()

    def _drop_cancelled(self) -> None:
        self._waiting = collections.deque(r for r in self._waiting if not r.future.done())
        for slot, request in list(self._running.items()):
            if request.future.done():
                del self._running[slot]
                self._release(request)

    def _release(self, request: Request) -> None:
        if request.slot >= 0:
            self.engine.free_slot(self._state, request.slot)
        if request.prefix is not None:
            request.prefix.users -= 1

    def _prefill(self) -> None:
        """Starts waiting requests, as many as there are free slots and pages for."""
        if self._next_snapshot is not None:
            return
        begin = time.perf_counter()
        batch = self._admit(len(self._state.free_slots))
        if batch:
            tails = [self._tail(r) for r in batch]
            started = self.engine.prefill_packed(self._snapshot.params, self._state, tails)
            unfinished: list[tuple[Request, Started]] = []
            for request, result in zip(batch, started, strict=True):
                self.stats.tail_tokens += len(result.tail.tokens)
                self.stats.draft_tokens += len(result.tokens) - 1
                self.stats.decode_tokens += 1
                request.ids, request.logprobs = result.tokens, result.logprobs
                if result.finished:
                    self._finish(request)
                else:
                    unfinished.append((request, result))
            self._occupy(unfinished)
        self.stats.prefill_seconds += time.perf_counter() - begin

    def _occupy(self, unfinished: list[tuple[Request, Started]]) -> None:
        """Gives started requests their slots; those that find no page wait and start again."""
        placed: list[tuple[Started, int]] = []
        free = iter(self._state.free_slots)
        room = self._state.prefixes.room
        for request, result in unfinished:
            need = self.engine.private_pages(result.tail)
            if need > room:
                if not self._running and not placed:
                    raise OutOfPages(need, room, self._state.pool.total)
                self._release(request)
                request.prefix, request.ids, request.logprobs = None, [], []
                self._waiting.appendleft(request)
                continue
            room -= need
            request.slot = next(free)
            self._running[request.slot] = request
            placed.append((result, request.slot))
        if placed:
            self.engine.insert_packed(self._state, *zip(*placed, strict=True))

    def _admit(self, limit: int) -> list[Request]:
        """Takes waiting requests in order; prefills the prefixes they lack (and read-ahead)."""
        version, prefixes = self._snapshot.version, self._state.prefixes
        batch: list[Request] = []
        missing: dict[tuple[int, bytes], Tokens] = {}
        users: list[tuple[Request, tuple[int, bytes]]] = []
        page_size = self.engine.settings.page_size
        room = prefixes.room
        while self._waiting and len(batch) < limit:
            request = self._waiting[0]
            shared = request.prompt.shared
            if self._shares(shared):
                key = PrefixCache.key(version, shared)
                entry = prefixes.find(key)
                if entry is not None:
                    room -= 0 if entry.users else len(entry.pages)
                    entry.users += 1
                    request.prefix = entry
                elif key not in missing:
                    room -= -(-len(shared) // page_size)
                    if room < 0 and (batch or self._running):
                        break
                    missing[key] = shared
                if entry is None:
                    users.append((request, key))
                else:
                    self.stats.prefix_tokens_saved += len(shared)
            batch.append(self._waiting.popleft())
        if self._share and self._ahead:
            for request in batch:
                ahead = request.prompt.ahead
                key = PrefixCache.key(version, ahead)
                room_needed = -(-len(ahead) // page_size)
                if self._shares(ahead) and key not in missing and prefixes.find(key) is None:
                    if room_needed > room:
                        break
                    room -= room_needed
                    missing[key] = ahead
        if missing:
            self.engine.cache_prefixes(
                self._snapshot.params, self._state, list(missing.values()), version
            )
            self.stats.prefix_tokens += sum(map(len, missing.values()))
            self.stats.prefix_tokens_saved += sum(len(r.prompt.shared) for r, _ in users) - sum(
                len(missing[k]) for k in {k for _, k in users}
            )
            for request, key in users:
                request.prefix = prefixes.find(key)
                request.prefix.users += 1
        return batch

    def _shares(self, prefix: Tokens) -> bool:
        """A prefix that does not fill a page costs less to read again than to share."""
        return self._share and len(prefix) >= self.engine.settings.page_size

    def _tail(self, request: Request) -> Tail:
        prompt = request.prompt
        private = prompt.tail if request.prefix is not None else prompt.tokens
        draft = prompt.draft[: request.sampling.max_new_tokens] if self._drafts else tokens()
        return Tail(request.prefix, private, draft, request.sampling)

    def _decode(self) -> None:
        if not self._running:
            return
        begin = time.perf_counter()
        self._state, results = self.engine.generate(self._snapshot.params, self._state)
        first, last = results.valid_idx
        made = results.data[:, first:last].sum(axis=1)
        for slot, request in list(self._running.items()):
            n = made[slot]
            request.ids += results.data[slot, :n].tolist()
            request.logprobs += results.logprobs[slot, :n].tolist()
            self.stats.decode_tokens += int(n)
            if self._state.slots[slot].remaining == 0:
                del self._running[slot]
                self._finish(request)
        self.stats.decode_seconds += time.perf_counter() - begin

    def _finish(self, request: Request) -> None:
        self._release(request)
        self.stats.turns += 1
        stopped = request.ids[-1] in request.sampling.stop_ids
        if not request.future.done():
            request.future.set_result(
                Completion(
                    tokens(request.ids),
                    np.asarray(request.logprobs, np.float32),
                    Finish.STOP if stopped else Finish.LENGTH,
                    self._snapshot.version,
                )
            )
