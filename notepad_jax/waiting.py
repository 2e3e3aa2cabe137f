"""Runs coroutines to their end, also where a loop is running already, as in every notebook.

`run` is `asyncio.run` where no loop runs in this thread, and a thread with a loop of its own
where one does: the caller waits for it. `Loop` is such a thread for a caller that has work for it
again and again: an engine that stays open between two questions, each of several engines side by
side. A waiting caller can be interrupted: Ctrl-C, or whatever the handler of a signal raises, or a
cancellation where coroutines wait (`Loop.awaited`), cancels the work, waits until it has put its
things away, and is raised here. Used by every program that reads, and by `engine.engines`.

A handler that raises is not to be relied on: what it raises within a garbage collection, a
`__del__` or the callback of a weak reference is swallowed there, and the program goes on. So
programs are told with `interrupt`, which raises nothing: what the main thread waits for here is
cancelled, and otherwise it meets the exception where it looks (`look`), as every progress bar does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

LOOK = 0.2  # seconds after which a wait within a coroutine looks whether its task was cancelled


@dataclasses.dataclass(frozen=True, eq=False)
class _Wait:
    """A wait of the main thread: how to cancel it."""

    cancel: Callable[[], None]
    task: asyncio.Task[Any] | None  # that the main thread itself runs


_waits: list[_Wait] = []  # innermost last
_wanted: list[BaseException] = []  # what the main thread is to raise; one at most


def interrupt(why: BaseException | None) -> None:
    """Has the main thread raise `why` where it waits here or looks; None: not any more.

    Raises nothing and takes no lock, so the handler of a signal may call it anywhere.
    """
    _wanted[:] = [] if why is None else [why]
    if why is not None and _waits:
        _waits[-1].cancel()


def interrupted() -> bool:
    """Whether the main thread is to end what it does, and has not looked yet."""
    return bool(_wanted)


def look() -> None:
    """Raises in the main thread, once, what `interrupt` was given; cheap, for every long loop.

    Within `run` only its own task raises it: the others are cancelled with that.
    """
    if not _wanted or threading.current_thread() is not threading.main_thread():
        return
    task = _waits[-1].task if _waits else None
    if task is None or task is _running_task():
        raise _wanted.pop()


@contextlib.contextmanager
def ended_by(cancel: Callable[[], None], task: asyncio.Task[Any] | None = None) -> Iterator[None]:
    """A context manager: in the main thread `interrupt` calls `cancel`, which makes a wait end.

    It is called within a signal's handler. After the block the caller looks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits.append(_Wait(cancel, task))
    try:
        look()  # it was asked for just before
        yield
    finally:
        _waits.pop()


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def run(work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` returns, or raises what it raises."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        with Loop() as loop:
            return loop.run(work)
    try:
        return asyncio.run(_interruptible(work))
    except asyncio.CancelledError:
        look()
        raise


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    try:
        with ended_by(lambda: loop.call_soon_threadsafe(task.cancel), task):
            return await work
    finally:
        work.close()  # one that was never begun


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks, and returns when they have ended, however they did."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines side by side; where one fails or the caller is cancelled, all have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(*tasks)


class Loop:
    """Owns a thread in which an event loop runs, until `close` or the end of the process.

    Work sees the context variables of its caller: what they hold (a run's folder) it holds.
    """

    def __init__(self, name: str = "notepad_jax loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._ending = False  # what begins from now on, in the thread, is cancelled at once
        self._not_begun: dict[object, Callable[[], None]] = {}  # given up when the thread ends
        self._thread = threading.Thread(target=self._forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns, or raises what it raises; the caller waits.

        RuntimeError in the loop's own thread, which would wait for itself forever.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "what runs in this thread (a reader's on_progress, a document's pieces) cannot "
                "wait for the same reader: read with another one, or afterwards"
            )
        ended, task = threading.Event(), _running_task()
        cancelled = task.cancelling() if task else 0
        begun = self._begin(work, lambda _: ended.set())
        try:
            with ended_by(lambda: self._cancel(begun)):
                while not ended.wait(LOOK if task else None):
                    if task.cancelling() > cancelled:  # as `asyncio.run` does at Ctrl-C, unheard
                        raise asyncio.CancelledError
        except BaseException:
            self._cancel(begun)
            ended.wait()
            raise
        if begun[0].cancelled():
            look()
        return begun[0].result()

    async def awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, for coroutines of another loop: the caller's goes on meanwhile."""
        here, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: asyncio.Future[T]) -> None:
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
        self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Future[T]], object]
    ) -> list[asyncio.Future[T]]:
        """Begins `work`; its task is in the list when `ended` is called with it, in the thread.

        Whatever closes the loop meanwhile, `ended` is called. Raises RuntimeError once it is
        closed.
        """
        begun: list[asyncio.Future[T]] = []

        def over(task: asyncio.Future[T]) -> None:
            if not task.cancelled():
                task.exception()  # looked at: one that failed as its caller left says nothing
            ended(task)

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
            ended(begun[0])

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
        """Begins `work` and returns at once; cancelling the future cancels it.

        Not `asyncio.run_coroutine_threadsafe`, which forgets what comes while a loop closes.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def tell(task: asyncio.Future[T]) -> None:
            if task.cancelled():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            if problem := task.exception():
                future.set_exception(problem)
            else:
                future.set_result(task.result())

        begun = self._begin(work, tell)
        future.add_done_callback(lambda one: one.cancelled() and self._cancel(begun))
        return future

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
                pass  # of a task, which holds it for its caller; asyncio throws it here as well
        self._loop.close()
        while self._not_begun:  # given between the last look and the end
            _, give_up = self._not_begun.popitem()
            give_up()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        self._ending = True
        await end(*(one for one in asyncio.all_tasks() if one is not asyncio.current_task()))
        try:
            if last is not None:
                await last
            await self._loop.shutdown_asyncgens()
        finally:
            self._loop.stop()
