"""The picture of accuracy by length, a line for each policy or method.

Lines are labelled where they end instead of in a legend, and `labels` keeps those from
covering each other; the axes are as wide as the words leave room for. Input is what
`summary` returns; the pages above embed the file. Beside: `training_plot`; below: `canvas`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.published import Published
from notepad_jax.eval.summary import Summary
from notepad_jax.report import canvas, labels
from notepad_jax.report.canvas import AFTER, BEFORE, INK, MUTED
from notepad_jax.report.labels import Box, Label

PUBLISHED = "#b4bac2"

# Colour and mark of each method's line; methods that are not named here get OTHERS in turn.
STYLES = {
    "notepad": (AFTER, "o"),
    "full-context": (BEFORE, "s"),
    "truncate-middle": ("#3d7a4e", "^"),
    "recent-only": ("#7d4f9e", "D"),
}
OTHERS = (("#8a6a00", "v"), ("#a03a5b", "P"), ("#3a7a86", "X"), (INK, "*"))

# The accuracy picture; points are 1/72 inch.
WIDTH, HEIGHT = 576.0, 324.0  # points
LEFT, RIGHT, TOP, BOTTOM = 0.08, 0.86, 0.87, 0.16  # edges of the axes, shares of the picture
FLOOR, CEILING = -3.0, 105.0  # ends of the accuracy axis, per cent
UP = HEIGHT * (TOP - BOTTOM) / (CEILING - FLOOR)  # points per per cent


def before_and_after(
    path: str | Path, before: Sequence[Summary], after: Sequence[Summary], train_length: int
) -> Path:
    """Draws both accuracies with 95% intervals over a logarithmic length axis; writes a PNG."""
    lines = [_line("before RL", BEFORE, "o", before), _line("after RL", AFTER, "o", after)]
    return canvas.save(_accuracy(lines, train_length, ()), path)


def by_method(
    path: str | Path,
    summaries: Sequence[Summary],
    train_length: int | None,
    published: Sequence[Published] = (),
) -> Path:
    """Draws one line with its 95% band per method, in the order of STYLES; writes a PNG.

    Published lines are thin and grey behind them, as far as lengths were measured; give those
    that were measured by the metric of the summaries' accuracy, and no others. Without a
    training length none is marked. ValueError if there is nothing to draw.
    """
    named = sorted({s.method for s in summaries} - set(STYLES))
    styles = STYLES | dict(zip(named, itertools.cycle(OTHERS), strict=False))
    lines = [
        _line(method, colour, mark, [s for s in summaries if s.method == method])
        for method, (colour, mark) in styles.items()
    ]
    return canvas.save(_accuracy(lines, train_length, published), path)


@dataclasses.dataclass(frozen=True)
class _Line:
    """What a method or a policy reached; the last four are arrays over its lengths."""

    label: str
    colour: str
    mark: str
    length: np.ndarray  # tokens, ascending
    mean: np.ndarray  # per cent, as its interval
    low: np.ndarray
    high: np.ndarray


def _line(label: str, colour: str, mark: str, summaries: Sequence[Summary]) -> _Line:
    points = sorted(summaries, key=lambda s: s.length)
    shares = [s.accuracy for s in points]
    return _Line(
        label,
        colour,
        mark,
        np.array([s.length for s in points], float),
        *(np.array([100 * getattr(s, part) for s in shares]) for part in ("mean", "low", "high")),
    )


def _published_line(figures: Published, low: float, high: float) -> _Line:
    points = [(x, 100 * y) for x, y in figures.points if low <= x <= high]
    x, y = np.array(points, float).reshape(-1, 2).T
    return _Line(figures.model, PUBLISHED, "", x, y, y, y)


def _accuracy(
    lines: Sequence[_Line], train_length: int | None, published: Sequence[Published]
) -> Figure:
    lines = [line for line in lines if len(line.length)]
    if not lines:
        raise ValueError("there is no accuracy to draw; measure at one length at least")
    lengths = sorted({round(x) for line in lines for x in line.length})
    if len(lengths) == 1 and len(lines) > 1:
        return _one_length(lines, lengths[0])
    ticks = lengths if train_length is None else sorted({*lengths, train_length})
    grey = [_published_line(figures, ticks[0] / 1.35, ticks[-1] * 1.35) for figures in published]
    grey = [line for line in grey if len(line.length) > 1]
    frame = _frame([*lines, *grey], ticks)
    figure, axes = _figure(frame)
    for line in grey:
        axes.plot(line.length, line.mean, color=line.colour, linewidth=1, zorder=1.5)
    for line in reversed(lines):  # the first one comes to lie on top
        _draw(axes, line, band=0.15 if len(lines) < 3 else 0.1)
    taken = [] if train_length is None else [_mark_training(axes, frame, lines, train_length)]
    _write_labels(axes, frame, [*lines, *grey], taken)
    _length_axis(axes, ticks)
    return figure


def _one_length(lines: Sequence[_Line], length: int) -> Figure:
    """Draws the lines, each a single point, side by side with room for their words."""
    frame = _Frame((length * 0.9, length * 1.1), (RIGHT - LEFT) * WIDTH)
    places = (np.arange(len(lines)) + 0.3) / len(lines) * frame.width
    lines = [
        dataclasses.replace(line, length=frame.lengths(place[None]))
        for line, place in zip(lines, places, strict=True)
    ]
    figure, axes = _figure(frame)
    for line in lines:
        _draw(axes, line, band=0)
    _write_labels(axes, frame, lines, [])
    _length_axis(axes, [length])
    axes.set_xlim(frame.span)
    return figure


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The axes: lengths from edge to edge, and how wide they are on paper."""

    span: tuple[float, float]  # tokens
    width: float  # points

    def points(self, length: np.ndarray, per_cent: np.ndarray) -> np.ndarray:
        """Returns places [n, 2] in points from the lower left corner."""
        low, high = np.log(self.span)
        across = (np.log(length) - low) / (high - low) * self.width
        return np.stack([across, (np.asarray(per_cent) - FLOOR) * UP], axis=-1)

    def lengths(self, across: np.ndarray) -> np.ndarray:
        """Returns the tokens at places in points from the left."""
        low, high = np.log(self.span)
        return np.exp(low + across / self.width * (high - low))


def _frame(lines: Sequence[_Line], ticks: Sequence[int]) -> _Frame:
    """Returns axes as wide as they can be with room for the words at the lines' ends."""
    span = ticks[0] / 1.35, ticks[-1] * 1.35
    unit = _Frame(span, 1.0)
    room = (1 - LEFT) * WIDTH - labels.FAR - 6
    fits = [(room - label.width) / label.x for label in _ends(lines, unit)]
    return _Frame(span, min((RIGHT - LEFT) * WIDTH, *fits))


def _figure(frame: _Frame) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    right = LEFT + frame.width / WIDTH
    figure.subplots_adjust(left=LEFT, right=right, top=TOP, bottom=BOTTOM)
    axes = figure.subplots()
    canvas.bare(axes)
    axes.set_ylim(FLOOR, CEILING)
    axes.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
    axes.yaxis.set_major_formatter(FixedFormatter(["0", "25", "50", "75", "100%"]))
    axes.set_xlabel("document length, tokens", color=MUTED, labelpad=8)
    axes.set_title("Accuracy by document length", loc="left", color=INK, fontsize=13, pad=14)
    return figure, axes


def _draw(axes: Axes, line: _Line, band: float) -> None:
    x, low, high = line.length, line.low, line.high
    if len(x) == 1:
        axes.plot([x[0], x[0]], [low[0], high[0]], color=line.colour, alpha=0.35, linewidth=4)
    axes.fill_between(x, low, high, color=line.colour, alpha=band, linewidth=0)
    axes.plot(
        x, line.mean, color=line.colour, linewidth=2, marker=line.mark, markersize=4.5,
        clip_on=False,
    )  # fmt: skip


def _ends(lines: Sequence[_Line], frame: _Frame) -> list[Label]:
    """Returns what is written at the end of each line; of published ones the name alone."""
    ends = [frame.points(line.length, line.mean)[-1] for line in lines]
    return [
        Label(f"{line.label}\n{line.mean[-1]:.1f}%", 10, *end)
        if line.mark
        else Label(line.label, 8, *end)
        for line, end in zip(lines, ends, strict=True)
    ]


def _write_labels(axes: Axes, frame: _Frame, lines: Sequence[_Line], taken: Sequence[Box]) -> None:
    ends = _ends(lines, frame)
    inside = Box(0, -FLOOR * UP, frame.width, (CEILING - FLOOR) * UP)
    boxes = labels.place(ends, _ink(lines, frame), taken, inside, inside.top + 8)
    for line, end, box in zip(lines, ends, boxes, strict=True):
        led = box.distance(end.x, end.y) > labels.NEAR + 2
        near = (end.x - box.left) / end.width, (end.y - box.bottom) / end.height
        axes.annotate(
            end.words,
            (line.length[-1], line.mean[-1]),
            xytext=(box.left - end.x, box.middle - end.y),
            textcoords="offset points",
            color=line.colour if line.mark else MUTED,
            va="center",
            fontsize=end.size,
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            arrowprops={
                "arrowstyle": "-", "color": line.colour, "linewidth": 0.7, "alpha": 0.7,
                "relpos": tuple(min(max(part, 0.0), 1.0) for part in near),
                "shrinkA": 2, "shrinkB": 4,
            } if led else None,
        )  # fmt: skip


def _ink(lines: Sequence[_Line], frame: _Frame) -> np.ndarray:
    """Returns points [n, 2] on all lines, two points apart, and on the intervals of dots."""
    across = np.arange(0, frame.width, 2.0)
    ink = [np.zeros((0, 2))]
    for line in lines:
        x, y = frame.points(line.length, line.mean).T
        if len(x) == 1:
            heights = np.linspace(line.low[0], line.high[0], 30)
            ink.append(frame.points(np.full(30, line.length[0]), heights))
        within = across[(across >= x[0]) & (across <= x[-1])]
        ink.append(np.stack([within, np.interp(within, x, y)], axis=-1))
    return np.concatenate(ink)


def _mark_training(axes: Axes, frame: _Frame, lines: Sequence[_Line], length: int) -> Box:
    """Draws a dashed line at the training length and says so beside it, clear of the bands."""
    axes.axvline(length, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    (x, _) = frame.points(np.array(length), np.array(0.0))
    label = Label(f"trained at {format_length(length)}", 9, x, 0.0)
    right = x + 6 + label.width < frame.width
    left = x + 6 if right else x - 6 - label.width
    heights = [8 + 5 * UP * step for step in range(19)]
    boxes = [Box(left, y, left + label.width, y + label.height) for y in heights]
    box = next((box for box in boxes if not _in_a_band(box, lines, frame)), boxes[0])
    axes.annotate(
        label.words,
        (length, 0),
        xycoords=("data", "axes fraction"),
        xytext=(6 if right else -6, box.bottom),
        textcoords="offset points",
        color=MUTED,
        fontsize=label.size,
        ha="left" if right else "right",
        va="bottom",
    )
    return box


def _in_a_band(box: Box, lines: Sequence[_Line], frame: _Frame) -> bool:
    across = np.linspace(box.left, box.right, 9)
    for line in lines:
        x, low = frame.points(line.length, line.low).T
        high = frame.points(line.length, line.high)[:, 1]
        there = across[(across >= x[0]) & (across <= x[-1])]
        touches = np.interp(there, x, low) - labels.AIR < box.top
        if np.any(touches & (np.interp(there, x, high) + labels.AIR > box.bottom)):
            return True
    return False


def _length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Sets a log2 axis with a tick at measured lengths, at least a factor 1.7 apart."""
    low, high = min(lengths), max(lengths)
    axes.set_xscale("log", base=2)
    # The longest length always has its tick; the others as far as there is room.
    room = max(1.7, 2 ** (math.log2(high / low) / 12)) if high > low else 2.0
    ticks: list[int] = [high]
    for length in sorted(set(lengths), reverse=True):
        if ticks[-1] / length >= room:
            ticks.append(length)
    axes.xaxis.set_major_locator(FixedLocator(ticks[::-1]))
    axes.xaxis.set_major_formatter(FixedFormatter([format_length(t) for t in ticks[::-1]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(low / 1.35, high * 1.35)
