"""A line chart as values: lines over two axes, words beside them, and the pointer's tooltips.

Nothing here knows what is measured. A `Chart` says where everything is, in pixels;
`templates/chart.svg` paints it, in colours that `templates/colours.css` has for a light and a
dark scheme, and `templates/page.js` shows `stops` under the pointer. So a page and a picture
of its own come from the same values. Above: `accuracy_plot` and `training_plot`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

# Colours by meaning: what was learnt or is ours, what it is compared with, others in turn.
OURS, OTHER, MORE = "tone-0", "tone-1", tuple(f"tone-{k}" for k in range(2, 8))
GREY = "tone-grey"

# Marks as SVG paths that begin at their middle.
_MARKS = {
    "circle": "m-3.2,0a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0z",
    "square": "m-3,-3h6v6h-6z",
    "triangle": "m0,-4l4,7h-8z",
    "diamond": "m0,-4.2l4.2,4.2l-4.2,4.2l-4.2,-4.2z",
    "wedge": "m0,4l4,-7h-8z",
    "bar": "m-2,-4h4v8h-4z",
}


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`; a logarithmic one has both above 0."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]  # where, and the words there
    title: str = ""
    log: bool = False

    def share(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Returns 0 for `low`, 1 for `high`, and what is between them in between."""
        low, high, values = self.low, self.high, np.asarray(values, float)
        if self.log:
            low, high, values = math.log(low), math.log(high), np.log(values)
        return (values - low) / (high - low)


@dataclasses.dataclass(frozen=True)
class Line:
    """Values over ascending x; `low` and `high` are the ends of a band around them."""

    label: str
    tone: str  # OURS, OTHER, one of MORE, or GREY
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    told: Sequence[str]  # the words under the pointer at each point
    mark: str = ""  # of _MARKS, at every point; "" for none

    def __post_init__(self) -> None:
        sizes = {len(values) for values in (self.x, self.y, self.low, self.high, self.told)}
        if len(sizes) > 1:
            raise ValueError(f"the line {self.label!r} has parts of {sorted(sizes)} points")


@dataclasses.dataclass(frozen=True)
class TextLines:
    """Lines of text on the chart; pixels from the lower left corner of the axes."""

    lines: Sequence[str]
    x: float
    middle: float
    size: float  # of the letters
    tone: str
    anchor: str = "start"  # or "end": which end of the words is at x
    lead: tuple[float, float, float, float] | None = None  # a thin line, from x, y to x, y


@dataclasses.dataclass(frozen=True)
class Chart:
    """All of one chart. The axes are a rectangle in the picture; sizes are pixels."""

    title: str
    description: str  # for screen readers
    width: float
    height: float
    left: float  # of the axes; the next is their lower edge, from above
    bottom: float
    axes_width: float
    axes_height: float
    across: Axis
    upwards: Axis
    lines: Sequence[Line]  # the first comes to lie on top
    words: Sequence[TextLines] = ()
    rule: float | None = None  # an x with a dashed line
    heading: Callable[[float], str] = "{:g}".format  # of an x, for the pointer

    def points(
        self, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray
    ) -> np.ndarray:
        """Returns places [n, 2] in pixels from the lower left corner of the axes."""
        across = self.across.share(x) * self.axes_width
        return np.stack([across, self.upwards.share(y) * self.axes_height], axis=-1)

    # ------------------------------------------------------------ for the template

    def path(self, line: Line) -> str:
        """The line, as the `d` of an SVG path; of one point, its interval."""
        if len(line.x) == 1:
            ends = self._at([line.x[0]] * 2, [line.low[0], line.high[0]])
            return _path(ends)
        return _path(self._at(line.x, line.y))

    def band(self, line: Line) -> str:
        """The band around a line; nothing where there is none."""
        if len(line.x) < 2 or list(line.low) == list(line.high):
            return ""
        there, back = self._at(line.x, line.high), self._at(line.x, line.low)
        return _path(np.concatenate([there, back[::-1]])) + "z"

    def marks(self, line: Line) -> str:
        """The marks at all points of a line, as one path."""
        if not line.mark:
            return ""
        places = self._at(line.x, line.y)
        return "".join(f"M{x:.1f},{y:.1f}{_MARKS[line.mark]}" for x, y in places)

    def across_ticks(self) -> list[tuple[float, str]]:
        """Where ticks of the horizontal axis are, from the left, and their words."""
        at = self.left + self.across.share([x for x, _ in self.across.ticks]) * self.axes_width
        return [(x, words) for x, (_, words) in zip(at, self.across.ticks, strict=True)]

    def upward_ticks(self) -> list[tuple[float, str]]:
        """Where ticks of the vertical axis are, from above, and their words."""
        ticks = self.upwards.ticks
        up = self.upwards.share([y for y, _ in ticks]) * self.axes_height
        return [(self.bottom - y, words) for y, (_, words) in zip(up, ticks, strict=True)]

    def lines_of(self, words: TextLines) -> list[tuple[str, float, float]]:
        """Each line of words and where its letters stand, from above left."""
        x, middle = self.left + words.x, self.bottom - words.middle
        up = (len(words.lines) - 1) / 2
        return [
            (line, x, middle + (k - up) * 1.3 * words.size + 0.36 * words.size)
            for k, line in enumerate(words.lines)
        ]

    def lead(self, words: TextLines) -> tuple[tuple[float, float], tuple[float, float]]:
        """The two ends of the thin line from the end of a line to its words."""
        a, b, c, d = words.lead
        return (self.left + a, self.bottom - b), (self.left + c, self.bottom - d)

    def rule_at(self) -> float:
        """Where the dashed line is, from the left."""
        return self.left + float(self.across.share([self.rule])[0]) * self.axes_width

    def stops(self) -> list[tuple[float, str, list[tuple[str, str, str, float]]]]:
        """The tooltips from left to right: at each x, of all lines that have it.

        Pixels from the left edge, the heading, and rows of label, tone, words, pixels from above.
        """
        found: dict[float, list[tuple[str, str, str, float]]] = {}
        for line in self.lines:
            places = self._at(line.x, line.y)
            for x, (_, y), told in zip(line.x, places, line.told, strict=True):
                found.setdefault(float(x), []).append((line.label, line.tone, told, round(y, 1)))
        return [
            (round(float(self._at([x], [self.upwards.low])[0][0]), 1), self.heading(x), rows)
            for x, rows in sorted(found.items())
        ]

    def _at(self, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> np.ndarray:
        """Returns places [n, 2] as pixels from the picture's upper left corner."""
        places = self.points(x, y)
        return np.stack([self.left + places[..., 0], self.bottom - places[..., 1]], axis=-1)


def _path(places: np.ndarray) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)


# ---------------------------------------------------------------- axes


def shares(highest: float = 1.0) -> Axis:
    """An axis from 0 to 100%."""
    return Axis(0.0, highest, [(0.0, "0"), (0.5, "50%"), (1.0, "100%")])


def linear(values: Sequence[float]) -> Axis:
    """An axis that holds 0 and all values, and ends at round numbers."""
    low, high = min([0.0, *values]), max([0.0, *values])
    if low == high:
        high = 1.0
    step = _round_step((high - low) / 4)
    ticks = [k * step for k in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return Axis(min(low, ticks[0]), ticks[-1], [(at, f"{at:,.6g}") for at in ticks])


def steps(first: float, last: float) -> Axis:
    """An axis of whole steps, just as long as it must be."""
    if first == last:
        return Axis(first - 1, last + 1, [(first, f"{first:,.0f}")])
    step = _round_step((last - first) / 5, whole=True)
    ticks = [k * step for k in range(math.ceil(first / step), math.floor(last / step) + 1)]
    return Axis(first, last, [(at, f"{at:,.0f}") for at in ticks])


def powers(values: Sequence[float]) -> Axis:
    """A logarithmic axis of values above 0, with at most five powers of ten."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = -(-(high - low) // 4)
    ticks = [(10.0**k, f"1e{k}") for k in range(low, high + 1, every)]
    return Axis(10.0**low, 10.0**high, ticks, log=True)


def _round_step(least: float, whole: bool = False) -> float:
    """Returns 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))
    return max(step, 1.0) if whole else step
