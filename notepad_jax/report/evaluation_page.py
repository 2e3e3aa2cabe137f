"""The report of an evaluation, HTML and JSON: accuracy of each method by length.

The page is what `quickstart_page` is for the quick start: the curve over the published
figures, then tables of accuracy, of what is lost against the training length, of every
task, of where answers were lost and what they cost, and some readings to look at. This
file lays summaries out as `templates/evaluation.html` shows them. The JSON says the same
for programs, without wall-clock times, so that a measurement that was interrupted and went
on writes the same bytes. Above: the programs; below: `render`, `accuracy_plot`, `summary`,
`degradation`, `published`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.eval import degradation, published, summary
from notepad_jax.eval.degradation import Degradation
from notepad_jax.eval.methods import NOTEPAD
from notepad_jax.eval.summary import Summary
from notepad_jax.report import accuracy_plot, examples, render
from notepad_jax.report.accuracy_plot import CurvePicture
from notepad_jax.report.examples import Example
from notepad_jax.report.origin import Origin
from notepad_jax.scoring import recall
from notepad_jax.types import Action

REPORT, ACCURACY, COMPARED = "report.html", "accuracy.svg", "compared.svg"
TEMPLATE = "evaluation.html"
EFFECTIVE = "nolima"  # the suite whose published figures are effective lengths
WALL_CLOCK = ("seconds", "began")  # fields that differ from run to run


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The content of the page. Empty sequences and mappings leave their part out."""

    title: str
    summary: str  # one or two sentences under the title
    origin: Origin
    suite: str  # such as "ruler-qa"
    policy: str  # the name of the reader
    train_length: int | None  # tokens; None if it is not known
    by_length: Sequence[Summary]
    by_task: Sequence[Summary]
    examples: Sequence[Example]
    settings: Mapping[str, Any]  # flat: {"reading.max_memory": 1024}
    published: bool  # whether to show the published figures, where there are some of this suite

    @property
    def figures(self) -> tuple[published.PublishedCurve, ...]:
        return published.of_suite(self.suite) if self.published else ()


def write(folder: str | Path, report: EvaluationReport) -> Path:
    """Writes report.html and its pictures into `folder`; returns the path of the page.

    accuracy.svg is by the tasks' own metrics; compared.svg, where figures were published for
    the suite, by theirs, with the figures behind. ValueError if nothing was measured.
    """
    folder = Path(folder)
    picture = accuracy_plot.by_method(report.by_length, report.train_length)
    render.picture(folder / ACCURACY, [picture.wide])
    measured, compared = summary.measured_by(published.METRIC, report.by_length), None
    if report.figures and measured:
        compared = accuracy_plot.by_method(measured, report.train_length, published.FIGURES)
        render.picture(folder / COMPARED, [compared.wide])
    return render.write(folder / REPORT, TEMPLATE, _values(report, picture, compared))


def report_json(report: EvaluationReport) -> dict[str, Any]:
    """Returns the report as dicts, lists and scalars: all of it but wall-clock times.

    The order of summaries does not depend on the order in which readings ended.
    """
    losses = _losses(report)
    return {
        "title": report.title,
        "summary": report.summary,
        "suite": report.suite,
        "policy": report.policy,
        "train_length": report.train_length,
        "by_length": [_plain(s) for s in _sorted(report.by_length)],
        "by_task": [_plain(s) for s in _sorted(report.by_task)],
        "degradation": [_plain(loss) for loss in losses],
        "effective_length": _effective(report),
        "examples": [_plain(example) for example in report.examples],
        "settings": _plain(report.settings),
        "published": [
            {
                "model": figures.model,
                "source": published.SOURCE,
                "metric": published.METRIC,
                "accuracy": [{"length": x, "mean": y} for x, y in figures.points],
            }
            for figures in report.figures
        ],
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if f.name not in WALL_CLOCK]
        return {name: _plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# ---------------------------------------------------------------- the page


@dataclasses.dataclass(frozen=True)
class MethodsAtLength:
    """The results of each method at one length; None where nothing was measured."""

    length: int  # tokens
    cells: Sequence[Summary | Degradation | None]  # as many as methods


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """A heat map: one method's accuracy on every task, at every length."""

    method: str
    lengths: Sequence[int]
    rows: Sequence[HeatRow]


@dataclasses.dataclass(frozen=True)
class HeatRow:
    """A row of a heat map, of one task; None where nothing was measured."""

    source: str
    cells: Sequence[Summary | None]


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """A model's published accuracies; None where none is published."""

    model: str
    shares: Sequence[float | None]


def _values(
    report: EvaluationReport, picture: CurvePicture, compared: CurvePicture | None
) -> dict[str, Any]:
    """Returns what the template shows."""
    methods, summaries = _methods(report.by_length), _sorted(report.by_length)
    losses = _losses(report)
    lengths = sorted({length for model in report.figures for length, _ in model.points})
    asked = examples.questions(report.examples)
    return {
        "report": report,
        "accuracy": picture,
        "compared": compared,
        "compared_rows": _rows(methods, summary.measured_by(published.METRIC, summaries)),
        "methods": methods,
        "accuracies": _rows(methods, summaries),
        "labelled": [(s.method, s) for s in summaries],
        "effective": _effective(report),
        "kept": degradation.KEPT,
        "outcomes": [
            examples.outcomes(method, [s for s in summaries if s.method == method])
            for method in methods
        ],
        "losses": _rows(methods, losses),
        "stand_ins": sorted({d.reference for d in losses} - {report.train_length}),
        "heat_maps": [_heat_map(m, report.by_task) for m in _methods(report.by_task)],
        "with_evidence": [s for s in summaries if s.recall is not None or s.lost],
        "with_actions": [s for s in summaries if set(s.actions) - {Action.WRITE.value}],
        "actions": list(Action),
        "fates": recall.FATES,
        "evidence": accuracy_plot.capture_and_retention(
            [s for s in summaries if s.method == NOTEPAD], report.train_length
        ),
        "source": published.SOURCE,
        "metric": published.METRIC,
        "published_lengths": lengths,
        "published_rows": [
            PublishedRow(figures.model, [dict(figures.points).get(x) for x in lengths])
            for figures in report.figures
        ],
        "questions": asked,
        "filters": examples.filters(asked),
    }


def _rows(
    methods: Sequence[str], found: Sequence[Summary] | Sequence[Degradation]
) -> list[MethodsAtLength]:
    """Returns a row per length that was found, ascending, with a cell per method."""
    there = {(one.length, one.method): one for one in found}
    return [
        MethodsAtLength(length, [there.get((length, method)) for method in methods])
        for length in sorted({one.length for one in found})
    ]


def _heat_map(method: str, summaries: Sequence[Summary]) -> HeatMap:
    found = {(s.source, s.length): s for s in summaries if s.method == method}
    lengths = sorted({length for _, length in found})
    rows = [
        HeatRow(source, [found.get((source, length)) for length in lengths])
        for source in sorted({source for source, _ in found})
    ]
    return HeatMap(method, lengths, rows)


def _methods(summaries: Sequence[Summary]) -> list[str]:
    """Returns the methods that were measured, in the order of the picture."""
    there = {s.method for s in summaries}
    return [m for m in accuracy_plot.STYLES if m in there] + sorted(
        there - set(accuracy_plot.STYLES)
    )


def _sorted(summaries: Sequence[Summary]) -> list[Summary]:
    order = _methods(summaries)
    return sorted(summaries, key=lambda s: (order.index(s.method), s.source, s.length))


def _effective(report: EvaluationReport) -> dict[str, int | None]:
    """Returns each method's effective length, which is how NoLiMa is reported; else nothing."""
    if report.suite != EFFECTIVE:
        return {}
    return {
        method: degradation.effective_length([s for s in report.by_length if s.method == method])
        for method in _methods(report.by_length)
    }


def _losses(report: EvaluationReport) -> list[Degradation]:
    if report.train_length is None:
        return []
    return degradation.by_length(_sorted(report.by_length), report.train_length)
