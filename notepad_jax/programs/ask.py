"""Answers one question about one document, for `notepad-jax ask` and the Python API's `Reader`.

The document is read as a stream, chunk by chunk, in constant memory. A turn may take minutes, so
what it writes is told while it is written (`Progress`), memory and answer, where the completer
streams; where it does not, as an endpoint, turn by turn. Telling changes no token. The memory
agent and the completer are those of training and evaluation. Above: `reader`, which keeps the
completer open; below: reading.memory_agent and ask_progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from notepad_jax.eval.readings import OpenTrace
from notepad_jax.programs.ask_progress import Aloud, Progress, Telling
from notepad_jax.programs.file_document import CannotRead, FileDocument
from notepad_jax.programs.subjects import Subject
from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.trace import MemoryChange, TraceFile, check
from notepad_jax.reading.turns import Turns
from notepad_jax.telemetry.screen import Screen
from notepad_jax.text.chunks import ChunkedDocument, sentence_pieces
from notepad_jax.text.pieces import Pieces
from notepad_jax.types import (
    Completer,
    Document,
    Finish,
    Tokens,
    Turn,
    TurnKind,
)

NO_QUESTION = "the question is empty; ask something, for example 'code of Ada ?'"


class Memory(NamedTuple):
    """The memory after a chunk that changed it."""

    chunk: int  # counted from 1; the last one, where notes of all were merged
    text: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of a reading, and the changes of its memory."""

    answer: str
    truncated: bool  # cut at the limit of an answer
    chunks: int  # that were read
    tokens: int  # of the document, in them
    memories: tuple[Memory, ...]  # one for every chunk that changed what was noted
    early: bool = False  # whether the reading ended before the document did


async def ask(
    completer: Completer,
    subject: Subject,
    rules: Rules,
    sampling: TurnSampling,
    document: Document,
    question: str,
    screen: Screen,
    trace: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda now: None,
) -> Answer:
    """Reads the document and answers; appends the reading, turn by turn, to the file `trace`.

    Raises ValueError for a question that is empty or too long, CannotRead for a document that
    is empty (and FileDocument's problems), CompleterFailed, and what `on_progress` raises.
    """
    tokenizer = subject.tokenizer
    if trace is not None:
        check_trace(trace)
    asked, chunks = encoded(subject, rules, question), chunked(subject, rules, document)
    transcript = screen.transcript("reading", "tokens")
    telling = Telling(chunks, document, rules.chunk_size, transcript, on_progress)
    telling.look_ahead()
    writes, answers = (Aloud(completer, tokenizer.decode, telling, kind) for kind in TurnKind)
    if rules.order != "serial":  # many turns are written at once, so none is streamed
        writes = completer
    course = under_way(subject, rules, trace)
    reads = memory_agent.read(
        writes, subject.template, rules, memory_agent.start(asked, chunks), sampling, answers
    )
    answer, made = await followed(reads, subject, chunks, course, telling.ended)
    transcript.finish()
    if trace is not None:
        append(trace, subject, document, question, answer, made, course)
    return answer


def under_way(subject: Subject, rules: Rules, trace: Path | None) -> OpenTrace:
    """Returns the open trace of a reading; it has its turns, too, if there is a `trace`."""
    if trace is None:
        return OpenTrace()
    return OpenTrace(Turns(Pieces(subject.tokenizer), rules, subject.template))


def encoded(subject: Subject, rules: Rules, question: str) -> Tokens:
    """Returns the question's ids; ValueError for one that is empty or too long."""
    asked = memory_agent.encode_question(subject.tokenizer, question, rules.max_question)
    if not question.strip() or not len(asked):
        raise ValueError(NO_QUESTION)
    return asked


def chunked(subject: Subject, rules: Rules, document: Document) -> ChunkedDocument:
    """Returns the document's chunks; CannotRead for one that is empty."""
    pieces = sentence_pieces(subject.tokenizer, rules.chunk_ends)
    chunks = ChunkedDocument(subject.tokenizer, document, rules.chunk_size, pieces=pieces)
    try:
        chunks[0]
    except IndexError:
        raise CannotRead(f"{_name(document)} is empty; there is nothing to read") from None
    return chunks


async def followed(
    reads: AsyncIterator[tuple[Turn, memory_agent.State]], subject: Subject,
    chunks: ChunkedDocument, course: OpenTrace, ended: Callable[[Turn, str | None], None],
) -> tuple[Answer, int]:  # fmt: skip
    """Records a reading to its end; returns the answer, and how many turns were made.

    `ended` is told each turn, with the memory that it left if that is a new one.
    """
    tokenizer, template = subject.tokenizer, subject.template
    memories: list[Memory] = []
    sizes: list[int] = []  # of the document's chunks that were read
    shown = tokenizer.decode(template.no_memory)
    async for turn, after in reads:
        course.turn(turn)
        if turn.first_read:
            sizes.append(turn.size)
        memory = tokenizer.decode(template.shown_memory(after.memory_tokens))
        changed = turn.kind is TurnKind.UPDATE and memory != shown
        if changed:
            shown = memory
            read = len(sizes) if turn.level else turn.unit + 1  # notes are of the whole document
            memories.append(Memory(read, memory))
            course.add(MemoryChange(turn.chunk, memory, len(after.memory_tokens)))
        ended(turn, memory if changed else None)
    answer = Answer(
        answer=tokenizer.decode(memory_agent.answered(after)),
        truncated=turn.completion.finish is not Finish.STOP,
        chunks=len(sizes),
        tokens=sum(sizes),
        memories=tuple(memories),
        early=rounds.chunk_or_none(chunks, len(sizes)) is not None,
    )
    return answer, after.turns + after.contexts


def check_asked(document: FileDocument, questions: Sequence[str]) -> None:
    """Raises what `ask` would, as far as nothing has to be opened for it but the file."""
    if not all(question.strip() for question in questions):
        raise ValueError(NO_QUESTION)
    # What a pipe has given is gone: it is opened once.
    if document.path is not None and not document.path.is_fifo():
        next(document.pieces(), None)


def check_trace(path: Path) -> None:
    """Raises ValueError for a file to which no reading can be appended."""
    try:
        if path.exists():
            check(path)
        else:
            with _alone(path) as file:
                if not len(file):
                    path.unlink()
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; name a new file, or one that a trace was written to") from None


def append(
    path: Path, subject: Subject, document: Document, question: str, answer: Answer, turns: int,
    course: OpenTrace,
) -> None:  # fmt: skip
    """Appends a reading to a trace."""
    told = {
        "question": question,
        "task_id": _name(document),
        "source": subject.name,
        "answer": answer.answer,
        "status": "truncated" if answer.truncated else "answered",
        "turns": turns,
        "tokens": answer.tokens,
    }
    with _alone(path) as file:
        file.add(told, course.memories, course.kept())


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[TraceFile]:
    """Opens a trace to append to, when nobody else who asks has it open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as held:
        with contextlib.suppress(OSError):  # of a disk that cannot lock
            fcntl.flock(held, fcntl.LOCK_EX)
        with TraceFile(path) as file:  # which cuts off what is not a whole line
            yield file


def _name(document: Document) -> str:
    return document.name if isinstance(document, FileDocument) else "the document"
