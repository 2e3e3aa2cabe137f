"""What the runs of `ablation` say: a table, and curves with bands, put into docs/results.md.

A page has a place for them, between two marks; what is written around it stays. Values are means
over seeds, and the bands run from the least to the largest seed. Above: ablation; below:
report.chart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import marks
from notepad_jax.eval.lengths import format_length
from notepad_jax.report import chart, render
from notepad_jax.report.chart import OTHER, OURS, Axis, Chart, Line
from notepad_jax.report.labels import legend

MARK = "ablation"
PICTURE = "images/ablation.svg"  # beside the page
KINDS = ("exact", "list", "count", "order")  # columns, as far as there are such questions
TONES = (OURS, OTHER, *chart.MORE)

WIDTH, HEIGHT = 330.0, 300.0  # of one chart, pixels; the next are its axes' place in it
LEFT, RIGHT, BOTTOM, TOP = 46.0, 314.0, 270.0, 40.0
LETTERS, ROW = 12.0, 16.0  # size of the names of lines, and from one row of them to the next

Result = Mapping[str, Any]


def by_variant(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Returns the results of each variant, in the order in which these appear first."""
    found: dict[str, list[Result]] = {}
    for one in results:
        found.setdefault(one["variant"], []).append(one)
    return found


def area(curve: Sequence[tuple[float, float]]) -> float:
    """Returns the mean height of a curve of (step, score), straight between its points."""
    steps, scores = np.asarray(curve, float).T
    if len(steps) < 2:
        return float(scores[0])
    return float(np.trapezoid(scores, steps) / (steps[-1] - steps[0]))


# ---------------------------------------------------------------- table


def table(results: Sequence[Result]) -> str:
    """Returns the results as markdown, a row a variant; scores in per cent."""
    heads = ["algorithm", "rate", "seeds", "CPU s", "mean over training"]
    heads += [f"{format_length(length)}, at the end" for length in lengths_of(results)]
    rows = [
        [
            f"`{name}`",
            _rate(own[0]["rate"]),
            str(len(own)),
            _seconds([one["training_cpu_seconds"] for one in own]),
            _span([area(one["curve"]) for one in own]),
            *(_span([one["final"][str(n)]["all"] for one in own]) for n in lengths_of(results)),
        ]
        for name, own in by_variant(results).items()
    ]
    return _markdown(heads, rows)


def table_of_kinds(results: Sequence[Result]) -> str:
    """Returns means at the end by kind of question, as `table`."""
    asked = {kind for one in results for of in one["final"].values() for kind in of}
    columns = [(n, kind) for n in lengths_of(results) for kind in KINDS if kind in asked]
    heads = ["algorithm", *(f"{kind}, {format_length(n)}" for n, kind in columns)]
    rows = [
        [
            f"`{name}`",
            *(
                f"{100 * np.mean([one['final'][str(n)].get(kind, np.nan) for one in own]):.1f}"
                for n, kind in columns
            ),
        ]
        for name, own in by_variant(results).items()
    ]
    return _markdown(heads, rows)


def table_of_rates(trials: Sequence[Result]) -> str:
    """Returns the mean over training and the score at the end at each rate, of the trials' seed."""
    rates = sorted({one["rate"] for one in trials})
    longest = str(lengths_of(trials)[-1])
    rows = []
    for name, own in by_variant(trials).items():
        of = {one["rate"]: one for one in own}
        cells = [
            f"{100 * area(of[rate]['curve']):.1f}, {100 * of[rate]['final'][longest]['all']:.1f}"
            if rate in of
            else "-"
            for rate in rates
        ]
        rows.append([f"`{name}`", *cells])
    return _markdown(["algorithm", *map(_rate, rates)], rows)


def _rate(rate: float) -> str:
    return f"x {rate:g}"


def lengths_of(results: Sequence[Result]) -> list[int]:
    """Returns the lengths that were read at the end, in tokens, ascending."""
    return sorted({int(length) for one in results for length in one["final"]})


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _seconds(values: Sequence[float | None]) -> str:
    """The mean of those that are known: not of runs that were stopped and went on."""
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.0f}" if known else "-"


def _span(values: Sequence[float]) -> str:
    low, mean, high = (100 * f(values) for f in (np.min, np.mean, np.max))
    return f"{mean:.1f} ({low:.1f}-{high:.1f})"


# ---------------------------------------------------------------- curves


def charts(results: Sequence[Result], panels: Mapping[str, Sequence[str]]) -> list[Chart]:
    """Returns a chart of each panel {title: variants}; those that were not run are left out."""
    runs = by_variant(results)
    found = []
    for title, names in panels.items():
        lines = [
            _line(name, tone, runs[name]) for name, tone in zip(names, TONES, strict=False)
            if name in runs
        ]  # fmt: skip
        if lines:
            found.append(_chart(title, lines))
    return found


def _line(name: str, tone: str, runs: Sequence[Result]) -> Line:
    """The mean of all seeds, and a band around them, at the steps that all of them have."""
    curves = [dict(map(tuple, one["curve"])) for one in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    scores = np.array([[100 * curve[step] for step in steps] for curve in curves])
    mean, low, high = scores.mean(0), scores.min(0), scores.max(0)
    told = [f"{m:.1f}% ({a:.1f} to {b:.1f})" for m, a, b in zip(mean, low, high, strict=True)]
    x = [float(step) for step in steps]
    return Line(name, tone, x, mean.tolist(), low.tolist(), high.tolist(), told, mark="circle")


def _chart(title: str, lines: Sequence[Line]) -> Chart:
    words, rows = legend(lines, RIGHT - LEFT, LETTERS, ROW)
    top = TOP + ROW * rows
    x = [at for line in lines for at in line.x]
    y = [at for line in lines for at in (*line.low, *line.high)]
    return Chart(
        title=title,
        description=f"{title}: held-out score by step of {', '.join(line.label for line in lines)}",
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        bottom=BOTTOM,
        axes_width=RIGHT - LEFT,
        axes_height=BOTTOM - top,
        across=dataclasses.replace(chart.steps(min(x), max(x)), title="step"),
        upwards=_upwards(y),
        lines=lines,
        words=[dataclasses.replace(w, middle=BOTTOM - top + w.middle) for w in words],
        heading="step {:,.0f}".format,
    )


def _upwards(values: Sequence[float]) -> Axis:
    """Per cent, in tens, around all values."""
    low, high = 10 * np.floor(min(values) / 10), 10 * np.ceil(max(values) / 10)
    high = max(high, low + 10)
    ticks = np.arange(low, high + 1, 10 if high - low <= 50 else 20)
    return Axis(float(low), float(high), [(float(at), f"{at:.0f}%") for at in ticks])


# ---------------------------------------------------------------- the page


def put(
    page: Path,
    results: Sequence[Result],
    trials: Sequence[Result],
    panels: Mapping[str, Sequence[str]],
) -> None:
    """Writes curves beside `page`, and tables and picture between its marks.

    Raises ValueError for a page without them.
    """
    picture = f"![Held-out score by step of each algorithm]({PICTURE})"
    marks.put(page, MARK, f"{picture}\n\n{text(results, trials)}")
    render.picture(page.parent / PICTURE, charts(results, panels), columns=2)


def text(results: Sequence[Result], trials: Sequence[Result]) -> str:
    """Returns what was measured as markdown: the tables, and the trials of rates."""
    steps = sorted({int(one["curve"][-1][0]) for one in results})
    longest = format_length(lengths_of(trials)[-1])
    return (
        f"After {', '.join(map(str, steps))} steps, per cent; in brackets the least and the "
        f"largest seed. The starter: {_span([one['curve'][0][1] for one in results])}.\n\n"
        f"{table(results)}\n\nThe same by kind of question, means over seeds:\n\n"
        f"{table_of_kinds(results)}\n\nHow the rates were chosen, from a seed of its own: mean "
        f"over training, and the score at {longest} at the end.\n\n{table_of_rates(trials)}"
    )
