"""A point of the search for the fastest settings: its figures, and their text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Point:
    """Some settings on a slice, planned; a line of the table."""

    slice: str
    sets: Mapping[str, Any]  # keys of the config and their values; {}: as it is
    compiled: bool  # or counted by arithmetic
    fits: bool
    seconds: float  # of a step, at least
    dollars: float | None  # of a step; None without a price
    peaks: Mapping[str, int]  # of each phase, bytes of a device
    hbm: int
    fill: float  # share of computed tokens that are real
    computed_tokens: int  # of an update, all its optimizer steps
    verdict: str

    @property
    def overrides(self) -> list[str]:
        return [f"--config.{key}={as_said(value)}" for key, value in self.sets.items()]


def winners(points: Sequence[Point]) -> tuple[Point, Point | None]:
    """(the fastest, the cheapest) of those that fit; of compiled ones where there are any.

    The latter is None where no price is known. Raises ValueError where nothing fits.
    """
    compiled = [point for point in points if point.compiled]
    found = [point for point in compiled or points if point.fits]
    if not found:
        how = "compiled" if compiled else "counted"
        raise ValueError(f"nothing that was {how} fits; raise --tries, or name larger slices")
    priced = [point for point in found if point.dollars is not None]
    fastest = min(found, key=lambda point: point.seconds)
    return fastest, min(priced, key=lambda point: point.dollars, default=None)


HEAD = (
    f"{'slice':14}{'by':>9}{'s a step':>10}{'$ a step':>10}{'GB':>8}{'of':>7}{'real':>7}"
    "  what is changed"
)


def line(point: Point) -> str:
    """Returns a row of the table under `HEAD`."""
    dollars = "" if point.dollars is None else f"{point.dollars:.2f}"
    peak = max(point.peaks.values()) / 1e9
    changed = " ".join(point.overrides) or "nothing"
    return (
        f"{point.slice:14}{'compiler' if point.compiled else 'estimate':>9}{point.seconds:10.1f}"
        f"{dollars:>10}{peak:8.1f}{point.hbm / 1e9:7.1f}{point.fill:7.1%}  {changed}"
        + ("" if point.fits else "  DOES NOT FIT")
    )


def text(points: Sequence[Point]) -> str:
    """Returns the whole table and the winners; seconds are floors of a step's real ones."""
    said = [HEAD, *map(line, points), ""]
    try:
        fastest, cheapest = winners(points)
    except ValueError as problem:
        return "\n".join([*said, str(problem)])
    said.append(f"fastest: {_won(fastest, points)}")
    if cheapest is not None and cheapest is not fastest:
        said.append(f"cheapest: {_won(cheapest, points)}")
    if not fastest.compiled:
        said.append("by arithmetic alone: plan it with the compiler before it is relied on")
    return "\n".join(said)


def _won(point: Point, points: Sequence[Point]) -> str:
    words = " ".join(["--tpu", point.slice, *point.overrides])
    dollars = "" if point.dollars is None else f", ${point.dollars:.2f}"
    before = [
        other.seconds
        for other in points
        if (other.slice, other.compiled) == (point.slice, point.compiled) and not other.sets
    ]
    less = f", {1 - point.seconds / before[0]:.0%} less than as it is" if before else ""
    return f"at least {point.seconds:.1f} s a step{dollars}{less}: {words}"


def as_said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
