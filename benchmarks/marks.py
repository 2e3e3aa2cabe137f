"""Puts what a benchmark found into a page, between two marks; what is around it stays."""

from __future__ import annotations

from pathlib import Path


def put(page: Path, name: str, said: str) -> None:
    """Writes `said` between the marks of `name`. Raises ValueError for a page without them."""
    page.write_text(placed(page, page.read_text(encoding="utf-8"), name, said), encoding="utf-8")


def placed(page: Path, text: str, name: str, said: str) -> str:
    """Returns a page's text with `said` between the marks of `name`. Raises as `put`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, there, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not there or not closed:
        raise ValueError(f"{page} has no place for results; write a line {begin} and a line {end}")
    return f"{before}{begin}\n{said}\n{end}{after}"
