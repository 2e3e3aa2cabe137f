"""Answers several questions about one document: `ask --questions` and `Reader.read_all`.

All are read at once over the same chunks. Where the template has the question behind the chunk
(`document_first`, `question_last`) they share its keys and values, so the document is prefilled
once for all of them. Each is answered as if it had been asked alone: same prompts, same noise.
Above: `reader`; below: ask, whose parts these are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from notepad_jax.eval.readings import OpenTrace
from notepad_jax.programs import ask
from notepad_jax.programs.ask import Answer
from notepad_jax.programs.file_document import CannotRead
from notepad_jax.programs.subjects import Subject
from notepad_jax.reading import memory_agent
from notepad_jax.reading.loop import first_failure
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.telemetry.screen import Screen
from notepad_jax.types import Completer, Document, Tokens, Turn, TurnKind


def of_file(path: str | Path) -> list[str]:
    """Returns the questions of a file, one a line; CannotRead where there are none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # as editors of Windows write it
    except UnicodeDecodeError:
        raise CannotRead(f"{path} is no UTF-8 text; write one question a line") from None
    except OSError as problem:
        raise CannotRead(f"cannot read {path}: {problem.strerror or problem}") from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise CannotRead(f"{path} has no question; write one a line")
    return found


async def ask_all(
    completer: Completer,
    subject: Subject,
    rules: Rules,
    sampling: TurnSampling,
    document: Document,
    questions: Sequence[str],
    screen: Screen,
    trace: Path | None = None,
) -> list[Answer]:
    """Reads the document for all questions at once; returns their answers in their order.

    Each reading is appended to the file `trace`, turn by turn. Raises as `ask.ask` does; a
    question that cannot be asked is named, before anything is read.
    """
    if trace is not None:
        ask.check_trace(trace)
    asked = [_encoded(subject, rules, question) for question in questions]
    chunks = ask.chunked(subject, rules, document)
    if len(questions) > 1 and not subject.template.shares_questions:
        screen.warn(
            f"template {subject.template.name} has the question before the chunk: the document is "
            f"read anew for each of {len(questions)} questions; document_first reads it once"
        )
    bar = screen.bar(f"reading for {len(questions)} questions", None, "turns")

    def ended(turn: Turn, memory: str | None) -> None:
        bar.advance(1, chunk=turn.unit + (turn.kind is TurnKind.UPDATE))

    async def one(ids: Tokens) -> tuple[Answer, int, OpenTrace]:
        course = ask.under_way(subject, rules, trace)
        state = memory_agent.start(ids, chunks)
        reads = memory_agent.read(completer, subject.template, rules, state, sampling)
        return *await ask.followed(reads, subject, chunks, course, ended), course

    with first_failure():
        async with asyncio.TaskGroup() as together:
            readings = [together.create_task(one(ids)) for ids in asked]
    bar.finish()
    made = [reading.result() for reading in readings]
    if trace is not None:
        for question, (answer, turns, course) in zip(questions, made, strict=True):
            ask.append(trace, subject, document, question, answer, turns, course)
    return [answer for answer, _, _ in made]


def _encoded(subject: Subject, rules: Rules, question: str) -> Tokens:
    try:
        return ask.encoded(subject, rules, question)
    except ValueError as problem:
        raise ValueError(f"{question[:60]!r}: {problem}") from None
