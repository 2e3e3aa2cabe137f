"""The page of an evaluation, and its JSON: how well each method reads, by length.

The page is what `quickstart_page` is for the quick start, made of the same pieces (`page`): the
curve over the published figures, then tables of accuracy, of what is lost against the
training length, of every task, of where answers were lost and what they cost, and some
readings to look at. The JSON says the same for programs, without wall-clock times, so that
a measurement that was interrupted and went on writes the same bytes. Above: the programs;
below: `summary`, `degradation`, `published`, `accuracy_plot`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.eval import degradation, published, recall
from notepad_jax.eval.degradation import Degradation, Loss
from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.summary import Summary
from notepad_jax.report import accuracy_plot, page
from notepad_jax.report.page import Example, escape

REPORT, ACCURACY = "report.html", "accuracy.png"
WALL_CLOCK = ("seconds", "began")  # fields that differ from run to run

LIGHT, DARK = (246, 248, 251), (146, 183, 222)  # of the heat map; black ink reads on both


@dataclasses.dataclass(frozen=True)
class Report:
    """What the page says. Empty sequences and mappings leave their part out."""

    title: str
    summary: str  # one or two sentences under the title
    suite: str  # such as "ruler-qa"
    policy: str  # who read, by name
    train_length: int | None  # tokens; None if it is not known
    by_length: Sequence[Summary]
    by_task: Sequence[Summary]
    examples: Sequence[Example]
    settings: Mapping[str, Any]  # flat: {"reading.max_memory": 1024}
    published: bool  # whether to show the published figures, where there are some of this suite

    @property
    def figures(self) -> tuple[published.Published, ...]:
        return published.of_suite(self.suite) if self.published else ()


def write(folder: str | Path, report: Report) -> Path:
    """Writes report.html and accuracy.png into `folder`; returns the path of the page.

    ValueError if nothing was measured.
    """
    folder = Path(folder)
    picture = accuracy_plot.by_method(
        folder / ACCURACY, report.by_length, report.train_length, report.figures
    )
    return page.write(folder / REPORT, report.title, _parts(report, picture))


def report_json(report: Report) -> dict[str, Any]:
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


def _parts(report: Report, picture: Path) -> list[str]:
    methods = _methods(report.by_length)
    parts = [
        page.head(report.title, report.summary),
        page.picture(picture, f"Accuracy by document length of {', '.join(methods)}"),
        _caption(report),
        page.section("Accuracy by length", _accuracies(report.by_length) + _failures(report)),
    ]
    parts.append(page.section("Against the training length", _degradation(report)))
    if report.by_task:
        parts.append(page.section("By task", _tasks(report.by_task)))
    if any(s.recall is not None or s.lost for s in report.by_length):
        parts.append(page.section("Where answers were lost", _lost(report.by_length)))
    parts.append(page.section("What it cost", _costs(report.by_length)))
    if report.figures:
        parts.append(page.section("Published figures", _published(report.figures)))
    if report.examples:
        parts.append(page.section("How it read", "".join(map(page.reading, report.examples))))
    if report.settings:
        parts.append(page.section("Settings", page.settings(report.settings)))
    return parts


def _caption(report: Report) -> str:
    trained = report.train_length
    return page.note(
        f"{report.policy} on the suite {report.suite}."
        + (f" Trained on documents of {trained:,} tokens." if trained is not None else ""),
        "Accuracy is by each task's own metric; shaded are 95% intervals (Wilson) over "
        "questions, which are taken as independent.",
        f"Grey: {published.SOURCE}." if report.figures else "",
    )


def _methods(summaries: Sequence[Summary]) -> list[str]:
    """Returns the methods that were measured, in the order of the picture."""
    there = {s.method for s in summaries}
    return [m for m in accuracy_plot.STYLES if m in there] + sorted(
        there - set(accuracy_plot.STYLES)
    )


def _sorted(summaries: Sequence[Summary]) -> list[Summary]:
    order = _methods(summaries)
    return sorted(summaries, key=lambda s: (order.index(s.method), s.source, s.length))


def _by_length_and_method(
    methods: Sequence[str],
    found: Mapping[tuple[int, str], Any],
    cell: Callable[[Any], str],
) -> str:
    """Returns a table with a row per length and a column per method."""
    rows = [
        [
            page.length(length),
            *(
                cell(found[length, method]) if (length, method) in found else page.NOT_MEASURED
                for method in methods
            ),
        ]
        for length in sorted({length for length, _ in found})
    ]
    return page.table(["Document", *methods], rows)


def _accuracies(summaries: Sequence[Summary]) -> str:
    found = {(s.length, s.method): s for s in summaries}
    table = _by_length_and_method(
        _methods(summaries),
        found,
        lambda s: (
            f"{page.percent(s.accuracy.mean)} "
            f"<small>{page.interval(s.accuracy)}</small><small>{_counts(s)}</small>"
        ),
    )
    return table + page.every_metric((s.method, s) for s in _sorted(summaries))


def _counts(summary: Summary) -> str:
    """Says how many questions stand behind a number, and how often each was read."""
    if summary.questions == summary.n:
        return f"n = {summary.n:,}"
    repeats, rest = divmod(summary.n, summary.questions)
    if rest:
        return f"n = {summary.questions:,}, read {summary.n:,} times in all"
    return f"n = {summary.questions:,}, read {repeats} times each"


def _failures(report: Report) -> str:
    """Says what was counted as wrong without an answer, and which answers were cut."""
    told = []
    for method in _methods(report.by_length):
        there = [s for s in report.by_length if s.method == method]
        readings = page.counted(sum(s.n for s in there), "reading", "readings")
        failed, truncated = sum(s.unanswered for s in there), sum(s.truncated for s in there)
        parts = [
            f"{failed:,} without an answer (failed, or the document did not fit), counted as wrong"
            if failed
            else "",
            f"{truncated:,} with an answer cut at its limit, scored as it is" if truncated else "",
        ]
        if failed or truncated:
            told.append(f"{method}, {readings}: {'; '.join(filter(None, parts))}.")
    return page.note(*told or ["Every reading gave an answer, and none was cut at its limit."])


# ---------------------------------------------------------------- losses


def _losses(report: Report) -> list[Degradation]:
    if report.train_length is None:
        return []
    return degradation.by_length(_sorted(report.by_length), report.train_length)


def _degradation(report: Report) -> str:
    if report.train_length is None:
        return page.note(
            "The length that the policy was trained on is not known; say it with --train-length, "
            "and --resume writes this page again."
        )
    losses = _losses(report)
    trained = format_length(report.train_length)
    if not losses:
        return page.note(
            f"Nothing was measured at or below the training length of {trained}, so there is "
            "nothing to compare the longer documents with."
        )
    table = _by_length_and_method(
        _methods(report.by_length), {(d.length, d.method): d for d in losses}, _loss
    )
    stand_ins = sorted({d.reference for d in losses} - {report.train_length})
    instead = " and ".join(format_length(length) for length in stand_ins)
    return table + page.note(
        f"The training length of {trained} itself was not measured by every method; the longest "
        f"length below it ({instead}) stands in."
        if stand_ins
        else "",
        "Points are the difference to the accuracy at the training length, with the 95% hybrid "
        "score interval for independent questions (Newcombe 1998); relative is that loss as a "
        "share of it. An interval that holds 0 is compatible with no loss.",
    )


def _loss(loss: Degradation) -> str:
    if loss.length == loss.reference:
        return "<td class=dim>reference</td>"
    points = f"{_change(loss.absolute.mean)} points <small>{_range(loss.absolute)}</small>"
    if loss.relative is None:
        return points
    relative = f"relative {_change(loss.relative.mean)}%"
    return f"{points}<small>{relative}</small><small>{_range(loss.relative)}</small>"


def _range(loss: Loss) -> str:
    return f"{_change(loss.high)} to {_change(loss.low)}"  # the largest loss is the lowest end


def _change(loss: float) -> str:
    """Returns how an accuracy changed: a loss of 0.047 is "-4.7", with a true minus sign."""
    text = f"{-100 * loss:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


# ---------------------------------------------------------------- tasks


def _tasks(summaries: Sequence[Summary]) -> str:
    """Returns one heat map per method: a row per task, a column per length."""
    methods = _methods(summaries)
    return "".join(
        f"<h3>{escape(method)}</h3>{_heat_map([s for s in summaries if s.method == method])}"
        for method in methods
    ) + page.note("Per cent, darker is higher; on a screen, the pointer shows the interval.")


def _heat_map(summaries: Sequence[Summary]) -> str:
    lengths = sorted({s.length for s in summaries})
    found = {(s.source, s.length): s for s in summaries}
    rows = [
        [escape(source), *(_heat(found.get((source, length))) for length in lengths)]
        for source in sorted({s.source for s in summaries})
    ]
    return page.heat_map(["Task", *map(format_length, lengths)], rows)


def _heat(summary: Summary | None) -> str:
    if summary is None:
        return "<td class=dim>-</td>"
    share = summary.accuracy
    red, green, blue = (
        round(light + share.mean * (dark - light)) for light, dark in zip(LIGHT, DARK, strict=True)
    )
    told = f"{page.interval(share)}, {_counts(summary)}"
    return (
        f'<td style="background:#{red:02x}{green:02x}{blue:02x}" title="{escape(told)}">'
        f"{100 * share.mean:.0f}</td>"
    )


# ---------------------------------------------------------------- where and how much


def _lost(summaries: Sequence[Summary]) -> str:
    """Returns what became of the evidence, where it is known, of readings that were wrong."""
    known = [s for s in _sorted(summaries) if s.recall is not None or s.lost]
    rows = [
        [
            f"{escape(s.method)} <small>{format_length(s.length)}</small>",
            f"{page.percent(s.recall.mean)} <small>{page.interval(s.recall)}</small>"
            if s.recall is not None
            else "<td class=dim>not known</td>",
            *(f"{s.lost.get(fate, 0):,}" for fate in recall.FATES),
        ]
        for s in known
    ]
    names = [fate.capitalize() for fate in recall.FATES]
    return page.table(["", "Evidence in the last memory", *names], rows) + page.note(
        "Wrong readings by what became of the facts that the answer rests on: some fact was in "
        "no memory; all were, and the last memory lacked one; the last memory had all of them, "
        "and the answer was wrong all the same."
    )


def _costs(summaries: Sequence[Summary]) -> str:
    table = _by_length_and_method(
        _methods(summaries),
        {(s.length, s.method): s for s in summaries},
        lambda s: (
            f"{page.duration(s.seconds)} <small>{page.counted(s.turns, 'turn', 'turns')}</small>"
            f"<small>{s.tokens:,} tokens</small>"
        ),
    )
    return table + page.note(
        "Over all readings: wall time while at least one of them was under way, turns, and "
        "document tokens shown to the policy. Readings run beside each other, so times of "
        "methods and lengths that ran together overlap."
    )


def _published(figures: Sequence[published.Published]) -> str:
    lengths = sorted({length for model in figures for length, _ in model.points})
    rows = [
        [escape(model.model), *(_published_cell(model, length) for length in lengths)]
        for model in figures
    ]
    return page.heat_map(["Model", *map(format_length, lengths)], rows) + page.note(
        f"Per cent. {published.SOURCE}. That metric is kinder than the ones used here: compare "
        f"{published.METRIC} with it, and nothing else."
    )


def _published_cell(model: published.Published, length: int) -> str:
    share = dict(model.points).get(length)
    return "" if share is None else f"{100 * share:.1f}"
