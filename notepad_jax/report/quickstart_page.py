"""The report of the quick start, report.html: what was measured before and after training.

One calm, self-contained page. Everything on it comes in as the plain values of `QuickstartReport`;
this file lays them out as `templates/quickstart.html` shows them, and `write` also leaves
the two pictures as SVG files beside the page. The page of an evaluation is
`evaluation_page`. Above: the programs, which fill `QuickstartReport` in; below: `render`,
`accuracy_plot`, `training_plot` and `summary`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.eval.summary import Summary
from notepad_jax.report import accuracy_plot, examples, render, training_plot
from notepad_jax.report.examples import Example
from notepad_jax.report.origin import Origin, SettingsChange

REPORT, ACCURACY, TRAINING = "report.html", "accuracy.svg", "training.svg"
TEMPLATE = "quickstart.html"


@dataclasses.dataclass(frozen=True)
class QuickstartReport:
    """The content of the page. Empty sequences and mappings leave their part out."""

    title: str
    summary: str  # one or two sentences under the title
    origin: Origin
    starter: str  # what the starting policy is, plainly
    train_length: int  # tokens
    before: Sequence[Summary]
    after: Sequence[Summary]
    warnings: Sequence[str]  # what looked sick while it was trained, with the mend
    metrics: Sequence[Mapping[str, float]]  # of training, as `read_metrics` returns them
    examples: Sequence[Example]
    config: Mapping[str, Any]  # flat: {"reading.max_memory": 64}
    timings: Mapping[str, float]  # what was done -> seconds
    changes: Sequence[SettingsChange] = ()  # of the settings, in their order


def write(folder: str | Path, report: QuickstartReport) -> Path:
    """Writes report.html and its pictures into `folder`; returns the page's path."""
    folder = Path(folder)
    accuracy = accuracy_plot.before_and_after(report.before, report.after, report.train_length)
    training = training_plot.charts(report.metrics)
    render.picture(folder / ACCURACY, [accuracy.wide])
    if training:
        render.picture(folder / TRAINING, training)
    asked = examples.questions(report.examples)
    values = {
        "report": report,
        "accuracy": accuracy,
        "training": training,
        "rows": _rows(report.before, report.after),
        "labelled": [
            (when, s)
            for when, summaries in (("before", report.before), ("after", report.after))
            for s in sorted(summaries, key=lambda s: s.length)
        ],
        "outcomes": [
            examples.outcomes("before RL", report.before),
            examples.outcomes("after RL", report.after),
        ],
        "questions": asked,
        "filters": examples.filters(asked),
        "timings": _timings(report.timings),
    }
    return render.write(folder / REPORT, TEMPLATE, values)


@dataclasses.dataclass(frozen=True)
class BeforeAndAfter:
    """The accuracies at one length; None where nothing was measured."""

    length: int  # tokens
    before: Summary | None
    after: Summary | None


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long something took, and its share of the whole."""

    name: str
    seconds: float
    share: float


def _rows(before: Sequence[Summary], after: Sequence[Summary]) -> list[BeforeAndAfter]:
    old, new = {s.length: s for s in before}, {s.length: s for s in after}
    return [
        BeforeAndAfter(length, old.get(length), new.get(length)) for length in sorted(old | new)
    ]


def _timings(timings: Mapping[str, float]) -> list[Timing]:
    total = sum(timings.values()) or 1.0
    return [Timing(name, seconds, seconds / total) for name, seconds in timings.items()]
