"""Two pictures: accuracy by length before and after learning, and the course of training.

Drawn with matplotlib's Agg canvas on plain `Figure` objects, so nothing global is touched
and no display is needed. Lines are labelled where they end instead of in a legend. Input
is what `lengths.summarise` and `telemetry.metrics.read_metrics` return; `report` above
embeds the files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from notepad_jax.eval.lengths import LengthSummary, format_length

BEFORE, AFTER = "#b0602a", "#1f5fa8"  # told apart by people with any colour vision, and in grey
INK, MUTED, GRID = "#22262b", "#7a828c", "#e6e8eb"
DPI = 160


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
    path: str | Path,
    before: Sequence[LengthSummary],
    after: Sequence[LengthSummary],
    train_length: int,
) -> Path:
    """Draws both accuracies with 95% intervals over a logarithmic length axis; writes a PNG."""
    figure, axes = _figure(8.0, 4.5)
    drawn = [(before, BEFORE, "before RL"), (after, AFTER, "after RL")]
    drawn = [(points, colour, label) for points, colour, label in drawn if points]
    if not drawn:
        raise ValueError("there is no accuracy to draw; measure at one length at least")
    for points, colour, label in drawn:
        _accuracy_line(axes, sorted(points, key=lambda p: p.length), colour, label)
    lengths = sorted({p.length for points, _, _ in drawn for p in points})
    _length_axis(axes, [*lengths, train_length])
    _mark_training(axes, train_length)
    axes.set_ylim(-3, 105)
    axes.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
    axes.yaxis.set_major_formatter(FixedFormatter(["0", "25", "50", "75", "100%"]))
    axes.set_xlabel("document length, tokens", color=MUTED, labelpad=8)
    axes.set_title("Accuracy by document length", loc="left", color=INK, fontsize=13, pad=14)
    return _save(figure, path)


def _accuracy_line(axes: Axes, points: Sequence[LengthSummary], colour: str, label: str) -> None:
    x = [p.length for p in points]
    y = [100 * p.accuracy.mean for p in points]
    low = [100 * p.accuracy.low for p in points]
    high = [100 * p.accuracy.high for p in points]
    if len(points) == 1:
        axes.plot([x[0], x[0]], [low[0], high[0]], color=colour, alpha=0.35, linewidth=4)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(x, y, color=colour, linewidth=2, marker="o", markersize=4.5, clip_on=False)
    axes.annotate(
        f"{label}\n{y[-1]:.1f}%",
        (x[-1], y[-1]),
        xytext=(9, 0),
        textcoords="offset points",
        color=colour,
        va="bottom" if y[-1] < 8 else "center",  # clear of the axis
        fontsize=10,
        annotation_clip=False,
    )


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


def _mark_training(axes: Axes, train_length: int) -> None:
    axes.axvline(train_length, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        f"trained at {format_length(train_length)}",
        (train_length, 0),
        xycoords=("data", "axes fraction"),
        xytext=(6, 8),
        textcoords="offset points",
        color=MUTED,
        fontsize=9,
        va="bottom",
    )


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


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=0.08, right=0.86, top=0.87, bottom=0.16)
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


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
