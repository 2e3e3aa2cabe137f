"""The report of a training run, report.html: its curves, held-out scores, what to do next.

Everything on it comes in as the plain values of `TrainingReport`; this file lays them out as
`templates/training.html` shows them, and `write` leaves the picture beside the page. Above:
training.outcome; below: `render` and `training_plot`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.report import render, training_plot
from notepad_jax.report.origin import Origin, SettingsChange
from notepad_jax.report.training_plot import Panel

REPORT, TRAINING = "report.html", "training.svg"
TEMPLATE = "training.html"


@dataclasses.dataclass(frozen=True)
class ValidationPoint:
    """The scores of one validation."""

    step: int
    score: float  # share of all held-out questions
    by_length: tuple[float, ...]  # as `TrainingReport.lengths`
    best: bool  # of all steps


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """The content of the page. Empty sequences and mappings leave their part out."""

    title: str
    summary: str  # one or two sentences under the title
    origin: Origin
    warnings: Sequence[str]  # what looks sick, in words, with the mend
    metrics: Sequence[Mapping[str, float]]  # as `read_metrics` returns them; timings, too
    curves: Mapping[str, str]  # of held-out tasks: metric name -> label
    lengths: Sequence[str]  # of held-out documents: "2K"
    validations: Sequence[ValidationPoint]
    config: Mapping[str, Any]  # flat: {"reading.max_memory": 64}
    changes: Sequence[SettingsChange] = ()  # of the settings, in their order


def write(folder: str | Path, report: TrainingReport) -> Path:
    """Writes report.html and its picture into `folder`; returns the page's path."""
    held_out = [Panel("Held-out tasks", report.curves, "share")] if report.curves else []
    charts = training_plot.charts(report.metrics, held_out)
    if charts:
        render.picture(Path(folder) / TRAINING, charts)
    return render.write(Path(folder) / REPORT, TEMPLATE, {"report": report, "charts": charts})
