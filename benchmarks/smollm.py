"""The curve of a published model that was taught to read: docs/results.md's second table.

    python -m benchmarks.smollm [--page docs/results.md] [--only GRPO] [--lengths 2k,16k]

After `make smollm`: the adapters lie in data/. Each reader that is there reads the stories of
RULER and of the memory tasks at each length, greedily, by `notepad-jax eval` into
./runs/curve-NAME; a reading that is there is not made again, so the same command goes on after a
kill. Prints the tables; `--page` keeps what was found in MEASURED, beside the page, and writes
tables and picture between the page's marks: what was measured on another day, or another
machine, stays until as many questions were asked anew. Further tables have what GRPO gained on
imitation, question by question, of the readings that are here. At 1M single needles alone are
asked for. `GRPO, two cores` reads with what `make smollm-train` makes; GRPO of another seed is a
run: `notepad-jax train --config smollm --name smollm-1 --config.seed=1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import marks
from configs import smollm as training
from notepad_jax.eval import summary
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.eval.measure import Result
from notepad_jax.eval.readings import READINGS, results_in
from notepad_jax.eval.summary import Share, Summary
from notepad_jax.report import accuracy_plot, numerals, render

RUNS = Path("runs")
MARK, GAINED, PICTURE = "smollm", "smollm-gained", "images/smollm.svg"
MEASURED = "smollm.jsonl"  # a line a `Point`, in the order of tables
# Questions of each of the 13 tasks; at the longest of two, since each takes minutes.
SAMPLES = {"1k": 16, "2k": 16, "4k": 16, "16k": 8, "64k": 4, "1m": 2}
LONGEST = "1m"
WINDOW = 8192  # what the model was made for

ALL, NEEDLES = "all tasks", "single needles"
KINDS = {
    NEEDLES: ("niah_single_2", "niah_single_3"),
    "several needles": ("niah_multikey_1", "niah_multivalue", "niah_multiquery"),
    "variable tracking": ("vt",),
    "memory tasks": (
        *("updates", "conflicts", "counting", "ordering"),
        *("multi_evidence", "unanswerable", "instruction"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Reader:
    """A policy to be measured: how it reads, and up to which length."""

    policy: str
    method: str = "notepad"
    longest: str = LONGEST


@dataclasses.dataclass(frozen=True)
class Point:
    """What one reader did at one length in one kind of task."""

    reader: str  # of READERS
    kind: str  # of KINDS, or ALL
    length: int  # tokens
    questions: int
    mean: float  # accuracy by each task's own metric, with its 95% interval
    low: float
    high: float
    date: str  # on which it was summed up

    @property
    def summary(self) -> Summary:
        """As curves are drawn of it."""
        share = Share(self.mean, self.low, self.high)
        n = self.questions
        return Summary(
            self.reader, self.kind, self.length, n, n, share, {}, None, {}, 0, 0, 0, 0, 0, 0.0
        )


READERS = {
    "instruct": Reader("policies/smollm2", longest="64k"),
    "imitation": Reader("data/smollm2-imitated"),
    "GRPO, two cores": Reader("policies/smollm2-taught", longest="64k"),
    "GRPO": Reader("data/smollm2"),
    "GRPO, two cores, seed 1": Reader("runs/smollm-1", longest="64k"),
    "GRPO, then free questions": Reader("data/smollm2-asked", longest="16k"),
    "full context": Reader("policies/smollm2", "full-context", "4k"),
    "recent only": Reader("policies/smollm2", "recent-only", "64k"),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=READERS, default=list(READERS), metavar="READER",
        help=f"some of {'; '.join(READERS)}",
    )  # fmt: skip
    parser.add_argument("--lengths", default=",".join(SAMPLES), help="some lengths (all)")
    parser.add_argument("--page", type=Path, help="a page with a place for the tables")
    parser.add_argument("--tables", action="store_true", help="read nothing; what is there")
    said = parser.parse_args(argv)
    if not said.tables:
        for length in said.lengths.split(","):
            for name in said.only:
                read(name, length)
    found = [point for name in READERS for point in points_of(name)]
    before = measured(said.page.parent / MEASURED) if said.page is not None else []
    if not (found := joined(before, found)):
        sys.exit("nothing was read yet")
    text = page(found)
    print(text)
    if said.page is not None:
        lines = [json.dumps(dataclasses.asdict(point)) + "\n" for point in found]
        (said.page.parent / MEASURED).write_text("".join(lines), encoding="utf-8")
        marks.put(said.page, MARK, text)
        if gained := gain_tables():
            marks.put(said.page, GAINED, gained)
        render.picture(said.page.parent / PICTURE, pictures(found), columns=2)


def folder(name: str, length: str = "") -> Path:
    """Where a reader's readings lie; those of the longest have a folder of their own."""
    end = f"-{LONGEST}" if length == LONGEST else ""
    return RUNS / f"curve-{name.replace(', ', '-').replace(' ', '-').lower()}{end}"


def read(name: str, length: str) -> None:
    """Has a reader read one length; at once where it has, or is not there."""
    reader, there = READERS[name], folder(name, length)
    if not Path(reader.policy).exists() or parse_length(length) > parse_length(reader.longest):
        return
    command = [sys.executable, "-m", "notepad_jax", "eval", "--name", there.name]
    command += ["--lengths", length, "--samples", str(SAMPLES[length])]
    command += ["--resume"] if there.exists() else [
        *("--policy", reader.policy, "--suite", "stories", "--methods", reader.method),
        *("--tasks", ",".join(KINDS[NEEDLES] if length == LONGEST else sum(KINDS.values(), ()))),
        *_how_it_reads(),
    ]  # fmt: skip
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"{name} at {length} ended with {code}; the same command goes on")


def _how_it_reads() -> list[str]:
    """The overrides for every reader: as in training, but greedily."""
    config = training.get_config()
    reading = {f"reading.{key}": value for key, value in config.reading.items()}
    evaluate = dict(
        chunk_size=config.reading.chunk_size, context=WINDOW, temperature=0.0, top_p=1.0, at_once=32
    )
    engine = dict(slots=32, page_size=config.engine.page_size, steps_per_launch=8)
    keys = reading | {f"evaluate.{key}": value for key, value in evaluate.items()}
    keys |= {f"engine.{key}": value for key, value in engine.items()}
    return [f"--config.{key}={value}" for key, value in keys.items()]


# ---------------------------------------------------------------- what was found


def readings(name: str, length: str = "") -> list[Result]:
    """Returns what a reader has read (at `LONGEST` alone); nothing where it is not there."""
    there = folder(name, length)
    if not (there / READINGS).is_file():
        return []
    return [one for one in results_in(there) if not one.failed]


def points_of(name: str) -> list[Point]:
    """Returns what a reader has read, summed up by kind and length."""
    results, longest = readings(name), readings(name, LONGEST)
    today = datetime.date.today().isoformat()
    return [
        Point(name, kind, s.length, s.questions, *dataclasses.astuple(s.accuracy), today)
        for kind in (ALL, *KINDS)
        for s in of_kind(results + (longest if kind == NEEDLES else []), kind)
    ]


def of_kind(results: Sequence[Result], kind: str) -> list[Summary]:
    """Returns the summaries by length of one of `KINDS`, or of all tasks."""
    own = [one for one in results if kind == ALL or _task(one) in KINDS[kind]]
    return summary.by_length(own)


def _task(one: Result) -> str:
    return one.source.removeprefix("stories/")


@dataclasses.dataclass(frozen=True)
class Gain:
    """By how much a reader's answers to the same questions are better than another's."""

    kind: str  # of KINDS, or ALL
    lengths: tuple[int, ...]  # tokens
    questions: int
    mean: float  # of the differences in accuracy, with its 95% interval
    low: float
    high: float
    better: int  # questions
    worse: int


def gains(before: Sequence[Result], after: Sequence[Result]) -> list[Gain]:
    """Returns what `after` gained, by kind: of all lengths that both have read, then of each.

    Questions differ much and are the same for both, so the differences vary far less than the two
    accuracies do. Questions about one document are not independent: the variance is that over
    documents, linearised, as `eval.summary.worth` has it.
    """
    old, new = ({one.key[1:]: one for one in results} for results in (before, after))
    both = [(old[key], new[key]) for key in sorted(old.keys() & new.keys())]
    lengths = sorted({one.length for one, _ in both})
    found = []
    for kind in (ALL, *KINDS):
        own = [pair for pair in both if kind == ALL or _task(pair[0]) in KINDS[kind]]
        for some in dict.fromkeys((tuple(lengths), *((length,) for length in lengths))):
            here = [pair for pair in own if pair[0].length in some]
            found += [_gain(kind, some, here)] if here else []
    return found


def _gain(kind: str, lengths: tuple[int, ...], pairs: Sequence[tuple[Result, Result]]) -> Gain:
    differences = [new.correct - old.correct for old, new in pairs]
    n, mean = len(pairs), sum(differences) / len(pairs)
    apart: dict[tuple[int, str], float] = {}
    for (old, _), difference in zip(pairs, differences, strict=True):
        document = (old.length, old.document or old.task_id)
        apart[document] = apart.get(document, 0.0) + difference - mean
    m = len(apart)
    variance = m / (m - 1) * sum(e * e for e in apart.values()) / n**2 if m > 1 else math.inf
    half = 1.96 * variance**0.5
    better, worse = (sum(sign * one > 0 for one in differences) for sign in (1, -1))
    return Gain(kind, lengths, n, mean, mean - half, mean + half, better, worse)


def gain_tables() -> str:
    """Returns what each reader after GRPO gained on imitation; "" where one of both is not here."""
    before = readings("imitation")
    found = {name: gains(before, readings(name)) for name in READERS if name.startswith("GRPO")}
    return "\n\n".join(f"**{name}**\n\n{gain_table(own)}" for name, own in found.items() if own)


def gain_table(found: Sequence[Gain]) -> str:
    """Returns the differences as markdown, a line a kind, a column a length."""
    columns = list(dict.fromkeys(one.lengths for one in found))
    heads = [", ".join(map(format_length, lengths)) for lengths in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for kind in dict.fromkeys(one.kind for one in found):
        own = {one.lengths: one for one in found if one.kind == kind}
        cells = (_gained(own[lengths]) if lengths in own else "-" for lengths in columns)
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gained(one: Gain) -> str:
    mean, low, high = (f"{100 * share:+.1f}" for share in (one.mean, one.low, one.high))
    return f"{mean} ({low} to {high}), n {one.questions}: {one.better} better, {one.worse} worse"


def measured(path: Path) -> list[Point]:
    """Returns what a file keeps; nothing where it is not there."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Point(**json.loads(line)) for line in lines]


def joined(before: Sequence[Point], found: Sequence[Point]) -> list[Point]:
    """Returns all points in the order of tables.

    Of a reader and a length the newer ones, unless those before were of more questions: what was
    stopped on its way takes nothing away.
    """
    asked, before_asked = _most(found), _most(before)
    more = {key for key, count in before_asked.items() if count > asked.get(key, 0)}
    points = [p for p in before if (p.reader, p.length) in more]
    points += [p for p in found if (p.reader, p.length) not in more]
    readers, kinds = list(READERS), [ALL, *KINDS]
    return sorted(points, key=lambda p: (kinds.index(p.kind), readers.index(p.reader), p.length))


def _most(points: Sequence[Point]) -> dict[tuple[str, int], int]:
    """Returns how many questions each reader answered at each length: of its largest kind."""
    most: dict[tuple[str, int], int] = {}
    for p in points:
        most[p.reader, p.length] = max(p.questions, most.get((p.reader, p.length), 0))
    return most


def page(found: Sequence[Point]) -> str:
    """Returns the tables as markdown, one a kind of question."""
    lengths = sorted({point.length for point in found})
    parts = [f"![Accuracy by length]({PICTURE})"]
    for kind in (ALL, *KINDS):
        lines = [
            f"**{kind}**\n",
            "| | " + " | ".join(map(format_length, lengths)) + " |",
            "|---" * (len(lengths) + 1) + "|",
        ]
        for name in READERS:
            own = {p.length: p for p in found if p.reader == name and p.kind == kind}
            if own:
                told = (_told(own[n]) if n in own else "-" for n in lengths)
                lines.append(f"| {name} | " + " | ".join(told) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _told(point: Point) -> str:
    share = Share(point.mean, point.low, point.high)
    return f"{numerals.percent(share.mean)} ({numerals.interval(share)}), n {point.questions}"


def pictures(found: Sequence[Point]) -> list[accuracy_plot.Chart]:
    """Returns a chart of single needles, and one of all tasks."""
    charts = []
    for kind in ("single needles", ALL):
        curves = [point.summary for point in found if point.kind == kind]
        wide = accuracy_plot.by_method(curves, parse_length("2k")).wide
        charts.append(dataclasses.replace(wide, title=kind))
    return charts


if __name__ == "__main__":
    main()
