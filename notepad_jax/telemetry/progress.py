"""What a person sees while a program runs: bars and a live table, or plain lines, or nothing.

`choose` looks at where the output goes: a terminal gets a live view (rich), a file or a pipe
plain lines (one a step, and one every few seconds of anything else), and `--json` silence. So
does a terminal whose user wants no escape sequences (NO_COLOR, TERM=dumb) get plain lines.
Programs talk to a `Screen` and never ask which one it is. On a terminal what has ended is
printed once, below its phase's heading, and only what is under way moves. Engines report what they
did to it (`work`), which is shown as a rate below whatever is under way: a turn may take minutes.
Everything goes to standard error, so that results on standard output can be piped. This module
knows nothing of training, reading or compiling. Whatever has a bar or a transcript can be stopped:
it looks (`waiting.look`) whenever it moves on. Below: meter, words and waiting.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TextIO, runtime_checkable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Task as RichTask
from rich.progress import TaskID as RichTaskID
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from notepad_jax import waiting
from notepad_jax.telemetry.meter import Meter
from notepad_jax.telemetry.words import Value, harmless, on_one_line, show

KEPT = 10  # newest rows of a table that a terminal shows
LAST = 6  # lines of a text under way that a terminal shows
Busy = Callable[[], str]  # what the machine is busy with instead of the work: "compiling", or ""


@runtime_checkable
class Bar(Protocol):
    """The progress of one activity."""

    def advance(self, amount: int = 1, **shown: Value) -> None:
        """Moves on; `shown` are numbers to print beside the bar."""

    def finish(self) -> None:
        """Ends the activity; its bar stays as it is."""


@runtime_checkable
class Table(Protocol):
    """An activity of equal steps, with a row of numbers for each."""

    def row(self, **values: Value) -> None:
        """A step is done; a column without a value stays empty."""

    def finish(self) -> None:
        """Ends the activity; its newest rows stay as they are."""


@runtime_checkable
class Transcript(Protocol):
    """An activity of turns, each of which writes a text that is seen while it is made."""

    def under_way(self, label: str, text: str, done: int, total: int | None) -> None:
        """A turn goes on: what it is, all that it wrote so far, and how far the activity is."""

    def wrote(self, line: str) -> None:
        """A turn has ended with something new, which stays."""

    def passed(self, line: str) -> None:
        """A turn has ended with nothing new: a line in a file, and nothing on a terminal."""

    def finish(self) -> None:
        """Ends the activity; its bar stays as it is."""


@runtime_checkable
class Screen(Protocol):
    """Where a program shows what it is doing; a context manager."""

    def phase(self, heading: str) -> None:
        """Begins a part of the program: what follows stands below its heading."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""

    def warn(self, text: str) -> None:
        """Prints a line that nobody may miss, also where progress is not shown."""

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        """Begins an activity of `total` steps (None: unknown)."""

    def table(self, title: str, columns: Sequence[str], total: int, done: int = 0) -> Table:
        """Begins an activity of `total` steps, `done` of which were done before."""

    def transcript(self, label: str, unit: str) -> Transcript:
        """Begins an activity of turns."""

    def work(self, tokens: int, turns: int, seconds: float) -> None:
        """An engine read and wrote `tokens` and ended `turns` in `seconds`; from any thread."""

    def __enter__(self) -> Screen: ...

    def __exit__(self, *_: object) -> None: ...


def choose(quiet: bool = False, stream: TextIO | None = None, busy: Busy = lambda: "") -> Screen:
    """Returns the screen that suits `stream` (standard error); `quiet` is for --json.

    NO_COLOR (no-color.org) means no escape sequences at all, also none that move the cursor.
    """
    stream = sys.stderr if stream is None else stream
    if quiet:
        return SilentScreen()
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if stream.isatty() and not plain:
        return TerminalScreen(stream, busy)
    return LineScreen(stream)


def _shown(values: Mapping[str, Value]) -> str:
    return "  ".join(f"{name} {show(value)}" for name, value in values.items())


# ---------------------------------------------------------------- silence


class SilentScreen:
    """Shows nothing but warnings; it is its own bar, table and transcript."""

    def phase(self, heading: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        print(harmless(text), file=sys.stderr, flush=True)

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        return self

    def table(self, title: str, columns: Sequence[str], total: int, done: int = 0) -> Table:
        return self

    def advance(self, amount: int = 1, **shown: Value) -> None:
        waiting.look()

    def finish(self) -> None:
        pass

    def row(self, **values: Value) -> None:
        pass

    def transcript(self, label: str, unit: str) -> Transcript:
        return self

    def under_way(self, label: str, text: str, done: int, total: int | None) -> None:
        waiting.look()

    def wrote(self, line: str) -> None:
        pass

    passed = wrote

    def work(self, tokens: int, turns: int, seconds: float) -> None:
        pass

    def __enter__(self) -> SilentScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# ---------------------------------------------------------------- plain lines


class LineScreen:
    """Prints a line for every step of a table and every turn of a transcript; of a bar, every
    `every` seconds at most, and one when it ends. A step that takes long says so now and then."""

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
        with self.alone:
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
        # An engine does not fail because nobody reads its lines; whoever prints next does.
        with self.alone, contextlib.suppress(OSError):
            for one in self.open:
                one.look()

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()


class _LineBar:
    def __init__(self, screen: LineScreen, label: str, total: int | None, unit: str) -> None:
        self._screen, self._label, self._total, self._unit = screen, label, total, unit
        self._done, self._shown = 0, ""
        self._began = self._last = screen.clock()
        self._printed: tuple[int, str] | None = None
        with screen.alone:
            screen.open.append(self)

    def advance(self, amount: int = 1, **shown: Value) -> None:
        waiting.look()
        with self._screen.alone:
            self._done += amount
            self._shown = _shown(shown) or self._shown
            self.look()

    def look(self) -> None:
        """Prints a line if it is time for one."""
        if self._screen.clock() - self._last >= self._screen.every:
            self._print(self._screen.meter())

    def finish(self) -> None:
        with self._screen.alone:
            if self in self._screen.open:
                self._screen.open.remove(self)
            if self._printed != (self._done, self._shown):
                self._print()

    def _print(self, rate: str = "") -> None:
        self._last, self._printed = self._screen.clock(), (self._done, self._shown)
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
            told = _shown({c: values[c] for c in self._columns if c in values})
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


# ---------------------------------------------------------------- a terminal


class TerminalScreen:
    """What is under way, live, and above it everything that has ended, in its order."""

    def __init__(self, stream: TextIO, busy: Busy = lambda: "") -> None:
        self.console, self.meter = Console(file=stream), Meter()
        self._bars = Progress(  # of a narrow terminal the bars give way, and no word
            TextColumn("{task.description}", table_column=_whole(24)),
            BarColumn(bar_width=28),
            MofNCompleteColumn(table_column=_whole(9, "right")),
            TextColumn("{task.fields[unit]}", table_column=_whole(5)),
            TimeElapsedColumn(_whole(7)),
            _TimeLeft(busy),
            TextColumn("[dim]{task.fields[shown]}"),
            console=self.console,
        )
        self._tables: list[_LiveTable] = []
        self._texts: list[_LiveTranscript] = []
        self._live = Live(console=self.console, refresh_per_second=5, get_renderable=self._render)

    def _render(self) -> RenderableType:
        tables = [table.render() for table in self._tables]
        return Group(*tables, *self._texts, self._bars, *self._work())

    def _work(self) -> Iterator[Text]:
        """The last line: how fast tokens go by, and the turns of the step under way."""
        if self._bars.tasks and (rate := self.meter()):
            turns = [f"{self.meter.turns - table.turns:,} turns" for table in self._tables]
            yield Text("  ".join([rate, *turns]), style="dim")

    def phase(self, heading: str) -> None:
        self.console.print(Text(f"\n{heading}", style="bold"))

    def say(self, text: str) -> None:
        self.console.print(harmless(text), markup=False, highlight=False)

    warn = say

    def bar(self, label: str, total: int | None, unit: str = "") -> Bar:
        return _LiveBar(self.console, self._bars, label, total, unit)

    def transcript(self, label: str, unit: str) -> Transcript:
        bar = _LiveBar(self.console, self._bars, label, None, unit)
        text = _LiveTranscript(self, bar, label, self._texts.remove)
        self._texts.append(text)
        return text

    def work(self, tokens: int, turns: int, seconds: float) -> None:
        self.meter.work(tokens, turns, seconds)

    def table(self, title: str, columns: Sequence[str], total: int, done: int = 0) -> Table:
        bar = _LiveBar(self.console, self._bars, title, total, "steps")
        bar.advance(done)
        table = _LiveTable(columns, bar, self.meter, self._ended)
        self._tables.append(table)
        return table

    def _ended(self, table: _LiveTable) -> None:
        if table in self._tables:
            self._tables.remove(table)
            self.console.print(table.render())

    def __enter__(self) -> TerminalScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def _whole(width: int, justify: Literal["left", "right"] = "left") -> Column:
    """A column that is at least so wide, and never cut while another one can be."""
    return Column(min_width=width, justify=justify, no_wrap=True)


class _TimeLeft(ProgressColumn):
    """How long it will take, counting down; or what keeps it from going on at all."""

    max_refresh = 0.2

    def __init__(self, busy: Busy) -> None:
        super().__init__(_whole(9))
        self._busy = busy

    def render(self, task: RichTask) -> Text:
        if task.finished or task.stop_time is not None:
            return Text("")
        if busy := self._busy():
            return Text(busy, style="progress.remaining")
        left = task.time_remaining
        if not left:
            return Text("")
        # rich knows no more than it did at the last step, which may be minutes ago.
        whole = max(0, round(left - (task.get_time() - task.fields["moved"])))
        minutes, seconds = divmod(whole, 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
        return Text(clock, style="progress.remaining")


class _LiveBar:
    def __init__(
        self, console: Console, bars: Progress, label: str, total: int | None, unit: str
    ) -> None:
        self._console, self._bars = console, bars
        self._task: RichTaskID = bars.add_task(
            escape(label), total=total, unit=unit, shown="", moved=bars.get_time()
        )

    def advance(self, amount: int = 1, **shown: Value) -> None:
        waiting.look()
        told = {"shown": escape(_shown(shown))} if shown else {}
        self._bars.update(self._task, advance=amount, moved=self._bars.get_time(), **told)

    def stand(self, label: str, done: int, total: int | None) -> None:
        """Puts the bar where the activity is; it is over when it is finished, not before."""
        (task,) = (task for task in self._bars.tasks if task.id == self._task)
        task.total = total  # `update` would forget how fast it was: a total may be an estimate
        moved = {"moved": self._bars.get_time()} if done != task.completed else {}
        self._bars.update(self._task, description=escape(label), completed=done, **moved)
        task.finished_time = None

    def finish(self) -> None:
        """Prints the bar as it is, above all that moves; a second time it does nothing."""
        ended = [task for task in self._bars.tasks if task.id == self._task]
        if ended:
            self._bars.stop_task(self._task)
            self._bars.remove_task(self._task)
            self._console.print(self._bars.make_tasks_table(ended))


class _LiveTable:
    def __init__(
        self,
        columns: Sequence[str],
        bar: _LiveBar,
        meter: Meter,
        ended: Callable[[_LiveTable], None],
    ) -> None:
        self._columns, self._bar, self._meter, self._ended = columns, bar, meter, ended
        self.turns = meter.turns  # before the step under way
        self._rows: deque[Mapping[str, Value]] = deque(maxlen=KEPT)

    def row(self, **values: Value) -> None:
        self._rows.append(values)
        self.turns = self._meter.turns
        self._bar.advance()

    def finish(self) -> None:
        self._ended(self)
        self._bar.finish()

    def render(self) -> RichTable:
        table = RichTable(box=None, pad_edge=False)
        for column in self._columns:
            table.add_column(column, justify="right", header_style="bold")
        for values in self._rows:
            table.add_row(*(show(values[c]) if c in values else "" for c in self._columns))
        return table


class _LiveTranscript:
    """The end of a text that grows, above its bar."""

    def __init__(
        self, screen: TerminalScreen, bar: _LiveBar, label: str,
        ended: Callable[[_LiveTranscript], None],
    ) -> None:  # fmt: skip
        self._screen, self._bar, self._label, self._ended = screen, bar, label, ended
        self._text, self._stands = "", (0, None)

    def under_way(self, label: str, text: str, done: int, total: int | None) -> None:
        waiting.look()
        self._text, self._stands = text, (done, total)
        self._bar.stand(label, done, total)

    def wrote(self, line: str) -> None:
        self._text = ""
        self._screen.say(line)

    def passed(self, line: str) -> None:
        self._text = ""

    def finish(self) -> None:
        self._text = ""
        self._ended(self)
        self._bar.stand(self._label, *self._stands)
        self._bar.finish()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = Text(harmless(self._text), style="italic").wrap(console, options.max_width)
        yield from shown[-min(LAST, max(1, console.height - 3)) :]
