"""The pieces that pages are made of: frame and style, sections, pictures, tables, readings.

`quickstart_page` and `evaluation_page` put their pages together from
these, so that both look the same: self-contained (pictures as base64, no script, nothing
fetched), printable, and safe, for everything that a policy wrote or that was found in a
document goes through `text` or `cell` and comes out escaped and bounded. Below: measure
and summary.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.measure import MemoryChange, Result
from notepad_jax.eval.summary import Share, Summary

FIRST_CHANGES, LAST_CHANGES = 8, 4  # memory changes of an example that are shown
LONGEST_TEXT = 6_000  # characters of a memory, an answer or a question that are shown

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True)
class Example:
    """One reading to look at, who read, and the memories it went through."""

    label: str  # such as "after RL" or "notepad, ruler/vt"
    result: Result
    memory_changes: Sequence[MemoryChange]  # in the order in which they happened


def write(path: Path, title: str, parts: Iterable[str]) -> Path:
    """Writes a page at once or not at all; its parts are HTML. Returns the path.

    Half a surrogate pair, which a policy may write and UTF-8 cannot, becomes a question mark.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = _PAGE.format(title=escape(title), style=_STYLE, body="\n".join(parts))
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(whole, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def head(title: str, lead: str) -> str:
    """Returns the heading, and the one or two sentences under it."""
    return f"<h1>{escape(title)}</h1><p class=lead>{escape(lead)}</p>"


def section(title: str, body: str) -> str:
    """Returns a part of the page under a heading of its own; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def note(*lines: str) -> str:
    """Returns a paragraph in small grey, a line for each; nothing if all are empty."""
    told = "<br>".join(escape(line) for line in lines if line)
    return f"<p class=note>{told}</p>" if told else ""


def picture(path: Path, description: str) -> str:
    """Returns a PNG file as part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{data}">'


# ---------------------------------------------------------------- numbers


def percent(value: float) -> str:
    """Returns "98.4%"."""
    return f"{100 * value:.1f}%"


def interval(share: Share) -> str:
    """Returns "91.7 to 99.7"."""
    return f"{100 * share.low:.1f} to {100 * share.high:.1f}"


def length(tokens: int) -> str:
    """Returns "8K" with the exact number of tokens beside it, as HTML."""
    return f"{format_length(tokens)} <small>{tokens:,} tokens</small>"


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


def counted(number: int, one: str, many: str) -> str:
    """Returns "1 reading" or "1,200 readings"."""
    return f"{number:,} {one if number == 1 else many}"


# ---------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of numbers, small print under each; cells are HTML, headings are not."""
    return _table("wide", head, rows)


def heat_map(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with narrow columns of one width; cells are HTML, headings are not."""
    return _table("heat", head, rows)


def _table(style: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table class={style}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(content: str) -> str:
    """Wraps HTML into a cell, unless it already is one."""
    return content if content.startswith("<td") else f"<td>{content}</td>"


NOT_MEASURED = "<td class=dim>not measured</td>"


def every_metric(rows: Iterable[tuple[str, Summary]]) -> str:
    """Returns, folded away, each labelled summary by every metric; nothing without metrics."""
    rows = list(rows)
    names = list(dict.fromkeys(name for _, summary in rows for name in summary.scores))
    if not names:
        return ""
    cells = [
        [
            f"{escape(label)} <small>{format_length(summary.length)}</small>",
            *(f"{percent(s.mean)} <small>{interval(s)}</small>" for s in _in(summary, names)),
        ]
        for label, summary in rows
    ]
    return folded("By every metric", table(["", *names], cells))


def _in(summary: Summary, names: Sequence[str]) -> list[Share]:
    return [summary.scores[name] for name in names]


def folded(title: str, body: str) -> str:
    """Returns HTML that opens when its title is clicked; left out in print."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def settings(values: Mapping[str, Any]) -> str:
    """Returns flat settings ({"reading.max_memory": 64}) as a table, folded away."""
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(str(value))}</code></td></tr>"
        for name, value in values.items()
    ]
    return folded(f"{len(rows)} settings", f"<table>{''.join(rows)}</table>")


# ---------------------------------------------------------------- readings


def reading(example: Example) -> str:
    """Returns a question, how the memory changed on the way, and the answer."""
    r = example.result
    verdict = "right" if r.correct == 1 else "wrong" if r.correct == 0 else percent(r.correct)
    style = "right" if r.correct == 1 else "wrong"
    problem = f" · {escape(shortened(r.problem))}" if r.problem else ""
    lost = f" · evidence {escape(r.lost)}" if r.lost else ""
    chunks = f" in {counted(r.turns - 1, 'chunk', 'chunks')}" if r.turns > 1 else ""
    gold = shortened(" or ".join(r.gold))
    return (
        f"<article><h3>{escape(shortened(r.question))}</h3>"
        f"<p class=note>{escape(example.label)}, {r.tokens:,} tokens{chunks}"
        f"{problem}{lost}</p>"
        f"<table class=memory>{_memory(example.memory_changes)}"
        f"<tr class=answer><td>answer</td>"
        f"<td>{text(r.answer)} <span class={style}>{verdict}</span>"
        f"<small> expected {escape(gold)}</small></td></tr></table></article>"
    )


def _memory(changes: Sequence[MemoryChange]) -> str:
    """Returns one row per change; of a memory that never rests, the first and last ones."""
    if not changes:
        return "<tr><td></td><td class=dim>the memory never changed</td></tr>"
    hidden = len(changes) - FIRST_CHANGES - LAST_CHANGES
    if hidden <= 1:
        return "".join(map(_change, changes))
    gap = f"<tr><td></td><td class=dim>{hidden:,} more changes</td></tr>"
    first, last = changes[:FIRST_CHANGES], changes[-LAST_CHANGES:]
    return "".join([*map(_change, first), gap, *map(_change, last)])


def _change(change: MemoryChange) -> str:
    held = "" if change.recall is None else f"<small>{change.recall:.0%} of evidence</small>"
    return f"<tr><td>chunk {change.chunk + 1:,}{held}</td><td>{text(change.memory)}</td></tr>"


def text(words: str) -> str:
    """Returns what a policy wrote, escaped, marked as a quotation, and not without end."""
    return (
        f"<q>{escape(shortened(words))}</q>" if words.strip() else "<span class=dim>(empty)</span>"
    )


def shortened(words: str) -> str:
    """Returns the beginning of a text that is too long to show; control characters as U+FFFD."""
    hidden = len(words) - LONGEST_TEXT
    shown = _CONTROL.sub("\ufffd", words[:LONGEST_TEXT])
    return f"{shown} ... ({hidden:,} more characters)" if hidden > 0 else shown


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
article h3 { overflow-wrap: anywhere; }
.memory td:first-child { width: 8rem; color: var(--dim); white-space: nowrap; }
.memory td:first-child small { display: block; }
.answer td { border-bottom: 0; font-weight: 600; }
.answer small { font-weight: 400; white-space: normal; overflow-wrap: anywhere; }
q { quotes: none; overflow-wrap: anywhere; unicode-bidi: isolate; }
.right, .wrong { font-size: .75rem; font-weight: 600; padding: .1rem .45rem;
  border-radius: .25rem; margin-left: .4rem; }
.right { color: #14633a; background: #e3f3ea; }
.wrong { color: #8a3b12; background: #f8e9df; }
.times td { width: 1%; white-space: nowrap; }
.times .bar { width: auto; padding-right: 0; }
.bar i { display: block; height: .5rem; border-radius: .25rem; background: #a9c4e4;
  min-width: 2px; }
.heat { table-layout: fixed; margin: .2rem 0 1.6rem; }
.heat td, .heat th { padding: .3rem .2rem; text-align: center; border: 2px solid #fff; }
.heat td:first-child, .heat th:first-child { width: 12rem; text-align: left; padding-left: 0;
  overflow-wrap: anywhere; }
.heat td { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
@media print { body { padding: 0; max-width: none; } details { display: none; }
  tr, img, article { break-inside: avoid; } h2, h3 { break-after: avoid; }
  section { overflow: visible; } }
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
