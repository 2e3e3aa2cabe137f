"""Deduplication of requests: a reading that is asked for twice while it runs is run once.

A stock client waits ten minutes and then asks again, twice; a long reading would be made three
times. So a request that must get the same answer (its sampling is certain, or its client gave
both one `Idempotency-Key`), or that says it is a repetition of one that no client waits for any
more, gets what the first one makes. And where a client may ask again, a reading outlives it by
`GRACE`. Above: `app`; below: deltas, as `choices` has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request

from notepad_jax.serve.completions.choices import Delta

GRACE = 12.0  # seconds; stock clients wait at most 8 before they ask again
RETRIES = "x-stainless-retry-count"  # the header in which stock clients count

Deltas = AsyncGenerator[Delta | None]


@dataclasses.dataclass(frozen=True)
class Likeness:
    """The key by which two requests are the same reading, and how long one is kept."""

    digest: str
    shared: bool  # every request with the digest joins
    repeated: bool  # it was sent before: it joins where no follower is left
    grace: float  # seconds that it runs when no follower is left


def likeness(
    request: Request, body: bytes, now: list[str], stream: bool, certain: bool
) -> Likeness:
    """Returns a request's key. `now`: digests of the weights and files that its body names;
    `certain`: these and its body decide what it answers."""
    key = request.headers.get("idempotency-key", "")
    count = request.headers.get(RETRIES, "")
    about = "\0".join([key, *now, ""]).encode() + body
    digest = hashlib.blake2b(about, digest_size=16).hexdigest()
    if key:
        return Likeness(digest, True, True, GRACE)
    if stream:  # its client hears from it, and does not ask again
        return Likeness(digest, False, False, 0.0)
    return Likeness(digest, certain, count not in ("", "0"), GRACE if count else 0.0)


class SingleFlight:
    """The readings under way, each run once for all requests that join it."""

    def __init__(self) -> None:
        self._running: dict[str, list[_Run]] = {}

    async def follow(self, like: Likeness, start: Callable[[], Deltas]) -> Deltas:
        """Yields what `start()` yields, or what an equal request that runs has yielded and will."""
        run = next(
            (one for one in self._running.get(like.digest, ())
             if (like.shared and one.shared) or (like.repeated and not one.followers)), None,
        )  # fmt: skip
        if run is None:
            run = _Run(like.shared)
            self._running.setdefault(like.digest, []).append(run)
            run.task = asyncio.ensure_future(run.make(start))
            run.task.add_done_callback(lambda _: self._ended(like.digest, run))
        run.followers += 1
        try:
            async for delta in run.said():
                yield delta
        finally:
            run.followers -= 1
            if not run.followers:
                if run.task.done():
                    self._forget(like.digest, run)
                elif like.grace:
                    end = asyncio.get_running_loop().call_later
                    end(like.grace, self._end_if_left, like.digest, run)
                else:
                    self._end_if_left(like.digest, run)
                    await asyncio.wait([run.task])

    def _ended(self, digest: str, run: _Run) -> None:
        if run.followers or run.failed:  # what no client has got yet may still be asked for
            self._forget(digest, run)

    def _end_if_left(self, digest: str, run: _Run) -> None:
        if not run.followers:
            self._forget(digest, run)  # no request joins what is ended
            run.task.cancel()

    def _forget(self, digest: str, run: _Run) -> None:
        left = [one for one in self._running.get(digest, ()) if one is not run]
        if left:
            self._running[digest] = left
        else:
            self._running.pop(digest, None)


class _Run:
    def __init__(self, shared: bool) -> None:
        self.shared, self.followers = shared, 0
        self.task: asyncio.Future
        self._deltas: list[Delta | None] = []
        self._failure: Exception | None = None
        self._over = False
        self._news = asyncio.Condition()

    async def make(self, start: Callable[[], Deltas]) -> None:
        """Runs to the end, with or without followers."""
        try:
            async with contextlib.aclosing(start()) as deltas:
                async for delta in deltas:
                    self._deltas.append(delta)
                    await self._tell()
        except Exception as failure:
            self._failure = failure
        finally:
            self._over = True
            await self._tell()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def said(self) -> Deltas:
        """Yields everything from the beginning; raises what went wrong."""
        at = 0
        while True:
            while at < len(self._deltas):
                at += 1
                yield self._deltas[at - 1]
            if self._over:
                break
            async with self._news:
                if at == len(self._deltas) and not self._over:
                    await self._news.wait()
        if self._failure is not None:
            raise self._failure
