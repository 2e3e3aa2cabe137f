"""The quick start from several seeds: the table of docs/quickstart.md.

    python -m benchmarks.seeds --seeds 0-4 [--wrong] [--jobs 2] [--config.KEY=VALUE ...]

Each seed is `notepad-jax quickstart --name seeds-N` in ./runs, one after another (or `--jobs` side
by side, when their times mean nothing). What is finished is not done again, and what was stopped
goes on where it stood: the same command resumes. Prints the accuracy of every seed by length as a
markdown table, what was lost from the first length to the last with Newcombe's interval, and
seconds by stage; `--wrong` lists the readings that are still wrong, and what became of their notes.
Expected: about 9 CPU minutes a seed (two cores, 2026-11-23).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from notepad_jax.eval import degradation, summary
from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.measure import Result
from notepad_jax.eval.readings import Readings
from notepad_jax.programs import evaluate
from notepad_jax.programs.quickstart import STEP
from notepad_jax.setup import configuration
from notepad_jax.telemetry.identity import read_sealed
from notepad_jax.telemetry.metrics import CONFIG

RUNS = Path("runs")
LIMIT = 3 * 3600  # seconds of one seed: a machine that hangs ends here


@dataclasses.dataclass(frozen=True)
class Seed:
    """The results of one seed's run."""

    seed: int
    before: list[summary.Summary]
    after: list[summary.Summary]
    wrong: list[Result]  # of the readings after training


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-4", help="such as 0-4 or 0,2,5")
    parser.add_argument("--name", default="seeds", help="of the runs: NAME-SEED")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--wrong", action="store_true", help="list what is still read wrong")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    said, words = parser.parse_known_args(argv)
    seeds = parsed(said.seeds)
    with concurrent.futures.ThreadPoolExecutor(said.jobs) as pool:
        list(pool.map(lambda seed: run(said.name, seed, words), seeds))
    found = [read(RUNS / f"{said.name}-{seed}", seed) for seed in seeds]
    if said.json:
        print(json.dumps([told(one) for one in found], indent=1))
        return
    print(table(found))
    if said.wrong:
        print(wrong(found))


def parsed(text: str) -> list[int]:
    """Returns the seeds of "0-4" or "0,2,5"."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def run(name: str, seed: int, words: Sequence[str]) -> None:
    """Makes the run of a seed, or goes on with it; returns at once where it is finished."""
    folder = RUNS / f"{name}-{seed}"
    if (folder / "report.html").is_file():
        return
    command = [sys.executable, "-m", "notepad_jax", "quickstart", "--name", folder.name]
    command += ["--resume"] if folder.exists() else [f"--config.seed={seed}", *words]
    print(f"{folder.name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    began, log = time.perf_counter(), RUNS / f"{folder.name}.log"
    RUNS.mkdir(exist_ok=True)
    with log.open("a") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT)
    if done.returncode:
        sys.exit(f"{folder.name} ended with {done.returncode}; {log} says why; run this again")
    print(f"{folder.name}: {time.perf_counter() - began:,.0f} s", file=sys.stderr, flush=True)


def read(folder: Path, seed: int) -> Seed:
    """Reads what a finished run measured."""
    saved = read_sealed(folder / CONFIG, "make that run again")
    config = configuration.load("quickstart", saved=saved)
    sides = []
    for step in (0, config.steps):
        with Readings(folder / STEP.format(step), evaluate.identity(config)) as readings:
            sides.append(readings.all())
    before, after = map(summary.by_length, sides)
    return Seed(seed, before, after, [r for r in sides[1] if r.correct < 1])


def table(found: Sequence[Seed]) -> str:
    """Returns the accuracies by length as markdown, a column a seed, and what was lost."""
    lines = ["| document, tokens | " + " | ".join(f"seed {one.seed}" for one in found) + " |"]
    lines.append("|---" * (len(found) + 1) + "|")
    first = found[0]
    for row, s in enumerate(first.before):
        shares = " | ".join(_share(one.before[row].accuracy) for one in found)
        lines.append(f"| {format_length(s.length)}, before | {shares} |")
    for row, s in enumerate(first.after):
        shares = " | ".join(_share(one.after[row].accuracy) for one in found)
        lines.append(f"| {format_length(s.length)}, n {s.questions} | {shares} |")
    losses = [
        degradation.difference(one.after[0].accuracy, one.after[-1].accuracy) for one in found
    ]
    shares = " | ".join(
        f"{100 * loss.mean:.1f} ({100 * loss.low:.1f} to {100 * loss.high:.1f})" for loss in losses
    )
    return "\n".join([*lines, f"| lost, points | {shares} |"])


def wrong(found: Sequence[Seed]) -> str:
    """Returns a line for each reading that is still wrong."""
    lines = []
    for one in found:
        for r in sorted(one.wrong, key=lambda r: (r.length, r.question)):
            where = f"seed {one.seed}  {format_length(r.length):>5}"
            lines.append(f"{where}  {r.question:24} {r.gold[0]:12} {r.answer:12} {r.lost}")
    return "\n".join(lines)


def told(one: Seed) -> dict[str, object]:
    """Returns a seed's accuracies for machines."""
    sides = {"before": one.before, "after": one.after}
    return {"seed": one.seed} | {
        name: {s.length: dataclasses.asdict(s.accuracy) for s in side}
        for name, side in sides.items()
    }


def _share(share: summary.Share) -> str:
    return f"{100 * share.mean:.1f} ({100 * share.low:.1f}-{100 * share.high:.1f})"


if __name__ == "__main__":
    main()
