"""BEAM: conversations of 100K to 10M tokens, each with some twenty probing questions.

Two published forms, as src/beam/download_dataset.py of mohammadtavakoli78/BEAM reads the one and
writes the other:

- the Hugging Face hub's parquet (Mohammadta/BEAM, BEAM-10M): `conversation_id`, `chat` (nested
  lists of messages) and `probing_questions` (a Python literal), a row a conversation;
- a folder for each conversation, in the repository's chats/: `chat.json` (an array of batches of
  turns of messages) beside `probing_questions/probing_questions.json`.

Questions stand under ten abilities; the gold text is `answer`, `ideal_response`, `ideal_answer`,
`ideal_summary` or `expected_compliance`, by ability, and `rubric` lists what a good answer says.
The document is all messages in their order, role and content, as the published reader of whole
conversations has them (long_term_memory_methods.py). No text is kept: reading one parses its
conversation again, which takes memory for that conversation (10M tokens: 50 MB and their objects).

**Judged otherwise than published**: the paper has a model give each item of the rubric 0, 0.5 or 1.
Here it is ROUGE-L with the gold text. The rubric is in `Task.extra`, for a reward of the user's.
Below: parquet and sources. Above: formats and tasks.file_suite.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, parquet, rows, sources
from notepad_jax.data.admission import NO_GOLD, NO_QUESTION, NO_TEXT, Fault, OnFault
from notepad_jax.data.rows import Pair, Row
from notepad_jax.types import Document, Task

QUESTIONS = "probing_questions"
CHATS = ("chat_trunecated.json", "chat.json")  # spelt so; the first where there are both
GOLD = ("answer", "ideal_response", "ideal_answer", "ideal_summary", "expected_compliance")


@dataclasses.dataclass(frozen=True)
class HubDocument:
    """The conversation of one row of a parquet."""

    path: str
    place: int  # of the row, from 0

    def pieces(self) -> Iterator[str]:
        """Yields a message at a time; ValueError if the file is gone or broken by now."""
        yield from map(_said, messages(parquet.cell(self.path, "chat", self.place)))


@dataclasses.dataclass(frozen=True)
class ChatDocument:
    """The conversation of a chat.json."""

    path: str

    def pieces(self) -> Iterator[str]:
        """Yields a message at a time; ValueError if the file is gone or broken by now."""
        yield from map(_said, messages(_json(self.path)))


def read_hub(
    path: str | Path, on_block: sources.OnBlock | None = None, name: str = "",
    on_fault: OnFault = admission.refuse,
) -> list[Pair]:  # fmt: skip
    """Returns the tasks of a parquet, conversation by conversation; no length is known of any.

    `on_fault` is told of rows without messages, and of questions without words or gold text.
    Raises ValueError for a file without another question, or one that is no whole parquet.
    """
    if on_block is not None:
        for block in sources.blocks(path):
            on_block(block)
    return rows.pairs(path, name or Path(str(path)).name, _hub_rows(path), _tasks_of, on_fault)


def read_chat(
    path: str | Path, on_block: sources.OnBlock | None = None, name: str = "",
    on_fault: OnFault = admission.refuse,
) -> list[Pair]:  # fmt: skip
    """Returns the tasks of a chat.json and the probing_questions/ beside it; else as `read_hub`."""
    if on_block is not None:
        for block in sources.blocks(path):
            on_block(block)
    asked = f"{str(path).rpartition('/')[0] or '.'}/{QUESTIONS}/{QUESTIONS}.json"
    columns = {"chat": _json(path), QUESTIONS: _json(asked)}
    found = [_row(1, columns, ChatDocument(str(path)), str(path))]
    return rows.pairs(path, name or Path(str(path)).name, found, _tasks_of, on_fault)


def is_beside(file: Path) -> bool:
    """Whether a file of a conversation's folder is not the conversation itself."""
    for folder in file.parents:
        if (folder / QUESTIONS).is_dir():
            chats = [folder / chat for chat in CHATS if (folder / chat).is_file()]
            return file not in chats[:1]
    return False


def messages(found: Any) -> Iterator[Mapping[str, str]]:
    """Yields the messages (role, content) of nested batches, turns and plans, in their order."""
    if isinstance(found, Mapping):
        if isinstance(found.get("role"), str) and isinstance(found.get("content"), str):
            yield found
            return
        found = list(found.values())
    for one in found if isinstance(found, list) else []:
        yield from messages(one)


def _hub_rows(path: str | Path) -> Iterator[Row | Fault]:
    wanted = ["conversation_id", "chat", QUESTIONS]
    there = parquet.columns(path)
    for number, row in parquet.values(path, [name for name in wanted if name in there], 1):
        yield _row(number, row, HubDocument(str(path), number - 1), f"{path} row {number}")


def _row(number: int, columns: dict[str, Any], document: Document, where: str) -> Row | Fault:
    """Takes the conversation out of a row, once it is known to say something."""
    if not any(message["content"].strip() for message in messages(columns.pop("chat", None))):
        return Fault(f"{where} has no messages with role and content under 'chat'", NO_TEXT)
    return Row(number, columns, document)


def _tasks_of(row: Row, where: str, name: str) -> Iterator[Pair | Fault]:
    for ability, asked in _questions(row.columns.get(QUESTIONS), where).items():
        for number, question in enumerate(asked if isinstance(asked, list) else [asked], start=1):
            try:
                yield _task(question, ability, f"{name}-{ability}-{number}", row.document, where), 0
            except Fault as fault:
                yield fault


def _task(question: Any, ability: str, own: str, document: Document, where: str) -> Task:
    place = f"{where} {ability} {own.rpartition('-')[2]}"
    if not isinstance(question, Mapping) or not isinstance(question.get("question"), str):
        raise Fault(f"{place} has no text 'question', it is {question!r:.80}", NO_QUESTION)
    gold = next((question[key] for key in GOLD if question.get(key)), None)
    if not isinstance(gold, str):
        raise Fault(f"{place} has no gold text under any of {', '.join(GOLD)}", NO_GOLD)
    return Task(
        id=own,
        question=question["question"].strip(),
        document=document,
        answers=(gold,),
        source=f"beam/{ability}",
        metric="rouge_l",
        extra={key: question[key] for key in ("rubric", "difficulty") if key in question},
    )


def _questions(found: Any, where: str) -> Mapping[str, Any]:
    """Returns the questions by ability, from an object, its JSON, or a Python literal."""
    for parsed in (json.loads, ast.literal_eval) if isinstance(found, str) else ():
        try:
            found = parsed(found)
            break
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    if not isinstance(found, Mapping) or not found:
        raise Fault(f"{where}: {QUESTIONS!r} must be an object, it is {found!r:.80}", NO_QUESTION)
    return found


def _said(message: Mapping[str, str]) -> str:
    return f"{message['role']}: {message['content'].strip()}\n\n"


def _json(path: str | Path) -> Any:
    return sources.parse(sources.read(path), path, 1, 0)
