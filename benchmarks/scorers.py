"""Published scorers beside ours: random answers judged by both, and where they differ.

    python -m benchmarks.scorers --babilong babilong/metrics.py --graphwalks graphwalks/app.py

Each file is one of the published code (`scorer_rows` says which). Nothing is fetched and none of a
file's imports is followed: the functions that are needed are taken out of it and run. Answers are
well-formed ones, cut ones, empty ones, near ones. Of those that differ the deliberate ones are told
apart (`Scorer.meant`; docs/evaluation.md says why). Expected: 2,000 answers each and no other
difference; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.published import Case, Scorer
from benchmarks.scorer_rows import SCORERS
from notepad_jax.scoring import metrics


def ours(case: Case) -> float:
    task = case.task
    return metrics.score(case.said, task.answers, task.metric, task.contract, task.question).value


def compare(scorer: Scorer, path: Path, answers: int, seed: int) -> dict[str, typing.Any]:
    """Returns how many of `answers` were right by both, how many differ, and which unmeant do."""
    rng, theirs = np.random.default_rng(seed), scorer.opened(path)
    tasks = [scorer.task(name, k) for k in range(20) for name in scorer.names]
    picked = [tasks[i] for i in rng.integers(len(tasks), size=answers)]
    cases = [Case(task, scorer.said(rng, task)) for task in picked]
    differ = [case for case in cases if abs(ours(case) - theirs(case)) > 1e-9]
    unmeant = [case for case in differ if not scorer.meant(case)]
    return {
        "answers": answers,
        "worth something": sum(theirs(case) > 0 for case in cases),
        "differ as meant": len(differ) - len(unmeant),
        "differ": [[one.task.question, one.task.answers, one.said] for one in unmeant],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options = {name: f"--{name.replace('_', '-')}" for name in SCORERS}
    for option in options.values():
        parser.add_argument(option, type=Path, help="the published file")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    paths = {name: getattr(given, name) for name in SCORERS if getattr(given, name)}
    if not paths:
        parser.error(f"give a published file with one of {', '.join(options.values())}")
    try:
        found = {
            name: compare(SCORERS[name], path, given.answers, given.seed)
            for name, path in paths.items()
        }
    except (ImportError, OSError, SyntaxError, ValueError) as problem:
        parser.error(str(problem))
    print(json.dumps(found, indent=1))
    return int(any(one["differ"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
