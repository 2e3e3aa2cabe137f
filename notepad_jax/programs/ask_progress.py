"""Progress events of a reading: which turn, what it writes, how far it is.

Above: ask; below: the server's way to text from tokens (serve.completions.choices).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable

from notepad_jax.programs.file_document import FileDocument
from notepad_jax.reading import memory_agent, rounds
from notepad_jax.serve.completions.choices import Delta, choice, completed
from notepad_jax.serve.completions.detokenizer import Saying
from notepad_jax.setup import compiled
from notepad_jax.telemetry.screen import Transcript
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.types import (
    Completer,
    Completion,
    Document,
    Prompt,
    SamplingParams,
    Streamer,
    Turn,
    TurnKind,
)

AHEAD = 1 << 18  # bytes of a file tokenised at first: its chunks are counted, or estimated well


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a reading: sent when a turn begins, with every few tokens that it writes, and
    when it has ended."""

    kind: TurnKind  # UPDATE: a memory is written; ANSWER: the answer is
    chunk: int  # the one that is read, counted from 1; of the answer, the last
    chunks: int | None  # of the document; None: not known yet
    exact: bool  # whether `chunks` is counted, and not estimated from the size of a file
    prompt: int  # tokens of the turn's prompt
    text: (
        str  # all that the turn wrote so far; of the answer, all of it in its earlier contexts too
    )
    ended: bool  # whether the turn has


class Aloud:
    """A `Completer` for turns of one kind that streams their text to a callback."""

    def __init__(
        self, completer: Completer, decode: Callable[..., str], telling: Telling, kind: TurnKind
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


class Telling:
    """The progress of one reading, reported to the screen and to the caller's callback."""

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
        if turn.kind is TurnKind.UPDATE:  # in a parallel reading its beginning was not reported
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


def _size(document: Document) -> int | None:
    if not isinstance(document, FileDocument) or document.path is None:
        return None
    return document.path.stat().st_size
