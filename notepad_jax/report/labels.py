"""Placement of the labels of lines, so that they cover neither each other nor a line.

Plain geometry in pixels from the lower left corner of the axes; nothing here
draws. Lines that end at the right share one column, in which `spread` moves labels apart
as little as possible. A line that ends earlier has its label where it covers least, near
the end. Where lines are many and short, their names stand above the axes (`legend`). Used by
`accuracy_plot`, and `legend` by `training_plot` and benchmarks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from notepad_jax.report.chart import Line, TextLines

LETTER = 0.62  # of its size, a letter is about as wide
NEAR, FAR = 9.0, 16.0  # from the end of a line to its label; far where labels had to move
AIR = 2.0  # kept free around a label
COLUMN = 60.0  # a line that ends this near to the longest one has its label in the same column


@dataclasses.dataclass(frozen=True)
class Label:
    """The words at the end of a line."""

    words: str
    size: float  # of the letters
    x: float  # the end of the line
    y: float

    @property
    def width(self) -> float:
        """Pixels, roughly."""
        return LETTER * self.size * max(map(len, self.words.split("\n")))

    @property
    def height(self) -> float:
        """Pixels, with a little air."""
        return 1.3 * self.size * len(self.words.split("\n"))

    def beside(self, x: float, middle: float) -> Box:
        """Returns the words' box with its left edge at `x` and its middle at `middle`."""
        return Box(x, middle - self.height / 2, x + self.width, middle + self.height / 2)


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle on the picture."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def middle(self) -> float:
        return (self.bottom + self.top) / 2

    def covers(self, other: Box) -> bool:
        """Whether two boxes have an area in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def holds(self, other: Box) -> bool:
        """Whether another box lies in this one."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.bottom <= other.bottom
            and other.top <= self.top
        )

    def counts(self, points: np.ndarray) -> int:
        """Returns how many of the points [n, 2] lie in the box or touch its air."""
        x, y = points.T
        across = (self.left - AIR < x) & (x < self.right + AIR)
        return int(np.sum(across & (self.bottom - AIR < y) & (y < self.top + AIR)))

    def distance(self, x: float, y: float) -> float:
        """Returns how far a point outside the box is from it."""
        dx = max(self.left - x, 0.0, x - self.right)
        return math.hypot(dx, max(self.bottom - y, 0.0, y - self.top))


def place(
    labels: Sequence[Label], ink: np.ndarray, taken: Sequence[Box], room: Box, highest: float
) -> list[Box]:
    """Returns a box for each label.

    Args:
      labels: those placed first have the better places.
      ink: points [n, 2] on lines, close enough together that a line does not slip through.
      taken: boxes that hold other words already.
      room: where labels of lines that end early may stand; also the lower edge of the column.
      highest: how far up the column at the right may reach.
    """
    if not labels:
        return []
    edge = max(label.x for label in labels)
    boxes: dict[int, Box] = {}
    column = [k for k, label in enumerate(labels) if label.x > edge - COLUMN]
    wanted, heights = [labels[k].y for k in column], [labels[k].height for k in column]
    found = spread(wanted, heights, room.bottom, highest)
    moved = any(abs(a - b) > heights[0] / 4 for a, b in zip(wanted, found, strict=True))
    for k, middle in zip(column, found, strict=True):
        boxes[k] = labels[k].beside(edge + (FAR if moved else NEAR), middle)
    for k, label in enumerate(labels):
        if k not in boxes:
            boxes[k] = _quietest(label, ink, [*taken, *boxes.values()], room)
    return [boxes[k] for k in range(len(labels))]


def _quietest(label: Label, ink: np.ndarray, taken: Sequence[Box], room: Box) -> Box:
    """Returns the box near a line's end that covers no words and as little ink as can be."""
    lefts = (NEAR, FAR, 2 * FAR, -label.width / 2, -label.width - NEAR)
    rises = sorted((4.0 * k for k in range(-30, 31)), key=abs)
    here = [label.beside(label.x + left, label.y + rise) for left in lefts for rise in rises]
    inside = [b for b in here if room.holds(b)] or here

    def cost(box: Box) -> float:
        words = sum(box.covers(other) for other in taken)
        return 1e6 * words + 20 * box.counts(ink) + abs(box.distance(label.x, label.y) - NEAR)

    return min(inside, key=cost)


def spread(
    wanted: Sequence[float], heights: Sequence[float], low: float, high: float
) -> list[float]:
    """Moves the middles of labels apart until none covers another, as little as possible.

    Keeps their order (the first of equals comes out on top), minimises the sum of squared
    moves, and keeps the labels between `low` and `high`; those that are together too high
    for it stand out evenly at both ends. With the room below each label subtracted this is
    isotonic regression, solved by pooling neighbours that are out of order (Barlow et al.
    1972, Statistical Inference under Order Restrictions).
    """
    if not wanted:
        return []
    order = sorted(range(len(wanted)), key=lambda k: (wanted[k], -k))
    below = [0.0]
    for k, after in itertools.pairwise(order):
        below.append(below[-1] + (heights[k] + heights[after]) / 2)
    pools: list[tuple[float, int]] = []  # (mean, labels in it)
    for k, room in zip(order, below, strict=True):
        mean, n = wanted[k] - room, 1
        while pools and pools[-1][0] > mean:
            before, m = pools.pop()
            mean, n = (before * m + mean * n) / (m + n), m + n
        pools.append((mean, n))
    found = [mean for mean, n in pools for _ in range(n)]
    bottom = low + heights[order[0]] / 2
    top = high - heights[order[-1]] / 2 - below[-1]
    if bottom > top:
        bottom = top = (bottom + top) / 2
    places = [0.0] * len(wanted)
    for k, mean, room in zip(order, found, below, strict=True):
        places[k] = min(max(mean, bottom), top) + room
    return places


def legend(
    lines: Sequence[Line], width: float, size: float, row: float
) -> tuple[list[TextLines], int]:
    """Returns the names of lines, in rows above axes of that width, and how many rows they take.

    `size` is that of the letters, `row` the way from one row to the next; heights are counted
    from the upper end of the axes.
    """
    rows: list[list[TextLines]] = [[]]
    x = 0.0
    for line in lines:
        wide = LETTER * size * len(line.label)
        if rows[-1] and x + wide > width:
            rows.append([])
            x = 0.0
        rows[-1].append(TextLines((line.label,), x, 0.0, size, line.tone))
        x += wide + 14
    placed = [
        dataclasses.replace(words, middle=12 + row * above)
        for above, words_of in enumerate(reversed(rows))
        for words in words_of
    ]
    return placed, len(rows)
