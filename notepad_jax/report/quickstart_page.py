"""report.html of the quick start: what was measured, before and after learning.

One calm, self-contained page, made of the pieces in `page`; everything on it comes in as
the plain values of `Report`. `write` also leaves the two pictures as PNG files beside it.
The page of an evaluation is `evaluation_page`. Above: the programs, which fill `Report` in;
below: `page`, `accuracy_plot`, `training_plot` and `summary`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.eval.summary import Summary
from notepad_jax.report import accuracy_plot, page, training_plot
from notepad_jax.report.page import Example, duration, escape

REPORT, ACCURACY, TRAINING = "report.html", "accuracy.png", "training.png"


@dataclasses.dataclass(frozen=True)
class Report:
    """What the page says. Empty sequences and mappings leave their part out."""

    title: str
    summary: str  # one or two sentences under the title
    starter: str  # what the starting policy is, plainly
    train_length: int  # tokens
    before: Sequence[Summary]
    after: Sequence[Summary]
    metrics: Sequence[Mapping[str, float]]  # of training, as `read_metrics` returns them
    examples: Sequence[Example]
    config: Mapping[str, Any]  # flat: {"reading.max_memory": 64}
    timings: Mapping[str, float]  # what was done -> seconds


def write(folder: str | Path, report: Report) -> Path:
    """Writes report.html and its PNG files into `folder`; returns the page's path."""
    folder = Path(folder)
    accuracy = accuracy_plot.before_and_after(
        folder / ACCURACY, report.before, report.after, report.train_length
    )
    training = training_plot.draw(folder / TRAINING, report.metrics) if report.metrics else None
    return page.write(folder / REPORT, report.title, _parts(report, accuracy, training))


def _parts(report: Report, accuracy: Path, training: Path | None) -> list[str]:
    parts = [
        page.head(report.title, report.summary),
        page.picture(accuracy, "Accuracy by document length, before and after RL"),
        page.note(
            "Shaded: 95% intervals (Wilson), readings taken as independent. "
            f"Trained on documents of {report.train_length:,} tokens.",
        ),
        page.section("Before and after", _comparison(report)),
        page.section("What the starting policy is", f"<p>{escape(report.starter)}</p>"),
    ]
    if training is not None:
        picture = page.picture(training, "Training metrics by step")
        parts.append(page.section("Training", picture))
    if report.examples:
        parts.append(page.section("How it read", "".join(map(page.reading, report.examples))))
    if report.timings:
        parts.append(page.section("Where the time went", _timings(report.timings)))
    if report.config:
        parts.append(page.section("Configuration", page.settings(report.config)))
    return parts


def _comparison(report: Report) -> str:
    before = {s.length: s for s in report.before}
    after = {s.length: s for s in report.after}
    rows = [
        [
            page.length(length),
            _accuracy(before.get(length)),
            _accuracy(after.get(length), strong=True),
            _cost(after.get(length) or before[length]),
        ]
        for length in sorted(before | after)
    ]
    table = page.table(["Document", "Before RL", "After RL", "Cost"], rows)
    labelled = [
        (name, s)
        for name, summaries in (("before", report.before), ("after", report.after))
        for s in sorted(summaries, key=lambda s: s.length)
    ]
    return table + _failures(report) + page.every_metric(labelled)


def _accuracy(summary: Summary | None, strong: bool = False) -> str:
    if summary is None:
        return page.NOT_MEASURED
    value = page.percent(summary.accuracy.mean)
    value = f"<b>{value}</b>" if strong else value
    return f"{value} <small>{page.interval(summary.accuracy)}, n = {summary.n}</small>"


def _cost(summary: Summary) -> str:
    return f"{duration(summary.seconds)} <small>{summary.turns:,} turns</small>"


def _failures(report: Report) -> str:
    """Says what was counted as wrong for another reason than a wrong answer."""
    told = []
    for name, summaries in (("before", report.before), ("after", report.after)):
        failed, truncated = (
            sum(s.unanswered for s in summaries),
            sum(s.truncated for s in summaries),
        )
        if failed:
            told.append(f"{failed} readings {name} RL failed and count as wrong")
        if truncated:
            told.append(f"{truncated} answers {name} RL were cut at their limit")
    return page.note(f"{'; '.join(told)}." if told else "")


def _timings(timings: Mapping[str, float]) -> str:
    total = sum(timings.values()) or 1.0
    rows = [
        f"<tr><td>{escape(name)}</td><td class=number>{duration(seconds)}</td>"
        f"<td class=bar><i style='width:{100 * seconds / total:.1f}%'></i></td></tr>"
        for name, seconds in timings.items()
    ]
    return f"<table class=times>{''.join(rows)}</table>"
