"""The parts of a comparison with a published scorer: its functions, a case, a row of scorers.

Above: scorer_rows, which has a row for each benchmark, and scorers, which compares.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from notepad_jax.types import Task


@dataclasses.dataclass(frozen=True)
class Case:
    """An answer to a task."""

    task: Task
    said: str


Judge = Callable[[Case], float]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A comparison: how a published file is opened, what is said, what is meant to differ."""

    opened: Callable[[Path], Judge]
    names: Sequence[str]  # of the tasks that are asked
    task: Callable[[str, int], Task]  # by name and seed
    said: Callable[[np.random.Generator, Task], str]
    meant: Callable[[Case], bool]


def functions(
    path: Path, names: Sequence[str], sees: Mapping[str, typing.Any] = {}
) -> Mapping[str, typing.Any]:
    """Returns what a Python file defines under these names, in it, its classes or its functions.

    The outermost definition of a name is taken, alone: it sees the others, `re`, typing and
    `sees`, and no import of the file. Raises ValueError for a name that the file does not define.
    """
    kept: dict[str, ast.stmt] = {}
    for one in ast.walk(ast.parse(path.read_text("utf-8"))):  # breadth first
        for name in _defined(one) & {*names}:
            kept.setdefault(name, typing.cast(ast.stmt, one))
    if missing := [name for name in names if name not in kept]:
        raise ValueError(f"{path} defines no {missing[0]}; give the file that does")
    body = sorted({id(one): one for one in kept.values()}.values(), key=lambda one: one.lineno)
    found: dict[str, typing.Any] = {**vars(typing), "re": re, **sees}
    late = annotations.compiler_flag  # that of the import above: hints name what is not imported
    exec(compile(ast.Module(body, []), str(path), "exec", late), found)
    return found


def _defined(statement: ast.AST) -> set[str]:
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def one_of(rng: np.random.Generator, choices: Sequence[str]) -> str:
    """Draws one of the texts; numpy would draw one of their characters' arrays."""
    return choices[int(rng.integers(len(choices)))]


def count(text: str) -> int:
    """Counts words and signs, which is near enough to tokens where no document is read."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def never(case: Case) -> bool:
    """No case is meant to differ."""
    return False
