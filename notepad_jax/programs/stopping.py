"""Ctrl-C and SIGTERM, which is also what a machine is sent before it is taken away.

Whatever runs is ended by them with `Stopped`, in one line and with an exit code of its own. A
training run asks for patience in its loop (`Stop.patiently`): there the first signal is only
written down, the run ends itself where it loses nothing, and a second one stops it at once.
Signals reach the main thread of the process alone, so elsewhere nothing here does anything;
those that are ignored, as in what a shell starts in the background, stay ignored.
Used by cli and train.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

from notepad_jax.parallel import hosts

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTED = b"\nnotepad-jax: stopping, and keeping what was begun; once more, and it stops at once\n"

T = TypeVar("T")

Handler = Callable[[int, FrameType | None], Any]


class Stopped(KeyboardInterrupt):
    """Somebody stopped the process; its words say where that was."""

    def __init__(self, number: int, where: str = ""):
        super().__init__(f"stopped {where}".rstrip())
        self.number = number
        self.patient = bool(where)  # it came to a place where everything is whole

    @property
    def exit_code(self) -> int:
        """As of a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """In the block SIGTERM does what Ctrl-C does, and either ends it with `Stopped`."""
    number = signal.SIGINT

    def terminated(_: int, frame: FrameType | None) -> None:
        nonlocal number
        number = signal.SIGTERM
        interrupted = signal.getsignal(signal.SIGINT)  # asyncio has one of its own
        if not callable(interrupted):
            raise Stopped(number)
        interrupted(signal.SIGINT, frame)

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminated}
    with _handled(handlers):
        try:
            yield
        except Stopped:
            raise
        except KeyboardInterrupt:
            raise Stopped(number) from None


class Stop:
    """Whether a run was asked to stop."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that asked
        self.noticed = asyncio.Event()
        self.keep: Callable[[], None] | None = None  # called when the signal comes
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the block both signals come here: they end it at once, but see `patiently`."""
        with _handled(dict.fromkeys(SIGNALS, self._asked)):
            yield

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """In the block, within a running loop, the first signal is only written down."""
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None

    async def until(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Returns `work` when it has ended, or is cancelled because somebody asked for a stop."""
        working = asyncio.ensure_future(work)
        noticed = asyncio.ensure_future(self.noticed.wait())
        try:
            await asyncio.wait((working, noticed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            noticed.cancel()
            await asyncio.wait((working, noticed))
        return working

    def check(self, where: str) -> None:
        """Raises Stopped if somebody asked for it."""
        if self.number is not None:
            raise Stopped(self.number, where)

    def check_all(self, where: str, keep: Callable[[], None] = lambda: None) -> None:
        """`check` in all processes, at the same point: one that was asked stops the others.

        Before they end all of them `keep` what they have.
        """
        asked = (json.loads(said) for said in hosts.gather(json.dumps(self.number).encode()))
        self.number = max((one for one in asked if one is not None), default=None)
        if self.number is not None:
            keep()
        self.check(where)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None or self.number is not None:
            raise Stopped(number)
        self.number = number
        self._loop.call_soon_threadsafe(self.noticed.set)
        with contextlib.suppress(OSError):  # a screen may be just printing; this may come between
            os.write(2, NOTED)
        if self.keep is not None:
            self.keep()


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
