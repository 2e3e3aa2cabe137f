"""Coroutines run to their end, also where a loop is running already, as in every notebook.

`run` is `asyncio.run` where no loop runs in this thread, and a thread with a loop of its own
where one does: the caller waits for it. `Loop` is such a thread for somebody who has work for it
again and again: an engine that stays open between two questions, each of several engines side by
side. Whoever waits can be interrupted: Ctrl-C, or whatever the handler of a signal raises, or a
cancellation where coroutines wait (`Loop.awaited`), cancels the work, waits until it has put its
things away, and is raised here. Used by every program that reads, and by `engine.engines`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` returns, or raises what it raises."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with Loop() as loop:
        return loop.run(work)


class Loop:
    """Owns a thread in which an event loop runs, until `close` or the end of the process.

    Work sees the context variables of whoever gives it: what they hold (a run's folder) it holds.
    """

    def __init__(self, name: str = "notepad_jax loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_forever, args=(self._loop,), name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns, or raises what it raises; the caller waits."""
        ended = threading.Event()
        begun = self._begin(work, ended.set)
        try:
            ended.wait()
        except BaseException:
            self._cancel(begun)
            ended.wait()
            raise
        return begun[0].result()

    async def awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, for coroutines of another loop: the caller's goes on meanwhile."""
        here, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone
                here.call_soon_threadsafe(ended.set)

        begun = self._begin(work, tell)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self._cancel(begun)
            await ended.wait()
            raise
        return begun[0].result()

    def _begin(
        self, work: Coroutine[Any, Any, T], ended: Callable[[], object]
    ) -> list[asyncio.Task[T]]:
        """Begins `work`; its task is in the list when `ended` is called, in the thread."""
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(work))
            begun[0].add_done_callback(lambda _: ended())

        self._loop.call_soon_threadsafe(begin)
        return begun

    def _cancel(self, begun: list[asyncio.Task[T]]) -> None:
        self._loop.call_soon_threadsafe(lambda: begun[0].cancel())  # it has begun by then

    def begun(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begins `work` and returns at once; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Ends the loop and its thread; what runs there is cancelled, and `last` awaited.

        May be called in the thread itself (a garbage collector comes by anywhere): then the end
        is near when it returns.
        """
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(_end(last)))
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
            break
        except (KeyboardInterrupt, SystemExit):
            pass  # of a task, which holds it for who waits; asyncio throws it here as well
    loop.close()


async def _end(last: Coroutine[Any, Any, None] | None) -> None:
    loop = asyncio.get_running_loop()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    try:
        if last is not None:
            await last
        await loop.shutdown_asyncgens()
    finally:
        loop.stop()
