"""A document cut into chunks of C tokens: chunk k is ids[C * k : C * (k + 1)], no overlap.

Or of at most C tokens, each ending where a sentence does (`CHUNK_ENDS`), so that no fact is torn
in two; what has no sentence's end in the second half of C tokens is cut at C.

`Documents` gives every reading of a document the same `ChunkedDocument`, so the text is
tokenised once however many questions and samples there are, and however unevenly they read.
Text is tokenised as far as a reading asked; its ids are written down as they are made, the
first `IN_MEMORY` of them in memory and the rest in a temporary file without a name, so that
a document of any length costs little memory and no chunk is ever made twice. Indexing past
the end raises IndexError; what went wrong on the way is raised again for every reading that
comes to that place. Above: reading.memory_agent, rollout.collector and the programs; below:
pieces and the tokenizer.
"""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import BinaryIO

import numpy as np

from notepad_jax.text.pieces import Pieces
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import NO_TOKENS, Document, Task, Tokens, tokens

IN_MEMORY = 2**18  # tokens of a document that are kept in memory: 1 MB; more go to a file
RECENT = 4  # chunks of a document that are kept as they were handed out
_BYTES = 4  # of a token
CHUNK_ENDS = ("tokens", "sentence")  # where a chunk ends: after C tokens, or at a sentence's end
_SENTENCE_END = re.compile(r"""[.!?]["'\u201d\u2019)\]]*\s*\Z|\n\s*\Z""")


class NoRoom(ValueError):
    """The error of a temporary disk that takes no more of a document's token ids."""


class Documents:
    """A cache of documents' chunks: all readings of a document object under way share them.

    Documents of more than `max_document` tokens are centre-truncated (None: none is), and
    counted when that is found out: how many, and the tokens that are not read. `chunk_ends` is
    one of CHUNK_ENDS.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chunk_size: int,
        max_document: int | None = None,
        chunk_ends: str = CHUNK_ENDS[0],
    ) -> None:
        _check_size(chunk_size)
        if max_document is not None:
            _check_limit(max_document)
        self._how = tokenizer, chunk_size, max_document
        self._pieces = sentence_pieces(tokenizer, chunk_ends)
        # A document is known by identity, which holds for as long as its chunks hold on to it.
        self._live: weakref.WeakValueDictionary[int, ChunkedDocument] = (
            weakref.WeakValueDictionary()
        )
        self.truncated_documents = 0
        self.truncated_tokens = 0

    def __call__(self, task: Task) -> ChunkedDocument:
        """Returns the chunks of the task's document; they live as long as a reading holds them."""
        chunks = self._live.get(id(task.document))
        if chunks is None:
            tokenizer, chunk_size, limit = self._how
            chunks = ChunkedDocument(
                tokenizer, task.document, chunk_size, limit, self, self._pieces
            )
            self._live[id(task.document)] = chunks
        return chunks

    def ended(self, left_out: int) -> None:
        """Counts a document whose end was found, and the tokens of it that are not read."""
        self.truncated_documents += left_out > 0
        self.truncated_tokens += left_out

    def failed(self, document: Document) -> None:
        """Forgets a failed document: readings under way raise, one that begins later retries."""
        self._live.pop(id(document), None)


class ChunkedDocument:
    """The chunks of one document, tokenised once and as far as they were asked for.

    With `pieces` chunks end where sentences do. `tokens_read` counts the tokens made so far,
    truncated ones included; `total_chunks` is None until the end was seen, and where sentences
    end chunks, until the last one was. With a limit the whole document is tokenised first.

    Raises IndexError past the end, and whatever the document or the tokenizer raised (an
    IndexError of theirs as a RuntimeError) for every chunk that is not whole before the place
    where that happened; NoRoom where the temporary disk takes no more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        document: Document,
        chunk_size: int,
        max_document: int | None = None,
        owner: Documents | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        _check_size(chunk_size)
        self._pieces = pieces
        self._starts = [0]  # of the chunks whose places are known, where sentences end them
        self._document = document  # known by identity to Documents, so it must not go before us
        self._chunk_size = chunk_size
        self._limit = max_document
        self._owner = owner
        self._coming = _encoded(tokenizer, document)
        self._ids = _Written()
        self._kept: int | None = None  # tokens that are read, once their number is known
        self._failure: BaseException | None = None
        self._origin: TracebackType | None = None  # where it was raised first
        self._recent: list[tuple[int, Tokens]] = [(-1, NO_TOKENS)] * RECENT  # chunk k at k % RECENT
        self.tokens_read = 0

    @property
    def total_chunks(self) -> int | None:
        if self._kept is None:
            return None
        if self._pieces is None:
            return -(-self._kept // self._chunk_size)
        return len(self._starts) - 1 if self._starts[-1] == self._kept else None

    def __getitem__(self, k: int) -> Tokens:
        if k < 0:
            raise IndexError(f"there is no chunk {k}; chunks are counted from 0")
        number, chunk = self._recent[k % RECENT]  # readings side by side ask for the same ones
        if number != k:
            chunk = self._chunk(k)
            self._recent[k % RECENT] = k, chunk
        return chunk

    def _chunk(self, k: int) -> Tokens:
        if self._pieces is None:
            return self._span(k, k * self._chunk_size)
        while len(self._starts) <= k + 1:
            start = self._starts[-1]
            ids = self._span(k, start)
            whole = len(ids) < self._chunk_size or start + len(ids) == self._kept
            self._starts.append(start + (len(ids) if whole else self._sentences(ids)))
        return self._between(self._starts[k], self._starts[k + 1])

    def _sentences(self, ids: Tokens) -> int:
        """Returns how many of the tokens, at least half, end with a sentence; or else all."""
        for stop in range(len(ids) - 1, len(ids) // 2, -1):
            if self._pieces[int(ids[stop])][:1].isspace():  # a word begins
                before = "".join(self._pieces[int(i)] for i in ids[max(0, stop - 3) : stop])
                if _SENTENCE_END.search(before):
                    return stop
        return len(ids)

    def _span(self, k: int, start: int) -> Tokens:
        """Returns C tokens from `start` on, or those that are left; chunk k begins there."""
        stop = start + self._chunk_size
        while self._kept is None and (self._limit is not None or self.tokens_read < stop):
            self._read_on()
        if self._kept is not None:
            stop = min(stop, self._kept)
            if start >= stop:
                raise IndexError(f"there is no chunk {k}; the document has {self.total_chunks}")
        return self._between(start, stop)

    def _between(self, start: int, stop: int) -> Tokens:
        """Tokens start to stop of those that are read; behind their centre, some are left out."""
        left_out = 0 if self._kept is None else self.tokens_read - self._kept
        centre = self._kept // 2 if left_out else stop
        if stop <= centre:
            return self._ids.read(start, stop)
        behind = self._ids.read(max(start, centre) + left_out, stop + left_out)
        if start >= centre:
            return behind
        return tokens(np.concatenate([self._ids.read(start, centre), behind]))

    def _read_on(self) -> None:
        """Tokenises the next block of text; sets `_kept` at the end, or raises."""
        if self._failure is None:
            try:
                ids = next(self._coming, None)
                if ids is None:
                    self._end()
                else:
                    self._ids.append(ids)
                    self.tokens_read += len(ids)
                return
            except BaseException as failure:  # kept: a generator that broke off looks exhausted
                self._failure, self._origin = _not_the_end(failure), failure.__traceback__
                if self._owner is not None:
                    self._owner.failed(self._document)
        raise self._failure.with_traceback(self._origin)

    def _end(self) -> None:
        limit = self.tokens_read if self._limit is None else self._limit
        self._kept = min(self.tokens_read, limit)
        if self._owner is not None:
            self._owner.ended(self.tokens_read - self._kept)


class _Written:
    """Token ids as they are made, to be read back by place: first in memory, then in a file."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._file: BinaryIO | None = None  # where ids[IN_MEMORY:] stand
        self._size = 0  # bytes

    def append(self, ids: Tokens) -> None:
        """Raises NoRoom where the temporary disk takes no more; then nothing is appended."""
        data = np.ascontiguousarray(ids, np.int32).tobytes()
        room = IN_MEMORY * _BYTES - len(self._held)
        if data[room:]:
            try:
                self._to_file(data[room:], self._size - len(self._held))
            except OSError as problem:
                raise _lost(problem) from None
        self._held += data[:room]
        self._size += len(data)

    def _to_file(self, data: bytes, at: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # buffers hide that a disk is full
            weakref.finalize(self, self._file.close)
        while data:
            count = os.pwrite(self._file.fileno(), data, at)
            data, at = data[count:], at + count

    def read(self, start: int, stop: int) -> Tokens:
        """Returns ids[start:stop], which must have been appended."""
        first, last, border = start * _BYTES, stop * _BYTES, len(self._held)
        data = bytes(self._held[first:last])
        if last > border:
            begin = max(first, border)
            try:
                data += os.pread(self._file.fileno(), last - begin, begin - border)
            except OSError as problem:
                raise _lost(problem) from None
        return np.frombuffer(data, np.int32)


def _lost(problem: OSError) -> NoRoom:
    return NoRoom(
        f"the token ids of a document cannot be kept in {tempfile.gettempdir()} "
        f"({problem.strerror or problem}); make room there, or set TMPDIR to another disk"
    )


def _not_the_end(failure: BaseException) -> BaseException:
    """A reading takes an IndexError for the document's end, so none may come from inside it."""
    if isinstance(failure, IndexError):
        return RuntimeError(f"the document raised IndexError: {failure}")
    return failure


def _encoded(tokenizer: Tokenizer, document: Document) -> Iterator[Tokens]:
    """A document is opened when its first chunk is asked for, and fails no earlier."""
    yield from tokenizer.encode_pieces(_texts(document))


def _texts(document: Document) -> Iterator[str]:
    """Yields the pieces of a document, which may be of a user's class; ValueError for no text."""
    pieces = document.pieces()
    if not isinstance(pieces, Iterable):
        raise ValueError(f"a document's pieces() yields its text, and this returned {pieces!r:.40}")
    for piece in pieces:
        if not isinstance(piece, str):
            raise ValueError(f"a document's pieces() yields texts, and this yielded {piece!r:.40}")
        yield piece


def sentence_pieces(tokenizer: Tokenizer, chunk_ends: str) -> Pieces | None:
    """Returns what sentences are seen by where they end chunks; ValueError for an unknown end."""
    if chunk_ends not in CHUNK_ENDS:
        raise ValueError(f"chunk_ends is {chunk_ends!r}; use one of {', '.join(CHUNK_ENDS)}")
    return Pieces(tokenizer) if chunk_ends == "sentence" else None


def _check_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; a chunk needs at least 1 token")


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise ValueError(f"a document limit of {limit} tokens leaves nothing; use at least 1")
