"""A page has a place for what a benchmark found, between two marks; what is around it stays."""

from __future__ import annotations

from pathlib import Path


def put(page: Path, name: str, said: str) -> None:
    """Writes `said` between the marks of `name`. Raises ValueError for a page without them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text(encoding="utf-8")
    before, there, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not there or not closed:
        raise ValueError(f"{page} has no place for results; write a line {begin} and a line {end}")
    page.write_text(f"{before}{begin}\n{said}\n{end}{after}", encoding="utf-8")
