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
        self._ending = False  # what begins from now on, in the thread, is cancelled at once
        self._not_begun: dict[object, Callable[[], None]] = {}  # given up when the thread ends
        self._thread = threading.Thread(target=self._forever, name=name, daemon=True)
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
    ) -> list[asyncio.Future[T]]:
        """Begins `work`; its task is in the list when `ended` is called, in the thread.

        Whatever closes the loop meanwhile, `ended` is called. Raises RuntimeError once it is
        closed.
        """
        begun: list[asyncio.Future[T]] = []

        def over(task: asyncio.Future[T]) -> None:
            if not task.cancelled():
                task.exception()  # looked at: one that failed as its caller left says nothing
            ended()

        def begin() -> None:
            if self._not_begun.pop(begun_by, None) is None:
                return  # the thread has ended with it
            if self._ending:
                give_up()
            else:
                begun.append(self._loop.create_task(work))
                begun[0].add_done_callback(over)

        def give_up() -> None:
            work.close()
            begun.append(asyncio.Future(loop=self._loop))
            begun[0].cancel()
            ended()

        begun_by = object()
        self._not_begun[begun_by] = give_up
        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # closed; the thread may have given it up already
            if self._not_begun.pop(begun_by, None) is not None:
                work.close()
                raise
        return begun

    def _cancel(self, begun: list[asyncio.Future[T]]) -> None:
        with contextlib.suppress(RuntimeError):  # closed, and all that ran there with it
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
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end(last)))
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forever(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                break
            except (KeyboardInterrupt, SystemExit):
                pass  # of a task, which holds it for who waits; asyncio throws it here as well
        self._loop.close()
        while self._not_begun:  # given between the last look and the end
            _, give_up = self._not_begun.popitem()
            give_up()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        self._ending = True
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        try:
            if last is not None:
                await last
            await self._loop.shutdown_asyncgens()
        finally:
            self._loop.stop()
