"""report.html: one calm page that says what was measured, before and after learning.

The page is self-contained (pictures as base64, no script, nothing fetched), so it can be
mailed. Everything on it comes in as the plain values of `Report`; text written by a policy
or found in a document is escaped. `write` also leaves the two pictures as PNG files beside
it. Above: the programs, which fill `Report` in; below: `lengths` and `plots`.
"""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from notepad_jax.eval import plots
from notepad_jax.eval.lengths import (
    LengthSummary,
    MemoryChange,
    Result,
    Share,
    format_length,
)

REPORT, ACCURACY, TRAINING = "report.html", "accuracy.png", "training.png"
FIRST_CHANGES, LAST_CHANGES = 8, 4  # memory changes of an example that are shown


@dataclasses.dataclass(frozen=True)
class Example:
    """One reading to look at, and who read."""

    label: str  # such as "before RL" or "after RL"
    result: Result


@dataclasses.dataclass(frozen=True)
class Report:
    """What the page says. Empty sequences and mappings leave their part out."""

    title: str
    summary: str  # one or two sentences under the title
    starter: str  # what the starting policy is, plainly
    train_length: int  # tokens
    before: Sequence[LengthSummary]
    after: Sequence[LengthSummary]
    metrics: Sequence[Mapping[str, float]]  # of training, as `read_metrics` returns them
    examples: Sequence[Example]
    config: Mapping[str, Any]  # may be nested
    timings: Mapping[str, float]  # what was done -> seconds


def write(folder: str | Path, report: Report) -> Path:
    """Writes report.html and its PNG files into `folder`; returns the page's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    accuracy = plots.accuracy_by_length(
        folder / ACCURACY, report.before, report.after, report.train_length
    )
    training = plots.training(folder / TRAINING, report.metrics) if report.metrics else None
    temporary = folder / (REPORT + ".tmp")
    temporary.write_text(page(report, accuracy, training), encoding="utf-8")
    os.replace(temporary, folder / REPORT)
    return folder / REPORT


def page(report: Report, accuracy: Path, training: Path | None) -> str:
    """Returns the page as one string of HTML."""
    parts = [
        f"<h1>{escape(report.title)}</h1><p class=lead>{escape(report.summary)}</p>",
        _picture(accuracy, "Accuracy by document length, before and after RL"),
        "<p class=note>Shaded: 95% intervals (Wilson), readings taken as independent. "
        f"Trained on documents of {report.train_length:,} tokens.</p>",
        _section("Before and after", _comparison(report)),
        _section("What the starting policy is", f"<p>{escape(report.starter)}</p>"),
    ]
    if training is not None:
        parts.append(_section("Training", _picture(training, "Training metrics by step")))
    if report.examples:
        readings = "".join(_example(example) for example in report.examples)
        parts.append(_section("How it read", readings))
    if report.timings:
        parts.append(_section("Where the time went", _timings(report.timings)))
    if report.config:
        parts.append(_section("Configuration", _config(report.config)))
    return _PAGE.format(title=escape(report.title), style=_STYLE, body="\n".join(parts))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _picture(path: Path, text: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{data}">'


# ---------------------------------------------------------------- tables


def _comparison(report: Report) -> str:
    before = {s.length: s for s in report.before}
    after = {s.length: s for s in report.after}
    rows = [
        f"<tr><td>{_length(length)}</td>"
        f"{_accuracy(before.get(length))}{_accuracy(after.get(length), strong=True)}"
        f"<td>{_cost(after.get(length) or before[length])}</td></tr>"
        for length in sorted(before | after)
    ]
    head = "<tr><th>Document</th><th>Before RL</th><th>After RL</th><th>Cost</th></tr>"
    table = f"<table class=wide>{head}{''.join(rows)}</table>"
    return table + _failures(report) + _other_metrics(report)


def _length(length: int) -> str:
    return f"{format_length(length)} <small>{length:,} tokens</small>"


def _accuracy(summary: LengthSummary | None, strong: bool = False) -> str:
    if summary is None:
        return "<td class=dim>not measured</td>"
    value = percent(summary.accuracy.mean)
    value = f"<b>{value}</b>" if strong else value
    return f"<td>{value} <small>{interval(summary.accuracy)}, n = {summary.n}</small></td>"


def percent(value: float) -> str:
    """Returns "98.4%"."""
    return f"{100 * value:.1f}%"


def interval(share: Share) -> str:
    """Returns "91.7 to 99.7"."""
    return f"{100 * share.low:.1f} to {100 * share.high:.1f}"


def _cost(summary: LengthSummary) -> str:
    return f"{duration(summary.seconds)} <small>{summary.turns:,} turns</small>"


def duration(seconds: float) -> str:
    """Returns "0.8 s", "12 s", "2 min 05 s" or "1 h 02 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _failures(report: Report) -> str:
    """Says what was counted as wrong for another reason than a wrong answer."""
    told = []
    for name, summaries in (("before", report.before), ("after", report.after)):
        failed, truncated = sum(s.failed for s in summaries), sum(s.truncated for s in summaries)
        if failed:
            told.append(f"{failed} readings {name} RL failed and count as wrong")
        if truncated:
            told.append(f"{truncated} answers {name} RL were cut at their limit")
    return f"<p class=note>{'; '.join(told)}.</p>" if told else ""


def _other_metrics(report: Report) -> str:
    names = list(dict.fromkeys(n for s in (*report.before, *report.after) for n in s.scores))
    if not names:
        return ""
    rows = [
        f"<tr><td>{label} <small>{format_length(s.length)}</small></td>"
        + "".join(
            f"<td>{percent(s.scores[n].mean)} <small>{interval(s.scores[n])}</small></td>"
            for n in names
        )
        + "</tr>"
        for label, summaries in (("before", report.before), ("after", report.after))
        for s in sorted(summaries, key=lambda s: s.length)
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    table = f"<table class=wide><tr><th></th>{head}</tr>{''.join(rows)}</table>"
    return f"<details><summary>By every metric</summary>{table}</details>"


def _timings(timings: Mapping[str, float]) -> str:
    total = sum(timings.values()) or 1.0
    rows = [
        f"<tr><td>{escape(name)}</td><td class=number>{duration(seconds)}</td>"
        f"<td class=bar><i style='width:{100 * seconds / total:.1f}%'></i></td></tr>"
        for name, seconds in timings.items()
    ]
    return f"<table class=times>{''.join(rows)}</table>"


def _config(config: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(str(value))}</code></td></tr>"
        for name, value in flatten(config).items()
    ]
    return (
        f"<details><summary>{len(rows)} settings</summary><table>{''.join(rows)}</table></details>"
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"a.b": value} of a nested mapping, in its order."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# ---------------------------------------------------------------- readings


def _example(example: Example) -> str:
    r = example.result
    verdict = "right" if r.correct == 1 else "wrong"
    gold = " or ".join(r.gold)
    return (
        f"<article><h3>{escape(r.question)}</h3>"
        f"<p class=note>{escape(example.label)}, {r.tokens:,} tokens in {r.turns - 1:,} chunks"
        f"{' · ' + escape(r.problem) if r.problem else ''}</p>"
        f"<table class=memory>{_memory(r.memory_changes)}"
        f"<tr class=answer><td>answer</td>"
        f"<td>{_text(r.answer)} <span class={verdict}>{verdict}</span>"
        f"<small> expected {escape(gold)}</small></td></tr></table></article>"
    )


def _memory(changes: Sequence[MemoryChange]) -> str:
    """Returns one row per change; of a memory that never rests, the first and last ones."""
    rows = [f"<tr><td>chunk {c.chunk + 1:,}</td><td>{_text(c.memory)}</td></tr>" for c in changes]
    if not rows:
        return "<tr><td></td><td class=dim>the memory never changed</td></tr>"
    hidden = len(rows) - FIRST_CHANGES - LAST_CHANGES
    if hidden <= 1:
        return "".join(rows)
    gap = f"<tr><td></td><td class=dim>{hidden:,} more changes</td></tr>"
    return "".join([*rows[:FIRST_CHANGES], gap, *rows[-LAST_CHANGES:]])


def _text(text: str) -> str:
    return f"<q>{escape(text)}</q>" if text.strip() else "<span class=dim>(empty)</span>"


_STYLE = """
:root { color-scheme: light; --ink: #22262b; --dim: #7a828c; --line: #e6e8eb; --blue: #1f5fa8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 50rem; padding: 3.5rem 1.5rem 6rem; color: var(--ink);
  background: #fff; font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Helvetica, Arial,
  sans-serif; -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.9rem; line-height: 1.2; font-weight: 650; margin: 0 0 .6rem;
  letter-spacing: -.01em; }
h2 { font-size: 1.2rem; font-weight: 620; margin: 0 0 .9rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 0; }
p { margin: 0 0 1rem; max-width: 42rem; }
.lead { font-size: 1.1rem; color: #444b54; margin-bottom: 2rem; }
.note, small, .dim { color: var(--dim); }
.note { font-size: .875rem; }
small { font-size: .8125rem; white-space: nowrap; }
section { margin-top: 3.25rem; }
img { display: block; width: 100%; height: auto; margin: 0 0 .5rem; }
table { border-collapse: collapse; width: 100%; margin: 0 0 1rem; font-size: .9375rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--dim); font-size: .8125rem; }
th, td { padding: .45rem 1rem .45rem 0; border-bottom: 1px solid var(--line);
  vertical-align: baseline; }
.wide td { white-space: nowrap; line-height: 1.35; }
.wide small { display: block; }
section { overflow-x: auto; }
details summary { cursor: pointer; color: var(--blue); font-size: .9375rem; padding: .3rem 0; }
code { font: .8125rem/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
article { margin: 0 0 2.25rem; }
article .note { margin: .1rem 0 .6rem; }
.memory td:first-child { width: 8rem; color: var(--dim); white-space: nowrap; }
.answer td { border-bottom: 0; font-weight: 600; }
.answer small { font-weight: 400; }
q { quotes: none; overflow-wrap: anywhere; }
.right, .wrong { font-size: .75rem; font-weight: 600; padding: .1rem .45rem;
  border-radius: .25rem; margin-left: .4rem; }
.right { color: #14633a; background: #e3f3ea; }
.wrong { color: #8a3b12; background: #f8e9df; }
.times td { width: 1%; white-space: nowrap; }
.times .bar { width: auto; padding-right: 0; }
.bar i { display: block; height: .5rem; border-radius: .25rem; background: #a9c4e4;
  min-width: 2px; }
@media print { body { padding: 0; max-width: none; } details { display: none; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
