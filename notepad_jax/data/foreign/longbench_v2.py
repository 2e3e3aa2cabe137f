"""LongBench v2: multiple choice about one long text, a row a question.

The form is that of `data.json` and of the Hugging Face hub's rows, as the README and the loader
(pred.py) of THUDM/LongBench have it: `_id`, `domain`, `sub_domain`, `difficulty` (easy, hard),
`length` (short, medium, long), `question`, `choice_A` to `choice_D`, `answer` (a letter),
`context`. Published scores are shares of right letters, over all, by difficulty and by length: the
first is the task's source here (`longbench_v2/hard`), and the length is counted in tokens. The
letter is found by `choice`, which reads more ways of saying it than the published pattern
(`published_choice`). The text itself has been left in its file. Below: rows and corpus. Above:
formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notepad_jax.data.admission import NO_GOLD, Fault
from notepad_jax.data.foreign.corpus import text_of
from notepad_jax.data.rows import CONTRACT, Pair, Row
from notepad_jax.types import Task

LETTERS = "ABCD"
HOW = 'Say which choice is right: "The correct answer is (X)", with its letter.'

_KEPT = ("domain", "sub_domain", "difficulty", "length")  # of a row, for a reward or a report


def matches(columns: Mapping[str, Any]) -> bool:
    """Whether these are the columns of such a row."""
    return "choice_A" in columns and "question" in columns


def task_of(row: Row, where: str, name: str) -> Pair:
    """Makes the task of a row, `name` if it has no `_id`; Fault saying what is wrong with it."""
    columns = row.columns
    choices = [
        f"({letter}) {text_of(columns, f'choice_{letter}', where).strip()}" for letter in LETTERS
    ]
    task = Task(
        id=str(columns.get("_id") or name),
        question="\n".join([text_of(columns, "question", where).strip(), *choices, HOW]),
        document=row.document,
        answers=(_answer(columns, where),),
        source=f"longbench_v2/{columns.get('difficulty') or 'unknown'}",
        metric="choice",
        contract=CONTRACT,
        extra={key: columns[key] for key in _KEPT if key in columns},
    )
    return task, 0


def _answer(columns: Mapping[str, Any], where: str) -> str:
    answer = columns.get("answer")
    if not isinstance(answer, str) or answer.strip() not in [*LETTERS]:
        raise Fault(f"{where}: 'answer' must be one of A, B, C, D, it is {answer!r:.80}", NO_GOLD)
    return answer.strip()
