"""MemoryAgentBench: one long text, and up to hundreds of questions about it in the same row.

The form is that of the Hugging Face data set ai-hyz/MemoryAgentBench, one parquet for each of its
four splits, as HUST-AI-HYZ/MemoryAgentBench reads it (utils/eval_data_utils.py,
conversation_creator.py): `context`, `questions`, `answers` (of each question one text or several of
which any is right) and an object `metadata` whose `source` names the data set and whose
`qa_pair_ids` name the questions. A row becomes a task for each question, all about one document,
which stays in its file. What the published templates say about how to answer (utils/templates.py)
is said here in other words behind each question, for the metrics are strict.

Metrics are the published ones by source (README, "Clarification on Evaluation Metrics";
utils/eval_other_utils.py): `published_memory_sub_em` for ruler_qa and factconsolidation, the same
of the first line for eventqa; `published_memory_em` for detective_qa, the same of the first line
for icl. **Two are judged by a model as published** and here by strings: longmemeval by
`published_memory_sub_em`, infbench_sum by ROUGE-L. recsys_redial is left out: its gold answers are
numbers of films in a file of its own, entity2id.json. Below: rows. Above: formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from notepad_jax.data import admission
from notepad_jax.data.admission import METRIC, NO_GOLD, NO_QUESTION, Fault
from notepad_jax.data.rows import Pair, Row
from notepad_jax.types import Task


@dataclasses.dataclass(frozen=True)
class Judging:
    """How the questions of a data set are answered and judged."""

    metric: str
    how: str = ""  # to answer; empty: the questions say so themselves


KINDS: Mapping[str, Judging] = {  # by what the source's name begins with
    "ruler_qa": Judging("published_memory_sub_em", "Give the answer alone."),
    "eventqa": Judging("published_memory_sub_em_line", "Name the event that happens next."),
    "longmemeval": Judging("published_memory_sub_em", "Answer in as few words as you can."),
    "icl": Judging("published_memory_em_line", "Give the number of the label alone."),
    "infbench_sum": Judging("rouge_l"),
    "detective_qa": Judging("published_memory_em"),
    "factconsolidation": Judging(
        "published_memory_sub_em",
        "Where facts contradict each other the one with the largest number holds. Give the answer "
        "alone.",
    ),
}


def matches(columns: Mapping[str, Any]) -> bool:
    """Whether these are the columns of such a row."""
    return "questions" in columns and "answers" in columns and "question" not in columns


def tasks_of(row: Row, where: str, name: str) -> Iterator[Pair | Fault]:
    """Yields a task, or what is wrong with it, for each question; `name`-K are their ids.

    Raises Fault for a row of which no question can be told.
    """
    metadata = row.columns.get("metadata") or row.columns
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("source"), str):
        raise Fault(f"{where} has no text 'source' in its 'metadata'; give the published rows")
    source = metadata["source"]
    kind = _kind(source, where)
    for number, (question, gold) in enumerate(_asked(row.columns, where), start=1):
        try:
            yield (
                Task(
                    id=f"{name}-{number}",
                    question=_question(question, kind, f"{where} question {number}"),
                    document=row.document,
                    answers=_texts(gold, f"{where} question {number}"),
                    source=f"memory_agent_bench/{source}",
                    metric=kind.metric,
                    extra=_named(metadata, number - 1),
                ),
                0,
            )
        except Fault as fault:
            yield fault


def _kind(source: str, where: str) -> Judging:
    for name, kind in KINDS.items():
        if source.lower().startswith(name):
            return kind
    if source.lower().startswith("recsys"):
        raise Fault(
            f"{where} is of {source!r:.40}, whose gold answers are numbers of films in a file of "
            f"its own (entity2id.json), which is not read; remove the row",
            METRIC,
        )
    raise Fault(f"{where} is of {source!r:.40}; known are {', '.join(KINDS)}", METRIC)


def _asked(columns: Mapping[str, Any], where: str) -> list[tuple[Any, Any]]:
    """Returns (question, gold answer or answers); of a single question all answers are its own."""
    questions, answers = columns["questions"], columns["answers"]
    questions = questions if isinstance(questions, list) else [questions]
    answers = answers if isinstance(answers, list) else [answers]
    if len(questions) == 1:
        return [(questions[0], answers)]
    if len(questions) != len(answers) or not questions:
        raise Fault(
            f"{where} has {len(questions)} questions and {len(answers)} answers; it needs as many",
            NO_GOLD if questions else NO_QUESTION,
        )
    return list(zip(questions, answers, strict=True))


def _question(question: Any, kind: Judging, where: str) -> str:
    if not isinstance(question, str) or not question.strip():
        raise Fault(f"{where} must be a text, it is {question!r:.80}", NO_QUESTION)
    return f"{question.strip()}\n{kind.how}".strip()


def _texts(gold: Any, where: str) -> tuple[str, ...]:
    """Returns gold answers, of which any is right, from a text, a list or a list of lists."""
    found = gold if isinstance(gold, list) else [gold]
    flat = [text for one in found for text in (one if isinstance(one, list) else [one])]
    if not flat or not all(isinstance(text, str) for text in flat):
        why = admission.TYPE if flat else NO_GOLD
        raise Fault(f"{where}: its answers must be a text or texts, they are {gold!r:.80}", why)
    return tuple(flat)


def _named(metadata: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The published name of a question, where the row tells it."""
    names = metadata.get("qa_pair_ids")
    known = isinstance(names, list) and place < len(names)
    return {"qa_pair_id": names[place]} if known else {}
