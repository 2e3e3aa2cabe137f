"""One question about one document: what `notepad-jax ask` and the Python API's `Reader` do.

The document is read as a stream, chunk by chunk, in constant memory. A turn may take minutes, so
what it writes is told while it is written (`Progress`), memory and answer, where the completer
streams; where it does not, as an endpoint, turn by turn. Telling changes no token. The memory
agent and the completer are those of training and evaluation. Above: `reader`, which keeps the
completer open; below: reading.memory_agent, and the server's way to text from tokens
(serve.completions.choices).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from notepad_jax.eval.readings import UnderWay
from notepad_jax.programs.file_document import CannotRead, FileDocument
from notepad_jax.programs.subjects import Subject
from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.memory_agent import TurnSampling
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.trace import MemoryChange, TraceFile, check
from notepad_jax.reading.turns import Turns
from notepad_jax.serve.completions.choices import Delta, choice, completed
from notepad_jax.serve.completions.detokenizer import Saying
from notepad_jax.setup import compiled
from notepad_jax.telemetry.screen import Screen, Transcript
from notepad_jax.text.chunks import ChunkedDocument, sentence_pieces
from notepad_jax.text.pieces import Pieces
from notepad_jax.types import (
    Completer,
    Completion,
    Document,
    Finish,
    Prompt,
    SamplingParams,
    Streamer,
    Tokens,
    Turn,
    TurnKind,
)

NO_QUESTION = "the question is empty; ask something, for example 'code of Ada ?'"
AHEAD = 1 << 18  # bytes of a file tokenised at first: its chunks are counted, or estimated well


class Memory(NamedTuple):
    """What was noted down when a chunk had been read."""

    chunk: int  # counted from 1
    text: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was answered, and how the memory came to hold it."""

    answer: str
    truncated: bool  # cut at the limit of an answer
    chunks: int  # that were read
    tokens: int  # of the document, in them
    memories: tuple[Memory, ...]  # one for every chunk that changed what was noted
    early: bool = False  # whether the reading ended before the document did


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a reading stands: told when a turn begins, with every few tokens that it writes, and
    when it has ended."""

    kind: TurnKind  # UPDATE: a memory is written; ANSWER: the answer is
    chunk: int  # the one that is read, counted from 1; of the answer, the last
    chunks: int | None  # of the document; None: nobody can tell yet
    exact: bool  # whether `chunks` is counted, and not estimated from the size of a file
    prompt: int  # tokens of the turn's prompt
    text: (
        str  # all that the turn wrote so far; of the answer, all of it in its earlier contexts too
    )
    ended: bool  # whether the turn has


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
    telling = _Telling(chunks, document, rules.chunk_size, transcript, on_progress)
    telling.look_ahead()
    writes, answers = (_Aloud(completer, tokenizer.decode, telling, kind) for kind in TurnKind)
    if rules.order != "serial":  # many write at once, so none of them is heard
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


def under_way(subject: Subject, rules: Rules, trace: Path | None) -> UnderWay:
    """Returns where a reading is taken down; its turns, too, if there is a `trace`."""
    if trace is None:
        return UnderWay()
    return UnderWay(Turns(Pieces(subject.tokenizer), rules, subject.template))


def encoded(subject: Subject, rules: Rules, question: str) -> Tokens:
    """Returns the question's ids; ValueError for one that is empty or too long."""
    asked = memory_agent.encode_question(subject.tokenizer, question, rules.max_question)
    if not len(asked):
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
    chunks: ChunkedDocument, course: UnderWay, ended: Callable[[Turn, str | None], None],
) -> tuple[Answer, int]:  # fmt: skip
    """Takes a reading down to its end; returns the answer, and how many turns were made.

    `ended` is told each turn, with the memory that it left if that is a new one.
    """
    tokenizer, template = subject.tokenizer, subject.template
    memories: list[Memory] = []
    sizes: list[int] = []  # of the document's chunks that were read
    shown = tokenizer.decode(template.no_memory)
    async for turn, after in reads:
        course.turn(turn)
        if turn.kind is TurnKind.UPDATE and turn.level == turn.round == 0:
            sizes.append(turn.size)
        memory = tokenizer.decode(template.shown_memory(after.memory_tokens))
        changed = turn.kind is TurnKind.UPDATE and memory != shown
        if changed:
            shown = memory
            memories.append(Memory(turn.unit + 1, memory))
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
    if document.path is not None:
        next(document.pieces(), None)


def check_trace(path: Path) -> None:
    """Raises ValueError for a file to which no reading can be appended."""
    if not path.exists():
        return
    try:
        check(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; name a new file, or one that a trace was written to") from None


def append(
    path: Path, subject: Subject, document: Document, question: str, answer: Answer, turns: int,
    course: UnderWay,
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
    with TraceFile(path) as file:
        file.add(told, course.memories, course.turns.kept() if course.turns else None)


# ---------------------------------------------------------------- what is told meanwhile


class _Aloud:
    """Completes turns of one kind, and tells what they write while they do; a `Completer`."""

    def __init__(
        self, completer: Completer, decode: Callable[..., str], telling: _Telling, kind: TurnKind
    ) -> None:
        self._completer, self._decode, self._telling = completer, decode, telling
        self._kind = kind

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """As the completer does, whose failures it raises."""
        self._telling.begun(self._kind, len(prompt.tokens))
        if not isinstance(self._completer, Streamer):
            made = await self._completer.complete(prompt, sampling)
            self._telling.grown(self._decode(memory_agent.written(made)), len(made.tokens))
            return made
        course = choice(self._completer, prompt, sampling, Saying(self._decode), 0)
        return await completed(course, self._heard)

    def _heard(self, delta: Delta) -> None:
        self._telling.grown(delta.text, len(delta.tokens))


class _Telling:
    """Where one reading stands, told to the screen and to whoever wants to know."""

    def __init__(
        self, chunks: ChunkedDocument, document: Document, chunk_size: int,
        transcript: Transcript, on_progress: Callable[[Progress], None],
    ) -> None:  # fmt: skip
        self._chunks, self._chunk_size = chunks, chunk_size
        self._document, self._size = document, _size(document)
        self._transcript, self._on_progress = transcript, on_progress
        self._now = Progress(TurnKind.UPDATE, 0, None, False, 0, "", True)
        self._tokens = self._written = 0  # of the document; of this turn
        self._began, self._compiled = time.perf_counter(), compiled.watched().seconds
        self._place = ""

    def look_ahead(self) -> None:
        """Tokenises the beginning of a file; raises what reading it raises."""
        if not self._size:
            return
        with contextlib.suppress(IndexError):  # the end
            for k in itertools.takewhile(lambda _: self._there < AHEAD, itertools.count()):
                self._chunks[k]

    @property
    def _there(self) -> int:
        """Bytes of a file that have been read."""
        return self._document.bytes_read if isinstance(self._document, FileDocument) else 0

    def begun(self, kind: TurnKind, prompt: int) -> None:
        """A turn begins with a prompt of so many tokens."""
        before = self._now
        said = before.text if kind is before.kind is TurnKind.ANSWER else ""  # it goes on
        chunk = before.chunk + (kind is TurnKind.UPDATE)
        if kind is TurnKind.UPDATE and before.chunk == self._chunks.total_chunks:
            chunk = 1  # of the next pass
        self._place = ""  # known when it has ended
        self._now = Progress(kind, chunk, *self._of(), prompt, said, False)
        self._began, self._compiled = time.perf_counter(), compiled.watched().seconds
        self._written = 0
        self._tell()

    def _of(self) -> tuple[int | None, bool]:
        """How many chunks there are, and whether that is known; None before there is a guess."""
        total = self._total()
        chunks = None if total is None else -(-total // self._chunk_size)
        return chunks, self._chunks.total_chunks is not None

    def grown(self, text: str, tokens: int) -> None:
        """The turn has written so much more, so its prompt has been read."""
        self._written += tokens
        self._now = dataclasses.replace(self._now, text=self._now.text + text)
        self._tell()

    def ended(self, turn: Turn, memory: str | None) -> None:
        """The turn has ended, with a new memory if it wrote one."""
        self._place = rounds.place(turn)
        now = self._now = dataclasses.replace(self._now, ended=True)
        if turn.kind is TurnKind.UPDATE:  # of a parallel reading nobody heard it begin
            of, exact = self._of()
            now = self._now = dataclasses.replace(now, chunk=turn.unit + 1, chunks=of, exact=exact)
        self._tell()
        said = f"{self._label()}, {self._took()}"
        if memory is not None:
            self._transcript.wrote(f"{said}: {memory}")
        elif now.kind is TurnKind.UPDATE:
            self._transcript.passed(f"{said}: the memory stays as it was")
        else:
            self._transcript.passed(said)

    def _tell(self) -> None:
        now = self._now
        if now.ended or self._written or now.kind is TurnKind.ANSWER:
            self._tokens = min(now.chunk * self._chunk_size, self._chunks.tokens_read)
        text = now.text or f"reading {now.prompt:,} tokens"
        self._transcript.under_way(self._label(), text, self._tokens, self._total())
        self._on_progress(now)

    def _label(self) -> str:
        now = self._now
        if now.kind is TurnKind.ANSWER:
            return "answer"
        if self._place:
            return self._place
        of = "" if now.chunks is None else f" of {'' if now.exact else 'about '}{now.chunks:,}"
        return f"chunk {now.chunk:,}{of}"

    def _took(self) -> str:
        compiling = compiled.watched().seconds - self._compiled
        of_it = f", {compiling:.1f} s of it compiling" if compiling >= 1.0 else ""
        tokens = f"{self._written:,} tokens in " if self._written else ""
        return f"{tokens}{time.perf_counter() - self._began:.1f} s{of_it}"

    def _total(self) -> int | None:
        """The document's tokens; an estimate until its end was seen."""
        read = self._chunks.tokens_read
        if self._chunks.total_chunks is not None:
            return read
        if not self._size or not self._there:
            return None
        return max(read, round(read * self._size / self._there))


def _name(document: Document) -> str:
    return document.name if isinstance(document, FileDocument) else "the document"


def _size(document: Document) -> int | None:
    if not isinstance(document, FileDocument) or document.path is None:
        return None
    return document.path.stat().st_size
