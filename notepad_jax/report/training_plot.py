"""Training curves: logged metrics by step, in small charts.

Input is what `telemetry.metrics.read_metrics` returns. Where a run has several kinds of task,
each is a line in charts of their own. A page shows the charts beside each other
(`pieces.charts`), and `render.picture` makes a file of them. Beside: `accuracy_plot`; below:
`chart`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from notepad_jax.report import chart
from notepad_jax.report.chart import OTHER, OURS, Axis, Chart, Line
from notepad_jax.report.labels import legend

WIDTH, HEIGHT = 280.0, 190.0  # of one chart, pixels; the next are its axes' place in it
LEFT, RIGHT, TOP, BOTTOM = 52.0, 268.0, 46.0, 164.0
LETTERS, ROW = 11.0, 14.0  # size of the names of lines, and from one row of them to the next
TONES = (OURS, OTHER, *chart.MORE)
MOST = 300  # points of a line; of more steps, each point stands for several
KINDS = 5  # lines whose names leave room for the axes
LABEL = 28  # letters of a kind of task's name
TASK, GROUPS = "task/", "/groups"  # around its name in the names of metrics
FEW = 20  # points that are few enough for a mark at each


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small chart: the metrics it draws, and their labels.

    `scale` is "share" (0 to 100%), "linear" (from 0) or "log".
    """

    title: str
    lines: Mapping[str, str]  # metric name -> label; metrics that were not logged are left out
    scale: str = "linear"


PANELS = (
    Panel("Reward", {"reward": "mean reward"}, "share"),
    Panel("Groups that carry signal", {"groups/informative_share": "informative"}, "share"),
    Panel("Entropy per token", {"entropy_update": "memory", "entropy_answer": "answer"}),
    Panel(
        "Share of tokens clipped",
        {"clip_share_update": "memory", "clip_share_answer": "answer"},
    ),
    Panel(
        "Sampler-trainer logprob gap",
        {"logprob_gap_mean": "mean", "logprob_gap_max": "largest"},
        "log",
    ),
    Panel("Memory written, tokens", {"rollout/memory_tokens": "memory"}),
    Panel(
        "What turns did",
        {
            "rollout/keep": "keep",
            "rollout/nothing": "nothing",
            "rollout/exit": "exit",
            "rollout/again": "again",
        },
    ),
    Panel(
        "Turns cut at their limit",
        {"rollout/truncated_memories": "memory", "rollout/truncated_answers": "answer"},
        "share",
    ),
    Panel("Seconds a step", {"rollout_seconds": "rollout", "update_seconds": "update"}),
    Panel("Model FLOPs utilization", {"update/mfu": "update"}),
)
BY_TASK = {  # what is drawn of each kind of task -> title
    "reward": "Reward, by kind of task",
    "informative_share": "Signal, by kind of task",
    "advantage_share": "Advantage, by kind of task",
}


def charts(metrics: Sequence[Mapping[str, float]], ahead: Sequence[Panel] = ()) -> list[Chart]:
    """Returns a chart of each panel, of `ahead`, PANELS and those of kinds of task (`by_task`).

    Those none of whose metrics was logged are left out.
    """
    drawn = [_chart(panel, metrics) for panel in (*ahead, *PANELS, *by_task(metrics))]
    return [one for one in drawn if one.lines]


def by_task(metrics: Sequence[Mapping[str, float]]) -> list[Panel]:
    """Returns panels with a line for each kind of task, of the most frequent ones; none for one."""
    groups: dict[str, float] = {}
    for line in metrics:
        for name, value in line.items():
            if name.startswith(TASK) and name.endswith(GROUPS):
                kind = name.removeprefix(TASK).removesuffix(GROUPS)
                groups[kind] = groups.get(kind, 0) + value
    if len(groups) < 2:
        return []
    largest = sorted(groups, key=lambda kind: (-groups[kind], kind))[:KINDS]
    labels = _labels(largest)
    some = f" ({KINDS} of {len(groups)})" if len(groups) > KINDS else ""
    return [
        Panel(f"{title}{some}", {f"{TASK}{kind}/{what}": labels[kind] for kind in largest}, "share")
        for what, title in BY_TASK.items()
    ]


def _labels(kinds: Sequence[str]) -> dict[str, str]:
    """Names that fit above a chart: without their common prefix, cut, and still distinct."""
    parts = [kind.split("/") for kind in kinds]
    same = 0
    while all(len(p) > same + 1 and p[same] == parts[0][same] for p in parts):
        same += 1
    whole = {kind: "/".join(p[same:]) for kind, p in zip(kinds, parts, strict=True)}
    cut = {k: w if len(w) <= LABEL else f"{w[: LABEL - 1]}…" for k, w in whole.items()}
    told: dict[str, str] = {}
    for rank, kind in enumerate(kinds, 1):
        alone = list(cut.values()).count(cut[kind]) == 1
        told[kind] = cut[kind] if alone else f"{rank}. {cut[kind]}"
    return told


def _chart(panel: Panel, metrics: Sequence[Mapping[str, float]]) -> Chart:
    found = {label: _points(name, metrics, panel.scale) for name, label in panel.lines.items()}
    found = {label: points for label, points in found.items() if points}
    lines = [_line(label, tone, points, panel.scale)
             for (label, points), tone in zip(found.items(), TONES, strict=False)]  # fmt: skip
    x = [x for line in lines for x in line.x] or [0.0]
    y = [y for line in lines for y in (*line.low, *line.high)]
    words, rows = legend(lines if len(lines) > 1 else (), RIGHT - LEFT, LETTERS, ROW)
    top = TOP + ROW * max(0, rows - 1)
    return Chart(
        title=panel.title,
        description=f"{panel.title} by step: {', '.join(found)}",
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        bottom=BOTTOM,
        axes_width=RIGHT - LEFT,
        axes_height=BOTTOM - top,
        across=chart.steps(min(x), max(x)),
        upwards=_upwards(panel.scale, y),
        lines=lines,
        words=[dataclasses.replace(w, middle=BOTTOM - top + w.middle) for w in words],
        heading="step {:,.0f}".format,
    )


def _points(
    name: str, metrics: Sequence[Mapping[str, float]], scale: str
) -> list[tuple[float, float]]:
    """Returns (step, value) wherever the metric is a number that the scale can show."""
    return [
        (line["step"], line[name])
        for line in metrics
        if math.isfinite(line.get(name, math.nan)) and (scale != "log" or line[name] > 0)
    ]


def _line(label: str, tone: str, points: Sequence[tuple[float, float]], scale: str) -> Line:
    """A line of at most MOST points: means of neighbours, between the least and the largest."""
    together = -(-len(points) // MOST)
    parts = [np.array(points[k : k + together]) for k in range(0, len(points), together)]
    y = [float(part[:, 1].mean()) for part in parts]
    spans = [(float(part[:, 1].min()), float(part[:, 1].max())) for part in parts]
    show = "{:.1%}".format if scale == "share" else "{:.4g}".format
    told = [
        show(mean) if together == 1 else f"{show(mean)} ({show(low)} to {show(high)})"
        for mean, (low, high) in zip(y, spans, strict=True)
    ]
    return Line(
        label=label,
        tone=tone,
        x=[float(part[-1, 0]) for part in parts],
        y=y,
        low=[low for low, _ in spans],
        high=[high for _, high in spans],
        told=told,
        mark="circle" if len(points) <= FEW else "",
    )


def _upwards(scale: str, values: Sequence[float]) -> Axis:
    if scale == "share":
        return chart.shares(max([1.0, *values]))
    if scale == "log" and values:
        return chart.powers(values)
    return chart.linear(values)
