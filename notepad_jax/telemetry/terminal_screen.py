"""Progress on a terminal, live (rich): what has ended is printed once, and what is under way moves.

What has ended stands below its phase's heading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TextIO

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
from notepad_jax.telemetry.screen import Bar, Busy, Table, Transcript
from notepad_jax.telemetry.words import Value, harmless, show, show_all

KEPT = 10  # newest rows of a table that a terminal shows
LAST = 6  # lines of a text under way that a terminal shows


class TerminalScreen:
    """A live screen: what is under way, and above it all that has ended, in its order."""

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
        told = {"shown": escape(show_all(shown))} if shown else {}
        self._bars.update(self._task, advance=amount, moved=self._bars.get_time(), **told)

    def expect(self, total: int) -> None:
        self._expected(total)

    def _expected(self, total: int | None) -> RichTask:
        """Returns what rich knows of the bar, which has the new total."""
        (task,) = (task for task in self._bars.tasks if task.id == self._task)
        task.total = total  # `update` would forget how fast it was: a total may be an estimate
        task.finished_time = None
        return task

    def stand(self, label: str, done: int, total: int | None) -> None:
        """Puts the bar where the activity is; it is over when it is finished, not before."""
        task = self._expected(total)
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
        for values in list(self._rows):  # another thread adds to them
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
