"""Pictures: accuracy by length of policies or methods, and the course of training.

Drawn with matplotlib's Agg canvas on plain `Figure` objects, so nothing global is touched
and no display is needed. Lines are labelled where they end instead of in a legend, and
`labels` keeps those from covering each other. Input is what `summary` and
`telemetry.metrics.read_metrics` return; `report` and `suite_report` above embed the files.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.published import Published
from notepad_jax.eval.summary import Summary
from notepad_jax.report import labels
from notepad_jax.report.labels import Box, Label

BEFORE, AFTER = "#b0602a", "#1f5fa8"  # told apart by people with any colour vision, and in grey
INK, MUTED, GRID = "#22262b", "#7a828c", "#e6e8eb"
PUBLISHED = "#b4bac2"
DPI = 160

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


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small chart of the training picture: the metrics it draws, and their labels.

    `scale` is "share" (0 to 100%), "linear" (from 0) or "log".
    """

    title: str
    lines: Mapping[str, str]  # metric name -> label; metrics that were not logged are left out
    scale: str = "linear"


PANELS = (
    Panel("Reward", {"reward": "mean reward"}, "share"),
    Panel("Groups that carry signal", {"groups/kept_share": "kept"}, "share"),
    Panel("Entropy per token", {"entropy_update": "memory", "entropy_answer": "answer"}),
    Panel("Share of tokens clipped", {"clip_share": "clipped"}),
    Panel(
        "Sampler-trainer logprob gap",
        {"logprob_gap_mean": "mean", "logprob_gap_max": "largest"},
        "log",
    ),
    Panel("Memory written, tokens", {"rollout/memory_tokens": "memory"}),
)


def accuracy_by_length(
    path: str | Path, before: Sequence[Summary], after: Sequence[Summary], train_length: int
) -> Path:
    """Draws both accuracies with 95% intervals over a logarithmic length axis; writes a PNG."""
    lines = [_line("before RL", BEFORE, "o", before), _line("after RL", AFTER, "o", after)]
    return _save(_accuracy(lines, train_length, ()), path)


def accuracy_by_method(
    path: str | Path,
    summaries: Sequence[Summary],
    train_length: int | None,
    published: Sequence[Published] = (),
) -> Path:
    """Draws one line with its 95% band per method, in the order of STYLES; writes a PNG.

    Published lines are thin and grey behind them, as far as lengths were measured. Without
    a training length none is marked. ValueError if there is nothing to draw.
    """
    named = sorted({s.method for s in summaries} - set(STYLES))
    styles = STYLES | dict(zip(named, itertools.cycle(OTHERS), strict=False))
    lines = [
        _line(method, colour, mark, [s for s in summaries if s.method == method])
        for method, (colour, mark) in styles.items()
    ]
    return _save(_accuracy(lines, train_length, published), path)


# ---------------------------------------------------------------- accuracy


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
    _plain(axes)
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


# ---------------------------------------------------------------- training


def training(
    path: str | Path,
    metrics: Sequence[Mapping[str, float]],
    panels: Sequence[Panel] = PANELS,
) -> Path:
    """Draws the logged metrics by step, one small chart per panel; writes a PNG.

    A panel none of whose metrics was logged is left out. ValueError if that leaves none.
    """
    panels = [p for p in panels if any(name in line for line in metrics for name in p.lines)]
    if not panels:
        raise ValueError("there are no training metrics to draw; run at least one step")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.9 * columns, 2.1 * rows), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, hspace=0.06, wspace=0.04)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _plain(axes)
        _panel(axes, panel, metrics)
    for axes in grid[-1]:
        axes.set_xlabel("step", color=MUTED, fontsize=9)
    return _save(figure, path)


def _panel(axes: Axes, panel: Panel, metrics: Sequence[Mapping[str, float]]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10, color=INK, pad=8)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    shown = [name for name in panel.lines if any(name in line for line in metrics)]
    for name, colour in zip(shown, (AFTER, BEFORE, MUTED), strict=False):
        points = [
            (line["step"], line[name])
            for line in metrics
            if math.isfinite(line.get(name, math.nan)) and (panel.scale != "log" or line[name] > 0)
        ]
        x, y = [p[0] for p in points], [p[1] for p in points]
        mark = "o" if len(points) == 1 else None
        axes.plot(x, y, color=colour, linewidth=1.6, label=panel.lines[name], marker=mark)
    if panel.scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    elif panel.scale == "share":
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
        axes.yaxis.set_major_formatter(FixedFormatter(["0", "50%", "100%"]))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.set_ylim(0, max(axes.get_ylim()[1], 1e-9))
    if len(shown) > 1:
        # Room above the lines, so that the labels cover nothing.
        low, high = axes.get_ylim()
        axes.set_ylim(low, high**1.3 / low**0.3 if panel.scale == "log" else 1.25 * high)
        axes.legend(
            frameon=False, fontsize=8, labelcolor=INK, handlelength=1.2, ncols=2, loc="upper right"
        )


def _plain(axes: Axes) -> None:
    """Takes the ink off everything that is not data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, pad=6)


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=DPI, facecolor="white")
    return path
