"""Signal handling: Ctrl-C, and SIGTERM, which is also sent before a machine is taken away.

A signal sets a flag, and nothing more: what a handler raises is swallowed where Python cannot let
it through, in a garbage collection (jax has a callback in each), a `__del__`, the callback of a
weak reference, and the program would go on. What the main thread waits for is cancelled
(`waiting`), loops look at the flag, and the program ends with `Stopped`, in one line and with an
exit code of its own. A training run asks for patience in its loop (`Stop.patiently`): there the
first signal is only written down, and the run ends itself where it loses nothing.

A thread watches (`told_apart`): what does not look within `GRACE` seconds, because a library
compiles or loads something large, is ended all the same, and a second signal ends everything at
once. Either is safe: what lies on disk is whole at every moment, as a kill would find it. Only in
a program of a user's own, a notebook, does a second signal raise `Stopped`.
Signals reach the main thread of the process alone, so elsewhere nothing here does anything;
those that are ignored, as in what a shell starts in the background, stay ignored.
Used by cli and train.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

from notepad_jax import waiting
from notepad_jax.parallel import hosts

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTED = b"\nnotepad-jax: stopping, and keeping what was begun; once more, and it stops at once\n"

TOGETHER = 0.2  # seconds within which two SIGTERMs are one: `timeout` sends it to the group as well
GRACE = 5.0  # seconds in which a program that is not patient has to look

T = TypeVar("T")

Ends = Callable[[int], None]
Handler = Callable[[int, FrameType | None], Any]


class Stopped(KeyboardInterrupt):
    """The process was told to stop; the message says where that was."""

    def __init__(self, number: int, where: str = ""):
        super().__init__(f"stopped {where}".rstrip())
        self.number = number
        self.patient = bool(where)  # it came to a place where everything is whole

    @property
    def exit_code(self) -> int:
        """The exit code of a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


@contextlib.contextmanager
def told_apart(ends: Ends | None = None) -> Iterator[None]:
    """A context manager: either signal ends the block with `Stopped`, where it waits or looks.

    `ends` is called, in a thread, with a signal that cannot wait any longer; it ends the process.
    """
    with _watched(ends), Stop().watching():
        try:
            yield
        except Stopped:
            raise
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None


class Stop:
    """The stop flag of a run: whether a signal asked it to stop."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that asked
        self.noticed = asyncio.Event()
        self.keep: Callable[[], None] | None = None  # called when the signal comes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_at = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context manager: both signals end its block where that looks, but see `patiently`."""
        with _handled(dict.fromkeys(SIGNALS, self._asked)):
            try:
                yield
                waiting.look()
            finally:
                waiting.interrupt(None)

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """A context manager: in it, within a running loop, a first signal is only written down."""
        waiting.look()
        self._loop = asyncio.get_running_loop()
        _patient.append(self)
        try:
            yield
        finally:
            _patient.remove(self)
            self._loop = None

    async def until(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Returns `work` when it has ended, or is cancelled because a stop was asked for."""
        working = asyncio.ensure_future(work)
        noticed = asyncio.ensure_future(self.noticed.wait())
        try:
            await asyncio.wait((working, noticed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await waiting.end(working, noticed)
        return working

    def check(self, where: str) -> None:
        """Raises Stopped if a signal asked for it."""
        if self.number is not None:
            waiting.interrupt(None)
            raise Stopped(self.number, where)

    def check_all(self, where: str, keep: Callable[[], None] = lambda: None) -> None:
        """`check` in all processes, at the same point: one that was asked stops the others.

        Before they end all of them `keep` what they have.
        """
        asked = hosts.all_gather(lambda: self.number)
        self.number = max((one for one in asked if one is not None), default=None)
        if self.number is not None:
            keep()
        self.check(where)

    def _asked(self, number: int, _: FrameType | None) -> None:
        _seen.append(number)
        again = number == self.number == signal.SIGTERM
        if again and time.monotonic() - self._asked_at < TOGETHER:
            return
        if self.number is not None or waiting.interrupted():
            if not _watching:  # the watching thread ends the process
                raise Stopped(number)
            return
        self.number, self._asked_at = number, time.monotonic()
        if self._loop is None:
            waiting.interrupt(Stopped(number))
            return
        self._loop.call_soon_threadsafe(self.noticed.set)
        with contextlib.suppress(OSError):  # a screen may be just printing; this may come between
            os.write(2, NOTED)
        if self.keep is not None:
            self.keep()


# ---------------------------------------------------------------- main threads that do not look

_patient: list[Stop] = []  # whose loop ends itself
_watching: list[Ends] = []  # one at most
_seen: list[int] = []  # signals that the main thread has heard of


@contextlib.contextmanager
def _watched(ends: Ends | None) -> Iterator[None]:
    if ends is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    # Written by Python's own handler in C, whatever the main thread is busy with.
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(heard, ends), name="signals", daemon=True)
    thread.start()
    _watching.append(ends)
    _seen.clear()
    try:
        yield
    finally:
        _watching.remove(ends)
        signal.set_wakeup_fd(before)
        os.close(told)
        thread.join()


def _watch(heard: int, ends: Ends) -> None:
    """Reads the numbers of signals until the pipe is closed."""
    first, due, same = None, None, 0.0
    while True:
        left = None if due is None else max(0.0, due - time.monotonic())
        if not select.select([heard], [], [], left)[0]:
            if not _patient and (waiting.interrupted() or not _seen):
                ends(first)
            due = None  # it ends itself; a second signal does not wait for that
            continue
        number = next(iter(os.read(heard, 1)), None)
        if number is None:
            os.close(heard)
            return
        if number in SIGNALS:
            now = time.monotonic()
            if first is not None and not (number == first == signal.SIGTERM and now < same):
                ends(number)
            if first is None:
                first, due, same = number, now + GRACE, now + TOGETHER


@contextlib.contextmanager
def _handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
