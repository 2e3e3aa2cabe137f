"""Progress output of a program: the protocol `Screen`, and the one that shows nothing.

Programs talk to a `Screen` and never ask which one it is. Whatever has a bar or a transcript can
be stopped: it looks (`waiting.look`) whenever it moves on. Engines report what they did to it
(`work`), which is shown as a rate below whatever is under way: a turn may take minutes. It knows
nothing of training, reading or compiling. Above: `line_screen`, `terminal_screen`, and `progress`,
which chooses one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from notepad_jax import waiting
from notepad_jax.telemetry.words import Value, harmless

Busy = Callable[[], str]  # what the machine is busy with instead of the work: "compiling", or ""


@runtime_checkable
class Bar(Protocol):
    """The progress of one activity."""

    def advance(self, amount: int = 1, **shown: Value) -> None:
        """Moves on; `shown` are numbers to print beside the bar."""

    def expect(self, total: int) -> None:
        """The activity turns out to have another number of steps; shown as it moves on."""

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
    """Where a program shows its progress; a context manager."""

    def phase(self, heading: str) -> None:
        """Begins a part of the program: what follows stands below its heading."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""

    def warn(self, text: str) -> None:
        """Prints a warning, a line that is shown also where progress is not."""

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


class SilentScreen:
    """A screen of warnings alone; it is its own bar, table and transcript."""

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

    def expect(self, total: int) -> None:
        pass

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
