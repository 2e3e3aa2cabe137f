"""Published scorers beside ours: random answers judged by both, and where they differ.

    python -m benchmarks.scorers --babilong babilong/metrics.py --graphwalks graphwalks/app.py

The first is a file of booydar/babilong, the second of NVIDIA-NeMo/Gym (resources_servers/), which
ports the grading of the data set's card. Nothing is fetched and none of a file's imports is
followed: the functions that are needed are taken out of it and run. Answers are well-formed ones,
cut ones, empty ones, with labels of the question, several labels, examples of their own. Of those
that differ the deliberate ones are told apart (`Scorer.meant`; docs/evaluation.md says why).
Expected: 2,000 answers each and no other difference; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from notepad_jax.scoring import labels, metrics, nodes
from notepad_jax.tasks import babilong, graphwalks, haystack
from notepad_jax.types import Task

SIZE = 400  # tokens of the documents whose questions are asked; nobody reads them


@dataclasses.dataclass(frozen=True)
class Case:
    """An answer to a task."""

    task: Task
    said: str


Judge = Callable[[Case], float]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """What is compared: how a published file is opened, what is said, what is meant to differ."""

    opened: Callable[[Path], Judge]
    names: Sequence[str]  # of the tasks that are asked
    task: Callable[[str, int], Task]  # by name and seed
    said: Callable[[np.random.Generator, Task], str]
    meant: Callable[[Case], bool]


def functions(path: Path, names: Sequence[str]) -> Mapping[str, typing.Any]:
    """Returns what a Python file defines under these names; of its imports only re and typing.

    Raises ValueError for a name that it does not define.
    """
    kept = [one for one in ast.parse(path.read_text("utf-8")).body if _defined(one) & {*names}]
    found: dict[str, typing.Any] = {**vars(typing), "re": re}
    exec(compile(ast.Module(kept, []), str(path), "exec"), found)
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path} defines no {missing[0]}; give the file that does")
    return found


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


# ---------------------------------------------------------------- BABILong


def _babilong(path: Path) -> Judge:
    found = functions(path, ("TASK_LABELS", "preprocess_output", "compare_answers"))

    def judge(case: Case) -> float:
        name = case.task.source.rpartition("/")[2]
        question = case.task.question.partition("?")[0] + "?"  # what stands behind it is ours
        known = found["TASK_LABELS"][name]
        return float(found["compare_answers"](case.task.answers[0], case.said, question, known))

    return judge


def _babilong_task(name: str, seed: int) -> Task:
    return babilong.make_task(name, seed, SIZE, haystack.noise(), _count)


def _about_labels(rng: np.random.Generator, task: Task) -> str:
    gold, known = task.answers[0], labels.LABELS[task.metric]
    asked = task.question.partition("?")[0]
    words = [*known, *known, *known, *gold.split(","), "Mary", "I know", "is in the", "or", "none"]
    ends = [".", ". ", "\n", "<context>", "<example>", "Question", "?", "\x00", "É"]
    picked = rng.choice([*words, *ends, asked], int(rng.integers(6))).tolist()
    forms = ["", gold, gold.upper(), gold.replace(",", " and "), f"{asked}: {gold}", *picked[:1]]
    return _one(rng, [*forms, " ".join(picked), f"{gold} {' '.join(picked)}"])


def _says_none(case: Case) -> bool:
    """A label within another one: "none" alone is not "one"."""
    return case.task.metric == "babilong_numbers" and "none" in case.said.lower()


# ---------------------------------------------------------------- GraphWalks


def _graphwalks(path: Path) -> Judge:
    found = functions(path, ("_FINAL_ANSWER_RE", "_parse_node_list", "_f1_score"))

    def judge(case: Case) -> float:
        said, failed = found["_parse_node_list"](case.said)
        return found["_f1_score"](set(said), {*case.task.answers} - {nodes.EMPTY}, failed)

    return judge


def _graphwalks_task(name: str, seed: int) -> Task:
    return graphwalks.make_task(name, seed, 2 * SIZE, haystack.noise(), _count)


def _about_nodes(rng: np.random.Generator, task: Task) -> str:
    gold = [node for node in task.answers if node != nodes.EMPTY]
    others = ["0123456789", "abcdefabcd", "", " ", "'", "]", "[", "[]"]
    picked = [node for node in gold if rng.random() < 0.7]
    picked += rng.choice(others, int(rng.integers(3))).tolist()
    listed = _one(rng, [", ", ",", " , "]).join(rng.permutation(picked).tolist())
    sign = _one(
        rng, ["Final Answer: [", "Final Answer:[", "Final Answer:  [", "final answer: [", "["]
    )
    before = _one(rng, ["", "I searched.\n", "Final Answer: []\n", "so "])
    behind = _one(rng, ["]", "]", "]\n", "] ", "].", "", "]\nThat is all."])
    return _one(rng, ["", before + sign + listed + behind, before + sign + listed + "]"])


def _empty_item(case: Case) -> bool:
    """An item "[]" is no item."""
    return bool(re.search(r"[\[,]\s*\[\]\s*[\],]", case.said))


def _one(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]


SCORERS: Mapping[str, Scorer] = {
    "babilong": Scorer(_babilong, babilong.NAMES, _babilong_task, _about_labels, _says_none),
    "graphwalks": Scorer(
        _graphwalks, graphwalks.NAMES, _graphwalks_task, _about_nodes, _empty_item
    ),
}


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
    for name in SCORERS:
        parser.add_argument(f"--{name}", type=Path, help="the published file")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    paths = {name: getattr(given, name) for name in SCORERS if getattr(given, name)}
    if not paths:
        parser.error(f"give a published file with {' or '.join(f'--{name}' for name in SCORERS)}")
    try:
        found = {
            name: compare(SCORERS[name], path, given.answers, given.seed)
            for name, path in paths.items()
        }
    except (OSError, SyntaxError, ValueError) as problem:
        parser.error(str(problem))
    print(json.dumps(found, indent=1))
    return int(any(one["differ"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
