"""The plot of accuracy by length, a line for each policy or method, wide and for phones.

Lines are labelled where they end instead of in a legend, and `labels` keeps those from
covering each other; the axes are as wide as the words leave room for. Input is what
`summary` returns. Beside: `training_plot`; below: `chart`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.published import PublishedCurve
from notepad_jax.eval.summary import Summary
from notepad_jax.report import chart, labels, numerals
from notepad_jax.report.chart import GREY, OTHER, OURS, Axis, Chart, Line, TextLines
from notepad_jax.report.labels import Box, Label

# Colour and mark of each method's line; methods that are not named here get OTHERS in turn.
STYLES = {
    "notepad": (OURS, "circle"),
    "full-context": (OTHER, "square"),
    "truncate-middle": (chart.MORE[0], "triangle"),
    "recent-only": (chart.MORE[1], "diamond"),
}
OTHERS = tuple(zip(chart.MORE[2:], ("wedge", "bar", "circle", "square"), strict=True))

FLOOR, CEILING = -3.0, 105.0  # ends of the accuracy axis, per cent


@dataclasses.dataclass(frozen=True)
class Sheet:
    """The sizes of a picture and of its letters, in pixels."""

    width: float
    height: float
    left: float  # of the axes
    top: float
    bottom: float  # from above
    size: float  # of the words at the ends of lines
    small: float  # of those of published lines, and at the training length
    ticks: int  # of lengths, about as many as there is room for


WIDE = Sheet(752, 420, 44, 40, 360, 13, 11, 12)
PHONE = Sheet(342, 300, 40, 34, 246, 11, 9, 5)


@dataclasses.dataclass(frozen=True)
class CurvePicture:
    """The same curves twice, wide and narrow, and which published figures are among them."""

    wide: Chart
    phone: Chart
    published: tuple[PublishedCurve, ...]


def before_and_after(
    before: Sequence[Summary], after: Sequence[Summary], train_length: int
) -> CurvePicture:
    """Returns the plot of both accuracies, with 95% intervals, over a logarithmic length axis.

    ValueError if there is nothing to draw.
    """
    lines = [_line("before RL", OTHER, "circle", before), _line("after RL", OURS, "circle", after)]
    return _picture(lines, train_length, ())


def by_method(
    summaries: Sequence[Summary],
    train_length: int | None,
    published: Sequence[PublishedCurve] = (),
) -> CurvePicture:
    """Returns the plot with one line and its 95% band per method, in the order of STYLES.

    Published lines are thin and grey behind them, as far as lengths were measured; give those
    that were measured by the metric of the summaries' accuracy, and no others. Without a
    training length none is marked. ValueError if there is nothing to draw.
    """
    named = sorted({s.method for s in summaries} - set(STYLES))
    styles = STYLES | dict(zip(named, itertools.cycle(OTHERS), strict=False))
    lines = [
        _line(method, tone, mark, [s for s in summaries if s.method == method])
        for method, (tone, mark) in styles.items()
    ]
    return _picture(lines, train_length, published)


def capture_and_retention(
    summaries: Sequence[Summary], train_length: int | None
) -> CurvePicture | None:
    """Returns the plot of the shares of evidence written, and of that kept, by length.

    `summaries` are one method's. None where no evidence is known.
    """
    captured = [dataclasses.replace(s, accuracy=s.captured) for s in summaries if s.captured]
    retained = [dataclasses.replace(s, accuracy=s.retained) for s in summaries if s.retained]
    if not captured:
        return None
    lines = [
        _line("ever written", OTHER, "square", captured),
        _line("kept to the end", OURS, "circle", retained),
    ]
    made = _picture(lines, train_length, ())
    told = dict(
        title="Evidence by document length",
        description="Evidence that was ever written, and what of it was kept to the end, by length",
    )
    wide, phone = (dataclasses.replace(one, **told) for one in (made.wide, made.phone))
    return CurvePicture(wide, phone, ())


def _line(label: str, tone: str, mark: str, summaries: Sequence[Summary]) -> Line:
    points = sorted(summaries, key=lambda s: s.length)
    shares = [s.accuracy for s in points]
    return Line(
        label=label,
        tone=tone,
        x=[float(s.length) for s in points],
        y=[100 * s.mean for s in shares],
        low=[100 * s.low for s in shares],
        high=[100 * s.high for s in shares],
        told=[
            f"{numerals.percent(s.accuracy.mean)} ({numerals.interval(s.accuracy)}), "
            f"n = {s.questions:,}"
            for s in points
        ],
        mark=mark,
    )


def _published_line(figures: PublishedCurve, low: float, high: float) -> Line:
    """A published line as far as it lies within what was measured; maybe of no points."""
    points = [(x, y) for x, y in figures.points if low <= x <= high]
    y = [100 * share for _, share in points]
    told = [f"{numerals.percent(share)}, published" for _, share in points]
    return Line(figures.model, GREY, [float(x) for x, _ in points], y, y, y, told)


def _picture(
    lines: Sequence[Line], train_length: int | None, published: Sequence[PublishedCurve]
) -> CurvePicture:
    lines = [line for line in lines if len(line.x)]
    if not lines:
        raise ValueError("there is no accuracy to draw; measure at one length at least")
    lengths = sorted({round(x) for line in lines for x in line.x})
    if len(lengths) == 1 and len(lines) > 1:
        wide, phone = (_one_length(lines, lengths[0], sheet) for sheet in (WIDE, PHONE))
        return CurvePicture(wide, phone, ())
    ticks = lengths if train_length is None else sorted({*lengths, train_length})
    behind = {
        figures: _published_line(figures, ticks[0] / 1.35, ticks[-1] * 1.35)
        for figures in published
    }
    behind = {figures: line for figures, line in behind.items() if len(line.x) > 1}
    everything = [*lines, *behind.values()]
    wide, phone = (_drawn(everything, ticks, train_length, sheet) for sheet in (WIDE, PHONE))
    return CurvePicture(wide, phone, tuple(behind))


def _drawn(
    lines: Sequence[Line], ticks: Sequence[int], train_length: int | None, sheet: Sheet
) -> Chart:
    span = ticks[0] / 1.35, ticks[-1] * 1.35
    bare = _bare(lines, _length_axis(ticks, span, sheet), sheet)
    words, taken = [], []
    if train_length is not None:
        told, box = _training_words(bare, train_length, sheet)
        words, taken = [told], [box]
    words += _end_words(bare, sheet, taken)
    rule = None if train_length is None else float(train_length)
    return dataclasses.replace(bare, words=words, rule=rule)


def _one_length(lines: Sequence[Line], length: int, sheet: Sheet) -> Chart:
    """The lines, each a single point, side by side with room for their words."""
    axis = Axis(0.0, 1.0, [(0.5, format_length(length))], "document length, tokens")
    places = (np.arange(len(lines)) + 0.3) / len(lines)
    lines = [
        dataclasses.replace(line, x=[float(place)])
        for line, place in zip(lines, places, strict=True)
    ]
    bare = _bare(lines, axis, sheet, lambda place: format_length(length))
    return dataclasses.replace(bare, words=_end_words(bare, sheet, []))


def _bare(
    lines: Sequence[Line],
    across: Axis,
    sheet: Sheet,
    heading: Callable[[float], str] = lambda x: f"{format_length(round(x))} tokens",
) -> Chart:
    """The curves without words, on axes as wide as can be with room for words at their right."""
    room = sheet.width - 4 - sheet.left
    ends = [float(across.share(line.x)[-1]) for line in lines]
    wide = [labels.FAR + _label(line, 0.0, 0.0, sheet).width for line in lines]
    width, edge = room - labels.FAR, max(ends)
    for w, end in sorted(zip(wide, ends, strict=True), key=lambda one: -one[1]):
        # Lines that end near the longest one have their words in a column right of it.
        in_column = (edge - end) * width < labels.COLUMN
        width = min(width, (room - w) / edge) if in_column else width
    return Chart(
        title="Accuracy by document length",
        description=f"Accuracy by document length of {', '.join(line.label for line in lines)}",
        width=sheet.width,
        height=sheet.height,
        left=sheet.left,
        bottom=sheet.bottom,
        axes_width=width,
        axes_height=sheet.bottom - sheet.top,
        across=across,
        upwards=Axis(FLOOR, CEILING, [(0, "0"), (25, "25"), (50, "50"), (75, "75"), (100, "100%")]),
        lines=lines,
        heading=heading,
    )


# ---------------------------------------------------------------- words


def _label(line: Line, x: float, y: float, sheet: Sheet) -> Label:
    """What is written at the end of a line, which is at x, y; of published ones the name alone."""
    if line.tone == GREY:
        return Label(line.label, sheet.small, x, y)
    return Label(f"{line.label}\n{line.y[-1]:.1f}%", sheet.size, x, y)


def _end_words(bare: Chart, sheet: Sheet, taken: Sequence[Box]) -> list[TextLines]:
    ends = [_label(line, *bare.points(line.x[-1:], line.y[-1:])[0], sheet) for line in bare.lines]
    floor = float(bare.upwards.share([0])[0]) * bare.axes_height
    inside = Box(0, floor, bare.width - bare.left - 4, bare.axes_height)
    boxes = labels.place(ends, _ink(bare), taken, inside, inside.top + 8)
    return [
        TextLines(
            lines=end.words.split("\n"),
            x=box.left,
            middle=box.middle,
            size=end.size,
            tone=line.tone,
            lead=_lead(box, end),
        )
        for line, end, box in zip(bare.lines, ends, boxes, strict=True)
    ]


def _lead(box: Box, end: Label) -> tuple[float, float, float, float] | None:
    """A thin line from near the end of a line to its label, where that is far away."""
    if box.distance(end.x, end.y) <= labels.NEAR + 2:
        return None
    x = min(max(end.x, box.left - 2), box.right + 2)
    y = min(max(end.y, box.bottom + 2), box.top - 2)
    away = math.hypot(x - end.x, y - end.y) or 1.0
    start = 5 / away  # clear of the mark
    return end.x + start * (x - end.x), end.y + start * (y - end.y), x, y


def _ink(bare: Chart) -> np.ndarray:
    """Returns points [n, 2] on all lines, two pixels apart, and on the intervals of dots."""
    across = np.arange(0, bare.axes_width, 2.0)
    ink = [np.zeros((0, 2))]
    for line in bare.lines:
        x, y = bare.points(line.x, line.y).T
        if len(x) == 1:
            heights = np.linspace(line.low[0], line.high[0], 30)
            ink.append(bare.points(np.full(30, line.x[0]), heights))
        within = across[(across >= x[0]) & (across <= x[-1])]
        ink.append(np.stack([within, np.interp(within, x, y)], axis=-1))
    return np.concatenate(ink)


def _training_words(bare: Chart, length: int, sheet: Sheet) -> tuple[TextLines, Box]:
    """Says beside the dashed line what it is, clear of the bands."""
    (x, _) = bare.points([length], [0.0])[0]
    label = Label(f"trained at {format_length(length)}", sheet.small, x, 0.0)
    right = x + 6 + label.width < bare.axes_width
    left = x + 6 if right else x - 6 - label.width
    heights = np.linspace(8, bare.axes_height - label.height - 4, 20)
    boxes = [Box(left, y, left + label.width, y + label.height) for y in heights]
    box = next((box for box in boxes if not _in_a_band(box, bare)), boxes[0])
    words = TextLines(
        lines=(label.words,),
        x=box.left if right else box.right,
        middle=box.middle,
        size=label.size,
        tone=GREY,
        anchor="start" if right else "end",
    )
    return words, box


def _in_a_band(box: Box, bare: Chart) -> bool:
    across = np.linspace(box.left, box.right, 9)
    for line in bare.lines:
        x, low = bare.points(line.x, line.low).T
        high = bare.points(line.x, line.high)[:, 1]
        there = across[(across >= x[0]) & (across <= x[-1])]
        touches = np.interp(there, x, low) - labels.AIR < box.top
        if np.any(touches & (np.interp(there, x, high) + labels.AIR > box.bottom)):
            return True
    return False


def _length_axis(lengths: Sequence[int], span: tuple[float, float], sheet: Sheet) -> Axis:
    """A logarithmic axis with ticks at measured lengths, at least a factor 1.7 apart."""
    low, high = min(lengths), max(lengths)
    # The longest length always has its tick; the others as far as there is room.
    room = max(1.7, 2 ** (math.log2(high / low) / sheet.ticks)) if high > low else 2.0
    ticks: list[int] = [high]
    for length in sorted(set(lengths), reverse=True):
        if ticks[-1] / length >= room * 0.999:
            ticks.append(length)
    told = [(float(tick), format_length(tick)) for tick in ticks[::-1]]
    return Axis(*span, told, "document length, tokens", log=True)
