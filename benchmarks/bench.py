"""Every row of speed on this machine, and what has moved since it was measured last.

    make bench                          # python -m benchmarks.bench [--only sharing,turn]
    make peers && make bench            # beside google-tunix, transformers and llama.cpp
    python -m benchmarks.bench --page docs/performance.md       # and writes its table

Runs the benchmarks of PARTS one after another, each a process pinned to one core, and prints their
figures: CPU seconds unless the name says something else, and ratios to what was measured by turns
in the same process. A peer is beside us where it is installed (`make peers`: an environment of its
own, 7 GB), and `real_model` is measured where `make smollm` has been. What was found is a line of
`--record` (runs/bench.jsonl), with machine and commit; the next run on a machine of the same
processor shows both, and names what moved by more than MOVED. `--page` puts the newest of each
part on this processor between the page's marks; with `--only=` nothing else is done. On a machine
that is busy seconds move by half, and ratios by a tenth. All of it takes about 20 minutes on a free
core, and twice that beside peers. The cache of compiled programs is off, so first steps are shown
with their compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from benchmarks.grpo_step import PEER
from notepad_jax.setup import compiled, provenance

ROOT = Path(__file__).parents[1]
RECORD, MARK = Path("runs/bench.jsonl"), "bench"
SMOLLM = Path("policies/smollm2")
MOVED = 0.1  # of a figure: less is noise


@dataclasses.dataclass(frozen=True)
class Part:
    """One benchmark, as it is run here."""

    words: tuple[str, ...]  # module, and what it is told
    peer: tuple[str, ...] = ()  # packages of which one is enough to say `--peer`
    needs: Path | None = None  # a folder without which it is left out


PARTS = {
    "floor": Part(("floor",)),
    "sharing": Part(("sharing",)),
    "step": Part(("grpo_step",), peer=("tunix",)),
    "step_large": Part(("grpo_step", "--sizes=large", "--steps=12"), peer=("tunix",)),
    "step_turns": Part(("grpo_step", "--sizes=turns", "--steps=12"), peer=("tunix",)),
    "turn": Part(("host_turn",)),
    "reading": Part(("reading_cost", "--lengths", "32k,128k,512k")),
    "packing": Part(("packing",)),
    "serving": Part(("serving",)),
    "small_model": Part(("real_model", "--parts", "decode"), peer=("transformers",)),
    "real_model": Part(
        ("real_model", "--policy", str(SMOLLM)), peer=("transformers", "llama_cpp"), needs=SMOLLM
    ),
}

# What was set out for: of which part, which figure, over which other one (none), and at most what.
GOALS = {
    "a GRPO step, over google-tunix's": ("step", "ours, step ratio", "", 0.40),
    "its rollout": ("step", "ours, rollout ratio", "", 0.50),
    "its update": ("step", "ours, update ratio", "", 0.35),
    "with sharing off": ("step", "ours, sharing off, step ratio", "", 0.60),
    "the first one, with compiling": ("step", "ours, first", f"{PEER}, first", 0.8),
    "a large GRPO step": ("step_large", "ours, step ratio", "", 0.33),
    "the first one, with compiling, large": ("step_large", "ours, first", f"{PEER}, first", 0.8),
    "turns of a memory agent": ("step_turns", "ours, step ratio", "", 0.06),
    "19M, one sequence, over transformers": ("small_model", "decode 1, ours/transformers", "", 0.5),
    "135M, one sequence, over transformers": (
        "real_model",
        "decode 1, ours/transformers",
        "",
        0.45,
    ),
    "one sequence, over llama.cpp": ("real_model", "decode 1, ours/llama.cpp", "", 1.0),
    "reading, us a document token": ("reading", "points, 524288, microseconds_a_token", "", 6.0),
    "python, us a turn": ("turn", "microseconds_a_turn", "", 50.0),
}

Figures = dict[str, float]  # by name, in the order in which a benchmark tells them


def main(argv: Sequence[str] | None = None) -> None:
    said = options().parse_args(argv)
    names = list(PARTS) if said.only is None else [name for name in said.only.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if hasattr(os, "sched_setaffinity"):  # not on a Mac; children are where we are
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    before = newest(said.record)
    for name in names:
        part = PARTS[name]
        if part.needs is not None and not part.needs.exists():
            print(f"{name}: left out, there is no {part.needs} (make smollm)", file=sys.stderr)
            continue
        began = time.monotonic()
        print(f"{name} ...", end="", file=sys.stderr, flush=True)
        found = measured(part)
        print(f" {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        old = before[name]["figures"] if name in before else {}
        print("\n".join([f"\n**{name}**", "", *table(found, old)]), flush=True)
        keep(said.record, name, found)
    if said.page is not None:
        marks.put(said.page, MARK, "\n".join(page(newest(said.record))))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--record", type=Path, default=RECORD, help="where figures are kept")
    parser.add_argument("--page", type=Path, help="a page with a place for the table")
    return parser


def measured(part: Part) -> Figures:
    """Runs a benchmark; SystemExit with its last words where it fails."""
    module, *words = part.words
    beside = any(map(importlib.util.find_spec, part.peer))
    words += ["--peer"] if beside else []
    ran = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *words, "--json"], cwd=ROOT, text=True,
        capture_output=True, env=os.environ | {compiled.SWITCH: compiled.OFF},
    )  # fmt: skip
    if ran.returncode:
        sys.exit(f"benchmarks.{module} ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
    return dict(flat(json.loads(ran.stdout)))


def flat(found: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yields all numbers of what a benchmark tells, by the names on the way to each.

    Of a ratio with its least and largest the ratio alone.
    """
    if isinstance(found, dict):
        for key, value in found.items():
            yield from flat(value, f"{name}, {key}" if name else str(key))
    elif isinstance(found, list) and len(found) == 3 and all(map(_is_number, found)):
        yield name, float(found[0])
    elif isinstance(found, list):
        for one in found:
            label = next((str(v) for v in one.values()), "") if isinstance(one, dict) else ""
            yield from flat(one, f"{name}, {label}" if name else label)
    elif _is_number(found):
        yield name, float(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def table(now: Figures, before: Figures) -> Iterator[str]:
    """Yields the lines of a table: each figure, what it was, and whether it moved."""
    yield "| | before | now | |"
    yield "|---|---|---|---|"
    for name, value in now.items():
        old = before.get(name)
        if old is None:
            yield f"| {name} | | {value:.4g} | |"
            continue
        ratio = value / old if old else 1.0
        moved = f"x{ratio:.2f}" if abs(ratio - 1) > MOVED else ""
        yield f"| {name} | {old:.4g} | {value:.4g} |{f' {moved} ' if moved else ' '}|"


def goals(lines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table: what of GOALS was measured, in bold what is reached."""
    yield "| goal | at most | measured |"
    yield "|---|---|---|"
    for goal, (part, figure, over, most) in GOALS.items():
        figures = lines[part]["figures"] if part in lines else {}
        if figure in figures and (not over or over in figures):
            found = figures[figure] / (figures[over] if over else 1.0)
            told = f"**{_figure(found)}**" if found <= most else _figure(found)
            yield f"| {goal} | {most:g} | {told} |"
    yield ""


def page(lines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of a page: the goals, then each part's figures, the last words across."""
    yield from goals(lines)
    for name in PARTS:
        if name not in lines:
            continue
        line = lines[name]
        yield f"**{name}** ({line['processor']}, {line['date'][:10]}, {line['commit'][:7]})\n"
        cells: dict[str, dict[str, float]] = {}
        for figure, value in line["figures"].items():
            row, _, column = figure.rpartition(", ")
            cells.setdefault(row, {})[column.replace("_", " ")] = value
        columns = list(dict.fromkeys(column for row in cells.values() for column in row))
        yield f"| | {' | '.join(columns)} |"
        yield "|---" * (1 + len(columns)) + "|"
        for row, found in cells.items():
            told = (_figure(found[column]) if column in found else "" for column in columns)
            yield f"| {row.replace('_', ' ')} | {' | '.join(told)} |"
        yield ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# ---------------------------------------------------------------- kept


def newest(record: Path) -> dict[str, dict[str, Any]]:
    """Returns the newest line of each part on such a processor; {} without a record."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    told = [json.loads(line) for line in lines]
    return {one["part"]: one for one in told if one["processor"] == provenance.cpu()}


def keep(record: Path, name: str, found: Figures) -> None:
    """Adds a line to the record."""
    record.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "part": name, "figures": found,
        "processor": provenance.cpu(), "commit": provenance.commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
