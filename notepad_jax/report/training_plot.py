"""The picture of the course of training: the logged metrics by step, in small charts.

Input is what `telemetry.metrics.read_metrics` returns; the quick start's page embeds the
file. Beside: `accuracy_plot`; below: `canvas`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from notepad_jax.report import canvas
from notepad_jax.report.canvas import AFTER, BEFORE, INK, MUTED


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
    Panel("Groups that carry signal", {"groups/informative_share": "informative"}, "share"),
    Panel("Entropy per token", {"entropy_update": "memory", "entropy_answer": "answer"}),
    Panel("Share of tokens clipped", {"clip_share": "clipped"}),
    Panel(
        "Sampler-trainer logprob gap",
        {"logprob_gap_mean": "mean", "logprob_gap_max": "largest"},
        "log",
    ),
    Panel("Memory written, tokens", {"rollout/memory_tokens": "memory"}),
)


def draw(
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
        canvas.bare(axes)
        _panel(axes, panel, metrics)
    for axes in grid[-1]:
        axes.set_xlabel("step", color=MUTED, fontsize=9)
    return canvas.save(figure, path)


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
