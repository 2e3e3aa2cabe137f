"""The dataset files of published memory agents, row by row, as tasks.

Three forms of one thing, a question about numbered documents:

- training and dev parquet: `prompt` (messages, of which the user's is the question), `context`,
  `reward_model` (an object, or its JSON) with `ground_truth`, `extra_info` with `index`,
  `question`, `num_docs`, and `data_source`;
- evaluation files `eval_50.json` to `eval_6400.json`: `context`, `input`, `answers`, `num_docs`,
  `index`;
- jsonl: `prompt`, `label`, and `metadata` with `context` and `ground_truth`.

Gold answers are a list or one text. A row is known by its file and number, for `index` repeats.
Its answer is judged as that of a question of ours among paragraphs (`ruler-qa`). The text itself
has been left in the file by the code that found the row. Below: rows. Above: formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from notepad_jax.data import rows, sources
from notepad_jax.data.admission import NO_GOLD, NO_QUESTION, Fault
from notepad_jax.data.rows import Pair, Row
from notepad_jax.types import Task

SHORTEST, FEWEST = 7 * 1024, 50  # the published lengths: 7K tokens are 50 documents, and so on
LONGEST = FEWEST * 2**9


def matches(columns: Mapping[str, Any]) -> bool:
    """Whether these are the columns of such a row."""
    return "question" not in columns and ("prompt" in columns or "input" in columns)


def task_of(row: Row, where: str, name: str) -> Pair:
    """Makes the task `name` of a row; Fault saying what is wrong with which column."""
    columns = row.columns
    extra = _object(columns.get("extra_info"), "extra_info", where)
    metadata = _object(columns.get("metadata"), "metadata", where)
    task = Task(
        id=name,
        question=_question(columns, extra, where),
        document=row.document,
        answers=_answers(columns, metadata, where),
        source=_source(columns, name),
        metric=rows.METRIC,
        contract=rows.CONTRACT,
    )
    return task, published_length(columns.get("num_docs", extra.get("num_docs")))


def published_length(documents: Any) -> int:
    """Returns the tokens that the published figures give to so many documents; 0 if none."""
    if type(documents) is not int or not FEWEST <= documents <= LONGEST or documents % FEWEST:
        return 0
    times = documents // FEWEST
    return SHORTEST * times if times & (times - 1) == 0 else 0


def _source(columns: Mapping[str, Any], name: str) -> str:
    said = columns.get("data_source")
    return said if isinstance(said, str) and said.strip() else rows.source_of(name)


def _question(columns: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> str:
    if "input" in columns:
        said, column = columns["input"], "input"
    else:
        said, column = _said(columns["prompt"]), "prompt"
        said = extra.get("question") if said is None else said
    if not isinstance(said, str) or not said.strip():
        raise Fault(
            f"{where}: {column!r} must hold the question, as a text or a user's message; it is "
            f"{columns[column]!r:.80}",
            NO_QUESTION,
        )
    return said.strip()


def _said(prompt: Any) -> str | None:
    """Returns what the last user's message of a prompt says; None if there is none."""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    said = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else None


def _answers(
    columns: Mapping[str, Any], metadata: Mapping[str, Any], where: str
) -> tuple[str, ...]:
    """Returns the gold answers from wherever this form keeps them."""
    judged = _object(columns.get("reward_model"), "reward_model", where)
    for holder, column in (
        (columns, "answers"),
        (judged, "ground_truth"),
        (metadata, "ground_truth"),
        (columns, "label"),
    ):
        if column in holder and holder[column] is not None:
            return _texts(holder[column], column, where)
    raise Fault(
        f"{where} has no gold answer: none of 'answers', 'reward_model', 'metadata' and 'label' "
        f"holds one; it has {sources.columns_of(dict(columns))}",
        NO_GOLD,
    )


def _texts(gold: Any, column: str, where: str) -> tuple[str, ...]:
    found = gold if isinstance(gold, list) else [gold]
    if not all(isinstance(text, str | int | float) for text in found):
        raise Fault(f"{where}: {column!r} must be a text or texts, it is {gold!r:.80}")
    answers = tuple(str(text).strip() for text in found if str(text).strip())
    if not answers:
        raise Fault(f"{where} has no gold answer: {column!r} is empty", NO_GOLD)
    return answers


def _object(value: Any, column: str, where: str) -> Mapping[str, Any]:
    """Returns an object, or the one whose JSON this is; an empty one for none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Fault(
                f"{where}: {column!r} must be an object or its JSON, it is {value!r:.80}"
            ) from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Fault(f"{where}: {column!r} must be an object, it is {value!r:.80}")
    return value
