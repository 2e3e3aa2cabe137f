"""Tasks to JSON objects and back: the rows that both forms of task files hold.

    {"id": ..., "question": ..., "answers": [...], "source": ..., "metric": ...,
     "contract": ..., "length": 8192, "evidence": [[text, place], ...],
     "note_script": [[sentence, notes], ...], "extra": {...},
     "document": ...}

The metadata comes first and the document last, written piece by piece; `length` is the
document's length in tokens that its maker aimed at, 0 if unknown. Rows that a user wrote by
hand need a question, answers (one text, or several) and a document or context: an `id` that is
missing is the name of the file and the number of the row, the `source` the name of the file, and
where no `metric` is named an answer is right that contains a gold one (`sub_em`), wherever it
stands (`auto`). What only a reward of the user's looks at is `extra`. Above: jsonl and
array_records; below: admission, which says what may be wrong with one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, sources
from notepad_jax.data.admission import NO_GOLD, NO_QUESTION, Fault, OnFault
from notepad_jax.types import Document, Evidence, Task, TaughtNote

Pair = tuple[Task, int]  # a task and its length in tokens

METRIC, CONTRACT = "sub_em", "auto"  # how rows are judged that do not say


@dataclasses.dataclass(frozen=True)
class Row:
    """A row as it was found in a file, and its text, which stayed there."""

    number: int  # from 1; of a file of lines, the line of an editor
    columns: dict[str, Any]  # all but the text
    document: Document


# (row, "FILE row 7", its name where it has no id) -> its tasks, one for each question.
Convert = Callable[[Row, str, str], Iterable[Pair | Fault]]


def pairs(
    path: str | Path, name: str, found: Iterable[Row | Fault], convert: Convert,
    on_fault: OnFault = admission.refuse,
) -> list[Pair]:  # fmt: skip
    """Makes tasks of a file's rows, in their order; `on_fault` is told of those left out.

    A row that has no id is called `name`:NUMBER. Places of faults count tasks, so that a row with
    several questions has several. Raises ValueError for two tasks of one id, for a file without a
    row that can be used, and what `found` raises.
    """
    made: list[Pair] = []
    known: dict[str, int] = {}
    left_out, first_fault = 0, None
    for place, (number, pair) in enumerate(_converted(path, name, found, convert)):
        where = f"{path} row {number}"
        try:
            if isinstance(pair, Fault):
                raise pair
            admission.check(pair[0], where)
        except Fault as fault:
            fault.place = place
            on_fault(fault)
            left_out, first_fault = left_out + 1, first_fault or fault
            continue
        if pair[0].id in known:
            first = known[pair[0].id]
            raise ValueError(f"{where} has the id {pair[0].id!r} of row {first}; ids must differ")
        known[pair[0].id] = number
        made.append(pair)
    if not made:
        raise nothing_left(path, left_out, first_fault)
    return made


def _converted(
    path: str | Path, name: str, found: Iterable[Row | Fault], convert: Convert
) -> Iterator[tuple[int, Pair | Fault]]:
    """Yields (row number, one of its tasks or what is wrong); 0 for a row that was not read."""
    for row in found:
        if isinstance(row, Fault):
            yield 0, row
            continue
        try:
            for pair in convert(row, f"{path} row {row.number}", f"{name}:{row.number}"):
                yield row.number, pair
        except Fault as fault:
            yield row.number, fault


def nothing_left(path: str | Path, count: int, first: Fault | None) -> ValueError:
    """Returns what is said of a file of whose `count` rows none can be used, the first for why."""
    if first is None:
        return ValueError(f"{path} has no tasks")
    return ValueError(f"none of the {count:,} rows of {path} can be used: {first}")


def written(task: Task, length: int) -> Iterator[bytes]:
    """Yields the JSON object of a task in parts, without a line break.

    Raises ValueError for an empty document and for text that UTF-8 cannot express.
    """
    head = {
        "id": task.id,
        "question": task.question,
        "answers": list(task.answers),
        "source": task.source,
        "metric": task.metric,
        "contract": task.contract,
        "length": length,
        "evidence": [[fact.text, fact.place] for fact in task.evidence],
        **({"note_script": [[n.sentence, n.notes] for n in task.script]} if task.script else {}),
        **({"extra": dict(task.extra)} if task.extra else {}),
    }
    blank = True
    try:
        said = _TEXT_KEY.sub(_escaped, json.dumps(head, ensure_ascii=False))
        yield said[:-1].encode() + b', "document": "'
        for piece in task.document.pieces():
            blank = blank and not piece.strip()
            yield json.dumps(piece, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"task {task.id!r} holds half a surrogate pair, which UTF-8 cannot express; "
            f"decode its text with errors='replace'"
        ) from None
    if blank:
        raise ValueError(f"task {task.id!r} has an empty document; give it a text to read")
    yield b'"}'


# A key that is called as the text is, in `extra`, at any depth: a text's own quotes are escaped.
_TEXT_KEY = re.compile(r'"(document|context)":')


def _escaped(key: re.Match[str]) -> str:
    """Writes a key's first letter as an escape: readers look for the text by its key's bytes."""
    return f'"\\u{ord(key[1][0]):04x}{key[1][1:]}":'


def task_of(columns: dict[str, Any], document: Document, where: str, name: str) -> Pair:
    """Makes a task from the columns of a row; Fault saying what is wrong with which.

    `name` ("tasks.jsonl:7") is the task's id, and before the colon its source, if it has none.
    """
    usual = {"id": name, "source": source_of(name), "metric": METRIC}
    text = {key: _text({**usual, **columns}, key, where) for key in ("id", "source", "metric")}
    question = _text(columns, "question", where, NO_QUESTION)
    answers = _answers(columns, where)
    length = columns.get("length", 0)
    if type(length) is not int or not 0 <= length < 2**63:
        raise Fault(f"{where}: 'length' must be a number of tokens, it is {length!r:.80}")
    evidence = columns.get("evidence", [])
    if not isinstance(evidence, list) or not all(map(_is_evidence, evidence)):
        raise Fault(
            f"{where}: 'evidence' must be a list of [text, place in 0..1], it is {evidence!r:.80}"
        )
    script = columns.get("note_script", [])
    if not isinstance(script, list) or not all(map(_is_note, script)):
        raise Fault(
            f"{where}: 'note_script' must be a list of [sentence, notes], two texts, it is "
            f"{script!r:.80}"
        )
    contract = "plain" if "metric" in columns else CONTRACT
    task = Task(
        **text,
        question=question,
        document=document,
        answers=answers,
        contract=_text({"contract": contract, **columns}, "contract", where),
        evidence=tuple(Evidence(fact, float(place)) for fact, place in evidence),
        script=tuple(TaughtNote(sentence, notes) for sentence, notes in script),
        extra=_extra(columns, where),
    )
    return task, length


def source_of(name: str) -> str:
    """Returns the source of a row that does not tell its own: its file's name without the end."""
    return Path(name.rpartition(":")[0]).stem


def _answers(columns: dict[str, Any], where: str) -> tuple[str, ...]:
    key = "answers" if "answers" in columns or "answer" not in columns else "answer"
    if key not in columns:
        has = sources.columns_of(columns)
        raise Fault(f"{where} has no column 'answers'; it has {has}", NO_GOLD)
    answers = columns[key]
    if isinstance(answers, str) and answers:
        return (answers,)
    if not isinstance(answers, list) or not all(isinstance(gold, str) for gold in answers):
        why = admission.TYPE if answers else NO_GOLD
        raise Fault(f"{where}: {key!r} must be a list of strings, it is {answers!r:.80}", why)
    if not answers:
        raise Fault(f"{where} has no gold answer; every task needs at least one", NO_GOLD)
    return tuple(answers)


def _text(columns: dict[str, Any], name: str, where: str, why: str = admission.TYPE) -> str:
    if name not in columns:
        raise Fault(f"{where} has no column {name!r}; it has {sources.columns_of(columns)}", why)
    if not isinstance(columns[name], str) or not columns[name]:
        raise Fault(f"{where}: {name!r} must be a text, it is {columns[name]!r:.80}", why)
    return columns[name]


def _extra(columns: dict[str, Any], where: str) -> dict[str, Any]:
    extra = columns.get("extra", {})
    if not isinstance(extra, dict):
        raise Fault(f"{where}: 'extra' must be an object with columns, it is {extra!r:.80}")
    try:
        json.dumps(extra)
    except (TypeError, ValueError):  # a parquet holds times and bytes, which no reward is handed
        raise Fault(f"{where}: 'extra' must be numbers and texts, it is {extra!r:.80}") from None
    return extra


def _is_note(note: Any) -> bool:
    return isinstance(note, list) and len(note) == 2 and all(isinstance(n, str) for n in note)


def _is_evidence(fact: Any) -> bool:
    if not isinstance(fact, list) or len(fact) != 2:
        return False
    text, place = fact
    return isinstance(text, str) and type(place) in (int, float) and 0 <= place < 1


def parsed(raw: bytes, where: str) -> dict[str, Any]:
    """Returns a JSON object; Fault for a column given twice, ValueError for anything else."""
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=sources.once(where))
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8; convert the file, e.g. with iconv") from None
    except Fault:
        raise
    except (ValueError, RecursionError) as problem:
        reason = "nested too deeply" if isinstance(problem, RecursionError) else problem
        raise ValueError(f"{where} is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {type(found).__name__}, not an object with named columns")
    return found
