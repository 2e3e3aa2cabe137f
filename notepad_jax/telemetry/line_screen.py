"""Progress as plain lines: one a step, and one every few seconds of anything else.

What a file or a pipe gets, and a terminal whose user wants no escape sequences.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from notepad_jax import waiting
from notepad_jax.telemetry.meter import Meter
from notepad_jax.telemetry.screen import Bar, Table, Transcript
from notepad_jax.telemetry.words import Value, harmless, on_one_line, show_all


class LineScreen:
    """A screen of lines: one for every step of a table and every turn of a transcript; of a bar,
    every `every` seconds at most, and at its end. A step that takes long says so now and then."""

    def __init__(
        self,
        stream: TextIO,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        every_in_step: float = 30.0,
    ) -> None:
        self.every, self.every_in_step, self.clock = every, every_in_step, clock
        self.meter, self.alone = Meter(clock), threading.RLock()
        self.open: list[_LineBar | _LineTable] = []
        self._stream = stream

    def say(self, text: str) -> None:
        # No work ends because its lines are not read: `train 2>&1 | tee log`, and Ctrl-C.
        with self.alone, contextlib.suppress(BrokenPipeError):
            print(harmless(text), file=self._stream, flush=True)

    warn = phase = say

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        return _LineBar(self, label, total, unit)

    def table(self, title: str, columns: Sequence[str], total: int, done: int = 0) -> Table:
        self.say(title)
        return _LineTable(self, columns, total, done)

    def transcript(self, label: str, unit: str) -> Transcript:
        return _LineTranscript(self)

    def work(self, tokens: int, turns: int, seconds: float) -> None:
        self.meter.work(tokens, turns, seconds)
        # An engine does not fail because the disk is full; what prints next does.
        with self.alone, contextlib.suppress(OSError):
            for one in self.open:
                one.look()

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass  # every line has been flushed


class _LineBar:
    def __init__(self, screen: LineScreen, label: str, total: int | None, unit: str) -> None:
        self._screen, self._label, self._total, self._unit = screen, label, total, unit
        self._done, self._shown = 0, ""
        self._began = self._last = screen.clock()
        self._printed: tuple[int, int | None, str] | None = None
        with screen.alone:
            screen.open.append(self)

    def advance(self, amount: int = 1, **shown: Value) -> None:
        waiting.look()
        with self._screen.alone:
            self._done += amount
            self._shown = show_all(shown) or self._shown
            self.look()

    def expect(self, total: int) -> None:
        with self._screen.alone:
            self._total = total

    def look(self) -> None:
        """Prints a line if it is time for one."""
        if self._screen.clock() - self._last >= self._screen.every:
            self._print(self._screen.meter())

    def finish(self) -> None:
        with self._screen.alone:
            if self in self._screen.open:
                self._screen.open.remove(self)
            if self._printed != (self._done, self._total, self._shown):
                self._print()

    def _print(self, rate: str = "") -> None:
        self._last = self._screen.clock()
        self._printed = (self._done, self._total, self._shown)
        total = "" if self._total is None else f"/{self._total:,}"
        unit = f" {self._unit}" if self._unit else ""
        seconds = f"{self._last - self._began:.1f} s"
        parts = [f"{self._label}: {self._done:,}{total}{unit}", seconds, self._shown, rate]
        self._screen.say("  ".join(part for part in parts if part))


class _LineTable:
    def __init__(self, screen: LineScreen, columns: Sequence[str], total: int, done: int) -> None:
        self._screen, self._columns, self._total, self._done = screen, columns, total, done
        self._began = self._last = screen.clock()
        self._turns = screen.meter.turns  # before this step
        with screen.alone:
            screen.open.append(self)

    def row(self, **values: Value) -> None:
        with self._screen.alone:
            self._done += 1
            told = show_all({c: values[c] for c in self._columns if c in values})
            self._screen.say(f"{self._done:,}/{self._total:,}  {told}")
            self._began = self._last = self._screen.clock()
            self._turns = self._screen.meter.turns

    def look(self) -> None:
        """Prints a line if the step takes long."""
        now = self._screen.clock()
        if now - self._last >= self._screen.every_in_step:
            self._last = now
            self._screen.say(
                f"{self._done + 1:,}/{self._total:,}  under way, {now - self._began:.1f} s  "
                f"{self._screen.meter.turns - self._turns:,} turns  {self._screen.meter()}"
            )

    def finish(self) -> None:
        with self._screen.alone:
            if self in self._screen.open:
                self._screen.open.remove(self)


class _LineTranscript:
    def __init__(self, screen: LineScreen) -> None:
        self._screen = screen

    def under_way(self, label: str, text: str, done: int, total: int | None) -> None:
        waiting.look()

    def wrote(self, line: str) -> None:
        self._screen.say(on_one_line(line))

    passed = wrote

    def finish(self) -> None:
        pass
