"""The server's page renderers: the pages of `report`, and the traces of a folder of runs.

Brings two rooms together that do not know one another. The pages but those of traces are one to
read with (drop a document, ask, watch the memory), a list of what can be looked at, and short ones
that say something: that a page is being made, that there is none, that a key is needed. What is
shown of a folder of runs are the trace files below its own subfolders; a link that leads out of it
is not followed. Above: `serve`, the program; below: report.render, report.trace_page, and
setup.trace_files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.reading.trace import Trace
from notepad_jax.report import render, trace_page
from notepad_jax.report.trace_page import TraceSource
from notepad_jax.serve.browser.renderers import Files, Put, Renderers
from notepad_jax.setup import trace_files


def views(folder: str | None) -> Renderers:
    """Returns the renderers of a server that shows the runs of `folder`; None: no runs.

    Raises ValueError if there is no such folder, or if it is a run itself.
    """
    runs = None if folder is None else Path(folder)
    if runs is not None and not runs.is_dir():
        raise ValueError(
            f"there is no folder {folder} with runs to show; mend --runs or leave it out"
        )
    if runs is not None and any((runs / name).is_file() for name in trace_files.NAMES):
        raise ValueError(
            f"{folder} is a run itself; name the folder that it lies in: --runs {runs.parent}"
        )
    return Renderers(
        reading=render.rendered("reading.html", {}),
        listing=listing,
        notice=notice,
        entry=entry,
        trace=make_trace,
        runs=None if runs is None else lambda: names(runs),
        files=lambda name: {} if runs is None else files(runs, name),
    )


def listing(rows: Sequence[Mapping[str, Any]], runs: bool) -> bytes:
    """Returns the list of what can be looked at.

    Of each row `address`, `title`, `kind` and `told` are shown. `runs`: whether the server shows
    any runs at all.
    """
    return render.rendered("traces.html", {"rows": rows, "runs": runs})


def notice(title: str, words: str, again: bool) -> bytes:
    """Returns a page with a message; `again`: the browser reloads it in two seconds."""
    return render.rendered("notice.html", {"title": title, "words": words, "again": again})


def entry(problem: str) -> bytes:
    """Returns the page that asks for the server's key; `problem`: what was wrong with the last."""
    return render.rendered("entry.html", {"problem": problem})


def names(runs: Path) -> list[str]:
    """Returns the names of the folders in `runs`."""
    return [path.name for path in runs.iterdir() if _is_run(path, runs)]


def files(runs: Path, name: str) -> Files:
    """Returns the trace files of one of them, and what each is called; none for another name.

    Raises ValueError for a file that has a trace's name and is none.
    """
    run = runs / name
    if name not in os.listdir(runs) or not _is_run(run, runs):
        return {}
    try:
        found = trace_files.files(run, several=False)
    except trace_files.NothingRead:
        return {}
    return {path: label for path, label in found.items() if _inside(path, run)}


def _is_run(path: Path, runs: Path) -> bool:
    fit = path.name.isprintable() and not path.name.startswith(".")
    return fit and path.is_dir() and _inside(path, runs)


def _inside(path: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError, RuntimeError):  # a link in a circle
        return path.resolve().is_relative_to(folder.resolve())
    return False


def make_trace(
    put: Put, title: str, files: Files, advance: Callable[[int, int], None], data: str
) -> None:
    """Renders the page of some trace files; see `serve.browser.renderers.MakeTrace`."""
    with contextlib.ExitStack() as stack:
        sources = [
            TraceSource(label, stack.enter_context(Trace(path))) for path, label in files.items()
        ]
        total, done = sum(len(source.trace) for source in sources), 0

        def one_more() -> None:
            nonlocal done
            done += 1
            advance(done, total)

        trace_page.make(put, title, sources, one_more, data)
