"""What a person sees while a program runs: bars and a live table, or plain lines, or nothing.

`choose` looks at where the output goes: a terminal gets a live view (rich), a file or a
pipe gets one plain line every few seconds, and `--json` gets silence. Programs talk to a
`Screen` and never ask which one it is. Everything goes to standard error, so that results
on standard output can be piped. This module knows nothing of training or reading.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TextIO, runtime_checkable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import TaskID as RichTask
from rich.table import Table as RichTable

Value = float | int | str


@runtime_checkable
class Bar(Protocol):
    """The progress of one activity."""

    def advance(self, amount: int = 1, **shown: Value) -> None:
        """Moves on; `shown` are numbers to print beside the bar."""

    def finish(self) -> None:
        """Ends the activity; its bar stays as it is."""


@runtime_checkable
class Table(Protocol):
    """A table that grows by one row per step."""

    def row(self, **values: Value) -> None:
        """Adds a row; a column without a value stays empty."""


@runtime_checkable
class Screen(Protocol):
    """Where a program shows what it is doing; a context manager."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""

    def warn(self, text: str) -> None:
        """Prints a line that nobody may miss, also where progress is not shown."""

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        """Begins an activity of `total` steps (None: unknown)."""

    def table(self, title: str, columns: Sequence[str], keep: int = 10) -> Table:
        """Begins a table of which the newest `keep` rows are shown."""

    def __enter__(self) -> Screen: ...

    def __exit__(self, *_: object) -> None: ...


def choose(quiet: bool = False, stream: TextIO | None = None) -> Screen:
    """Returns the screen that suits `stream` (standard error); `quiet` is for --json."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return SilentScreen()
    if stream.isatty():
        return TerminalScreen(stream)
    return LineScreen(stream)


# Of a text from a file or a policy a terminal obeys these; all but the first two may do harm.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000))}
CONTROLS |= {ord("\n"): "\n", ord("\t"): "\t"}


def harmless(text: str) -> str:
    """Returns a text for the terminal: control characters and lone surrogates as U+FFFD."""
    return text.translate(CONTROLS)


def show(value: Value) -> str:
    """Returns a number as a person would write it: 4 significant digits, or the integer."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _shown(values: Mapping[str, Value]) -> str:
    return "  ".join(f"{name} {show(value)}" for name, value in values.items())


# ---------------------------------------------------------------- silence


class SilentScreen:
    """Shows nothing but warnings; it is its own bar and its own table."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        print(harmless(text), file=sys.stderr, flush=True)

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        return self

    def table(self, title: str, columns: Sequence[str], keep: int = 10) -> Table:
        return self

    def advance(self, amount: int = 1, **shown: Value) -> None:
        pass

    def finish(self) -> None:
        pass

    def row(self, **values: Value) -> None:
        pass

    def __enter__(self) -> SilentScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# ---------------------------------------------------------------- plain lines


class LineScreen:
    """Prints a line every `every` seconds at most, and one when an activity ends."""

    def __init__(
        self, stream: TextIO, every: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self.every, self.clock = stream, every, clock

    def say(self, text: str) -> None:
        print(harmless(text), file=self._stream, flush=True)

    warn = say

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        return _LineBar(self, label, total, unit)

    def table(self, title: str, columns: Sequence[str], keep: int = 10) -> Table:
        self.say(title)
        return _LineTable(self, columns)

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()


class _LineBar:
    def __init__(self, screen: LineScreen, label: str, total: int | None, unit: str) -> None:
        self._screen, self._label, self._total, self._unit = screen, label, total, unit
        self._done, self._shown = 0, ""
        self._began = self._last = screen.clock()
        self._printed = -1

    def advance(self, amount: int = 1, **shown: Value) -> None:
        self._done += amount
        self._shown = _shown(shown) or self._shown
        if self._done == self._total or self._screen.clock() - self._last >= self._screen.every:
            self._print()

    def finish(self) -> None:
        if self._printed != self._done:
            self._print()

    def _print(self) -> None:
        self._last, self._printed = self._screen.clock(), self._done
        total = "" if self._total is None else f"/{self._total:,}"
        unit = f" {self._unit}" if self._unit else ""
        seconds = f"{self._last - self._began:.1f} s"
        parts = [f"{self._label}: {self._done:,}{total}{unit}", seconds, self._shown]
        self._screen.say("  ".join(part for part in parts if part))


class _LineTable:
    def __init__(self, screen: LineScreen, columns: Sequence[str]) -> None:
        self._screen, self._columns = screen, columns
        self._last: float | None = None

    def row(self, **values: Value) -> None:
        now = self._screen.clock()
        if self._last is None or now - self._last >= self._screen.every:
            self._last = now
            self._screen.say(_shown({c: values[c] for c in self._columns if c in values}))


# ---------------------------------------------------------------- a terminal


class TerminalScreen:
    """A live view: the newest rows of the newest table, and the bars below it."""

    def __init__(self, stream: TextIO) -> None:
        self.console = Console(file=stream)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("[dim]{task.fields[shown]}"),
            console=self.console,
        )
        self._table: _LiveTable | None = None
        self._live = Live(console=self.console, refresh_per_second=5, get_renderable=self._render)

    def _render(self) -> RenderableType:
        return Group(*([self._table.render()] if self._table else []), self._bars)

    def say(self, text: str) -> None:
        self.console.print(harmless(text), markup=False, highlight=False)

    warn = say

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        return _LiveBar(self._bars, self._bars.add_task(label, total=total, unit=unit, shown=""))

    def table(self, title: str, columns: Sequence[str], keep: int = 10) -> Table:
        self._table = _LiveTable(title, columns, keep)
        return self._table

    def __enter__(self) -> TerminalScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class _LiveBar:
    def __init__(self, bars: Progress, task: RichTask) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: int = 1, **shown: Value) -> None:
        if shown:
            self._bars.update(self._task, advance=amount, shown=_shown(shown))
        else:
            self._bars.update(self._task, advance=amount)

    def finish(self) -> None:
        self._bars.stop_task(self._task)


class _LiveTable:
    def __init__(self, title: str, columns: Sequence[str], keep: int) -> None:
        self._title, self._columns = title, columns
        self._rows: deque[Mapping[str, Value]] = deque(maxlen=keep)

    def row(self, **values: Value) -> None:
        self._rows.append(values)

    def render(self) -> RichTable:
        table = RichTable(title=self._title, title_justify="left", box=None, pad_edge=False)
        for column in self._columns:
            table.add_column(column, justify="right", header_style="bold")
        for values in self._rows:
            table.add_row(*(show(values[c]) if c in values else "" for c in self._columns))
        return table
