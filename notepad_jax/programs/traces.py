"""`notepad-jax trace`: makes an HTML page of the readings of a run or an evaluation.

Finds the trace files of what is named, makes one page of them all and puts it in a folder,
at once or not at all; while a run goes on, of what has ended so far. Above: commands; below:
report.trace_page, which makes the page and does not know where it lies, and setup.trace_files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from notepad_jax.reading.trace import Trace
from notepad_jax.report import trace_page
from notepad_jax.report.trace_page import TraceSource
from notepad_jax.setup.trace_files import existing, files
from notepad_jax.telemetry.screen import Screen

FOLDER = "trace"  # of a run's page, in the run's folder


@dataclasses.dataclass(frozen=True)
class TracePage:
    """The page that was made of some traces."""

    page: str  # what to open
    sources: tuple[str, ...]  # the trace files that it was made of
    readings: int
    turns: int
    files: int
    bytes: int
    seconds: float


def run(paths: Sequence[str], out: str | None, screen: Screen) -> TracePage:
    """Makes the page of everything that `paths` name; returns where it lies.

    `out` is its folder, by default `trace` in the run's, or beside a file. Raises ValueError
    for what is no trace, and for a folder with other things in it.
    """
    began = time.perf_counter()
    named = [existing(path) for path in paths]
    found = {file: label for path in named for file, label in files(path, len(named) > 1).items()}
    folder = Path(out) if out else beside(named[0])
    check_place(folder)
    with contextlib.ExitStack() as stack:
        sources = [
            TraceSource(label, stack.enter_context(Trace(file))) for file, label in found.items()
        ]
        total = sum(len(source.trace) for source in sources)
        if not total:
            raise ValueError(f"no reading of {named[0]} has ended yet; make its page later")
        bar = screen.bar("making the page", total, "readings")
        title = " and ".join(dict.fromkeys(path.resolve().name for path in named))
        with written(folder) as put:
            made = trace_page.make(put, title, sources, bar.advance)
        bar.finish()
    return TracePage(
        page=str(folder / trace_page.PAGE),
        sources=tuple(map(str, found)),
        seconds=time.perf_counter() - began,
        **dataclasses.asdict(made),
    )


def text(made: TracePage) -> str:
    """Returns what the command prints at the end."""
    return (
        f"{made.page}: {made.readings:,} readings, {made.turns:,} turns, "
        f"{made.files:,} files, {made.bytes / 1e6:,.1f} MB, in {made.seconds:.1f} s\n"
        "open it in a browser; it needs its folder and nothing else"
    )


# ---------------------------------------------------------------- where it lies


def beside(path: Path) -> Path:
    """Returns the folder of a page for which none was named."""
    return path.with_suffix(f".{FOLDER}") if path.is_file() else path / FOLDER


def check_place(folder: Path) -> None:
    """Raises ValueError for a folder that holds anything but an earlier page."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder for the page with --out")
    page = (folder / trace_page.INDEX).exists() and (folder / trace_page.PAGE).exists()
    if not page and any(folder.iterdir()):
        raise ValueError(
            f"{folder} holds other things than a page; name a new folder with --out, or an empty "
            "one"
        )


@contextlib.contextmanager
def written(folder: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Yields what writes a file of a page; the page is there when all are, or the old one is.

    A folder that is there stays, and what else is in it: a user may stand in it, or be led to it.
    """
    folder = folder.resolve()
    place = folder if folder.is_dir() else folder.parent
    place.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=place))

    def put(path: str, content: bytes) -> None:
        target = new / path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)

    try:
        yield put
        new.chmod(0o755)
        if place != folder:
            new.rename(folder)
            return
        for part in sorted(new.iterdir()):  # data before the page that shows it
            if (folder / part.name).is_dir():
                shutil.rmtree(folder / part.name)
            part.replace(folder / part.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def may_open() -> bool:
    """Whether a user sits at a screen: a page is opened there unless it is said otherwise."""
    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return screen and sys.stdout.isatty()


def show(page: str) -> None:
    """Opens a page in the browser that the system prefers."""
    webbrowser.open(Path(page).resolve().as_uri())
