"""The server's HTML pages, but for the pages of traces.

One to read with (drop a document, ask, watch the memory), a list of what can be looked at, and
short ones that say something: that a page is being made, that there is none, that a key is
needed. All of one piece, with a policy of their own that lets nothing be fetched from anywhere
else; what documents, policies and folders are called is text alone. Above: programs.pages, which
hands them to the server; below: render; beside: trace_page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from notepad_jax.report import render


def reading() -> bytes:
    """Returns the page to read with. It is the same for all browsers, and holds no data yet."""
    return render.rendered("reading.html", {})


def listing(rows: Sequence[Mapping[str, Any]], runs: bool) -> bytes:
    """Returns the list of what can be looked at.

    Of each row `address`, `title`, `kind` and `told` are shown. `runs`: whether the server shows
    any runs at all.
    """
    return render.rendered("traces.html", {"rows": rows, "runs": runs})


def notice(title: str, words: str, again: bool = False) -> bytes:
    """Returns a page with a message; `again`: the browser reloads it in two seconds."""
    return render.rendered("notice.html", {"title": title, "words": words, "again": again})


def entry(problem: str) -> bytes:
    """Returns the page that asks for the server's key; `problem`: what was wrong with the last."""
    return render.rendered("entry.html", {"problem": problem})
