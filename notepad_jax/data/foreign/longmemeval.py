"""LongMemEval: questions about what a user said in many chats, a row a question.

The form is that of `longmemeval_s.json`, `_m`, `_oracle` and their cleaned editions, as the README
and the reader (src/generation/run_generation.py) of xiaowu0162/LongMemEval have it: `question_id`,
`question_type`, `question`, `answer`, `question_date`, `haystack_dates`, `haystack_sessions` (each
a list of {"role", "content"}, where `has_answer` marks a turn with evidence). Sessions are told in
the order of their dates, each under its date, and the question with the day on which it is asked,
as there. A text is spread over its row, which is parsed again whenever it is read: one row of 0.5
MB (s) or 6 MB (m) is held at a time, and of a file nothing.

**Judged otherwise than published**: the paper asks a model whether an answer is right. Here an
answer is right that contains the gold one (`sub_em`); where the gold text is no answer but says
what a good one has (preferences, questions that cannot be answered) it is ROUGE-L with that text.
Questions whose id ends in `_abs` are a source of their own, `longmemeval/abstention`.
Below: tables. Above: formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, rows, sources, tables
from notepad_jax.data.admission import NO_GOLD, NO_QUESTION, NO_TEXT, Fault, OnFault
from notepad_jax.data.foreign.corpus import find_word
from notepad_jax.data.rows import CONTRACT, Pair, Row
from notepad_jax.types import Evidence, Task

COLUMN = "haystack_dates"  # that only these rows have
ABSTENTION, PREFERENCE = "abstention", "single-session-preference"


@dataclasses.dataclass(frozen=True)
class SessionsDocument:
    """The chats of one row, in a file's bytes [start, stop): parsed again when they are read."""

    path: str
    start: int
    stop: int

    def pieces(self) -> Iterator[str]:
        """Yields a session at a time; ValueError if the file has changed since it was opened."""
        yield from _told(tables.row_at(self.path, self.start, self.stop), self.path)


def read(
    path: str | Path, on_block: sources.OnBlock | None = None, name: str = "",
    on_fault: OnFault = admission.refuse,
) -> list[Pair]:  # fmt: skip
    """Returns the tasks of a .json or .jsonl file, in its order; no length is known of any.

    A task's id is the file's name and its question's id (longmemeval_s/e47becba), since three
    files ask the same questions. `on_fault` is told of rows without a question, an answer or
    sessions. Raises ValueError for a file without another row, or cut short.
    """
    found = _rows(path, on_block)
    return rows.pairs(path, name or Path(str(path)).name, found, _tasks_of, on_fault)


def _rows(path: str | Path, on_block: sources.OnBlock | None) -> Iterator[Row | Fault]:
    for number, start, stop, row in tables.spans(path, on_block):
        document = SessionsDocument(str(path), start, stop)
        yield row if isinstance(row, Fault) else Row(number, row, document)


def _tasks_of(row: Row, where: str, name: str) -> list[Pair]:
    columns = row.columns
    kind, answer = _text(columns, "question_type", where), _answer(columns, where)
    own = _text(columns, "question_id", where)
    kind = ABSTENTION if own.endswith("_abs") else kind
    asked = _text(columns, "question", where, NO_QUESTION)
    task = Task(
        id=f"{rows.source_of(name)}/{own}",
        question=f"Today is {_text(columns, 'question_date', where)}. {asked}",
        document=row.document,
        answers=(answer,),
        source=f"longmemeval/{kind}",
        metric="rouge_l" if kind in (ABSTENTION, PREFERENCE) else "sub_em",
        contract=CONTRACT,
        evidence=tuple(_evidence(columns, answer, where)),
    )
    return [(task, 0)]


def _evidence(columns: Mapping[str, Any], answer: str, where: str) -> Iterator[Evidence]:
    """Yields the answer's words at each marked turn that says them."""
    total = sum(map(len, _told(columns, where)))
    at = 0
    for number, (date, turns) in enumerate(_sessions(columns, where), start=1):
        at += len(_title(number, date))
        for turn in turns:
            place = find_word(answer, _said(turn))
            if turn.get("has_answer") and place >= 0:
                yield Evidence(answer, (at + place) / total)
            at += len(_said(turn))


def _told(columns: Mapping[str, Any], where: str) -> Iterator[str]:
    for number, (date, turns) in enumerate(_sessions(columns, where), start=1):
        yield _title(number, date) + "".join(map(_said, turns))


def _title(number: int, date: str) -> str:
    return f"Session {number}, {date}\n\n"


def _said(turn: Mapping[str, Any]) -> str:
    return f"{turn['role']}: {turn['content'].strip()}\n\n"


def _sessions(columns: Mapping[str, Any], where: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Returns [(date, turns)] by date; Fault where a row has no such sessions."""
    dates, sessions = columns.get(COLUMN), columns.get("haystack_sessions")
    if not isinstance(dates, list) or not all(isinstance(date, str) for date in dates):
        raise Fault(f"{where}: {COLUMN!r} must be a list of texts, it is {dates!r:.80}")
    if not isinstance(sessions, list) or not all(map(_is_session, sessions)):
        raise Fault(
            f"{where}: 'haystack_sessions' must be a list of lists of turns with role and "
            f"content, it is {sessions!r:.80}"
        )
    if len(dates) != len(sessions):
        raise Fault(f"{where} has {len(sessions)} sessions and {len(dates)} dates; give each one")
    if not any(turn["content"].strip() for session in sessions for turn in session):
        raise Fault(f"{where} has no word in its sessions; remove the row", NO_TEXT)
    return sorted(zip(dates, sessions, strict=True), key=lambda dated: dated[0])


def _is_session(session: Any) -> bool:
    return isinstance(session, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in session
    )


def _answer(columns: Mapping[str, Any], where: str) -> str:
    """The gold answer; some are numbers in the published files."""
    answer = columns.get("answer")
    if type(answer) not in (str, int, float) or not str(answer).strip():
        raise Fault(f"{where}: 'answer' must be a text or a number, it is {answer!r:.80}", NO_GOLD)
    return str(answer).strip()


def _text(columns: Mapping[str, Any], name: str, where: str, why: str = admission.TYPE) -> str:
    found = columns.get(name)
    if not isinstance(found, str) or not found.strip():
        has = sources.columns_of(dict(columns))
        raise Fault(f"{where} has no text under {name!r}; it has {has}", why)
    return found.strip()
