"""One question about one document: what `notepad-jax ask` and the Python API's `Reader` do.

The document is read as a stream, chunk by chunk, in constant memory; the note that the policy
keeps is shown whenever it changes. The memory agent and the completer are those of training and
evaluation. Above: `reader`, which keeps the completer open; below: reading.memory_agent.
"""

from __future__ import annotations

import codecs
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from notepad_jax.eval.readings import UnderWay
from notepad_jax.programs.subjects import Subject
from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import Rules, TurnSampling
from notepad_jax.reading.trace import MemoryChange, TraceFile, check
from notepad_jax.reading.turns import Turns
from notepad_jax.telemetry.progress import Screen
from notepad_jax.text.chunks import ChunkedDocument, sentence_pieces
from notepad_jax.text.pieces import Pieces
from notepad_jax.types import Completer, Document, Finish, TurnKind

PIECE = 1 << 16  # bytes read at a time


class CannotRead(ValueError):
    """The document is missing, empty or not text."""


@dataclasses.dataclass
class FileDocument:
    """A text file, or standard input where `path` is None; decoded as it is read."""

    path: Path | None
    bytes_read: int = 0  # of the current pass

    @property
    def name(self) -> str:
        return "standard input" if self.path is None else str(self.path)

    def pieces(self) -> Iterator[str]:
        """Raises CannotRead for anything but UTF-8 text."""
        if self.path is None:
            yield from self._decoded(sys.stdin.buffer)
            return
        try:
            with self.path.open("rb") as file:
                yield from self._decoded(file)
        except OSError as error:
            raise CannotRead(f"cannot read {self.path}: {error.strerror}") from None

    def _decoded(self, file: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        self.bytes_read = 0
        while True:
            at, block = self.bytes_read, file.read(PIECE)
            if b"\0" in block:
                raise CannotRead(
                    f"{self.name} is a binary file (byte {at + block.index(0):,} is zero); "
                    f"convert it to text first"
                )
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise CannotRead(
                    f"{self.name} is not UTF-8 text (near byte {at + error.start:,}); "
                    f"convert it, for example with iconv"
                ) from None
            if text:
                yield text
            if not block:
                return
            self.bytes_read += len(block)


class Memory(NamedTuple):
    """What was noted down when a chunk had been read."""

    chunk: int  # counted from 1
    text: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was answered, and how the memory came to hold it."""

    answer: str
    truncated: bool  # cut at the limit of an answer
    chunks: int
    tokens: int  # of the document
    memories: tuple[Memory, ...]  # one for every chunk that changed what was noted


async def ask(
    completer: Completer,
    subject: Subject,
    rules: Rules,
    sampling: TurnSampling,
    document: Document,
    question: str,
    screen: Screen,
    trace: Path | None = None,
) -> Answer:
    """Reads the document and answers; appends the reading, turn by turn, to the file `trace`.

    Raises ValueError for a question that is empty or too long, CannotRead for a document that
    is empty (and FileDocument's problems), and CompleterFailed.
    """
    tokenizer, template = subject.tokenizer, subject.template
    if trace is not None:
        check_trace(trace)
    asked = memory_agent.encode_question(tokenizer, question, rules.max_question)
    if not len(asked):
        raise ValueError("the question is empty; ask something, for example 'code of Ada ?'")
    chunks = ChunkedDocument(
        tokenizer, document, rules.chunk_size, pieces=sentence_pieces(tokenizer, rules.chunk_ends)
    )
    try:
        chunks[0]
    except IndexError:
        raise CannotRead(f"{_name(document)} is empty; there is nothing to read") from None

    bar = screen.bar("reading", _size(document), "bytes")
    course = UnderWay(Turns(Pieces(tokenizer)) if trace is not None else None)
    seen = 0
    memories: list[Memory] = []
    shown = tokenizer.decode(template.no_memory)
    state = memory_agent.start(asked, chunks)
    async for turn, after in memory_agent.read(completer, template, rules, state, sampling):
        course.turn(turn)
        if turn.kind is not TurnKind.UPDATE:
            continue
        memory = tokenizer.decode(template.shown_memory(after.memory_tokens))
        if memory != shown:
            shown = memory
            memories.append(Memory(turn.chunk + 1, memory))
            course.add(MemoryChange(turn.chunk, memory, len(after.memory_tokens)))
            screen.say(f"chunk {turn.chunk + 1:,}: {memory}")
        read = document.bytes_read if isinstance(document, FileDocument) else 0
        bar.advance(read - seen, tokens=chunks.tokens_read, memory=shown)
        seen = read
    bar.finish()
    answer = Answer(
        answer=tokenizer.decode(memory_agent.answered(after)),
        truncated=turn.completion.finish is not Finish.STOP,
        chunks=chunks.total_chunks,
        tokens=chunks.tokens_read,
        memories=tuple(memories),
    )
    if trace is not None:
        made = answer.chunks + after.contexts
        _append(trace, subject, document, question, answer, made, course)
    return answer


def check_trace(path: Path) -> None:
    """Raises ValueError for a file to which no reading can be appended."""
    if not path.exists():
        return
    try:
        check(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; name a new file, or one that a trace was written to") from None


def _append(
    path: Path, subject: Subject, document: Document, question: str, answer: Answer, turns: int,
    course: UnderWay,
) -> None:  # fmt: skip
    told = {
        "question": question,
        "task_id": _name(document),
        "source": subject.name,
        "answer": answer.answer,
        "status": "truncated" if answer.truncated else "answered",
        "turns": turns,
        "tokens": answer.tokens,
    }
    with TraceFile(path) as file:
        file.add(told, course.memories, course.turns.kept() if course.turns else None)


def _name(document: Document) -> str:
    return document.name if isinstance(document, FileDocument) else "the document"


def _size(document: Document) -> int | None:
    if not isinstance(document, FileDocument) or document.path is None:
        return None
    return document.path.stat().st_size
