"""A document cut into chunks of C tokens: chunk k is ids[C * k : C * (k + 1)], no overlap.

`ChunkList` is for documents whose ids fit in memory (training); `ChunkStream` tokenises
as the reading goes on and keeps only a window of chunks, so that a document of any length
is read in constant memory. Both are `Chunks`: indexing past the end raises IndexError.
The readings of one document share one of these objects (`DocumentChunks` in training,
`DocumentStreams` in evaluation), so the text is tokenised once however many questions and
samples there are. Above: reading.memory_agent and rollout.collector; below: the tokenizer.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterator

import numpy as np

from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Chunks, Document, Task, Tokens, tokens

WINDOW = 2**18  # tokens of a streamed document that are kept


def centre_truncate(ids: Tokens, limit: int) -> Tokens:
    """Returns at most `limit` tokens: the first half and the last half of a longer text."""
    if limit < 1:
        raise ValueError(f"a document limit of {limit} tokens leaves nothing; use at least 1")
    if len(ids) <= limit:
        return tokens(ids)
    first = limit // 2
    return tokens(np.concatenate([ids[:first], ids[len(ids) - (limit - first) :]]))


class ChunkList:
    """Chunks of ids [L] held in memory; ceil(L / chunk_size) of them."""

    def __init__(self, ids: Tokens, chunk_size: int) -> None:
        _check_size(chunk_size)
        ids = tokens(ids)
        self._chunks = tuple(ids[i : i + chunk_size] for i in range(0, len(ids), chunk_size))

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, k: int) -> Tokens:
        if k < 0:
            raise IndexError(f"there is no chunk {k}; chunks are counted from 0")
        return self._chunks[k]


class ChunkStream:
    """Chunks of a document of any length, tokenised on demand, `window` of them kept.

    Asking for a chunk older than the window starts again from the document's beginning,
    which is slow and therefore counted in `restarts`. `tokens_read` counts all tokens
    produced so far by the current pass; `total_chunks` is None until the end was seen.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        document: Document,
        chunk_size: int,
        window: int = 64,
    ) -> None:
        _check_size(chunk_size)
        if window < 2:
            raise ValueError(f"a window of {window} chunks is too small; use at least 2")
        self._tokenizer = tokenizer
        self._document = document
        self._chunk_size = chunk_size
        self._kept: collections.deque[Tokens] = collections.deque(maxlen=window)
        self.restarts = 0
        self.total_chunks: int | None = None
        self._start()

    def _start(self) -> None:
        encoded = self._tokenizer.encode_pieces(self._document.pieces())
        self._coming = _cut(encoded, self._chunk_size)
        self._kept.clear()
        self._next = 0  # index of the chunk that `_coming` yields next
        self.tokens_read = 0

    def __getitem__(self, k: int) -> Tokens:
        if k < 0:
            raise IndexError(f"there is no chunk {k}; chunks are counted from 0")
        if self.total_chunks is not None and k >= self.total_chunks:
            raise IndexError(f"there is no chunk {k}; the document has {self.total_chunks}")
        if k < self._next - len(self._kept):
            self.restarts += 1
            self._start()
        while self._next <= k:
            self._read_one()
        return self._kept[k - self._next]

    def _read_one(self) -> None:
        chunk = next(self._coming, None)
        if chunk is None:
            self.total_chunks = self._next
            raise IndexError(f"the document has {self._next} chunks")
        self._kept.append(chunk)
        self._next += 1
        self.tokens_read += len(chunk)


class DocumentChunks:
    """Task -> Chunks, one object for all tasks that share a document object.

    Documents longer than `max_document` tokens are centre-truncated (training only; the
    number of such documents is `truncated`). Lives as long as the readings it serves:
    it holds on to the documents, because it knows them by identity.
    """

    def __init__(self, tokenizer: Tokenizer, chunk_size: int, max_document: int) -> None:
        _check_size(chunk_size)
        self._tokenizer = tokenizer
        self._chunk_size = chunk_size
        self._max_document = max_document
        self._known: dict[int, tuple[Document, Chunks]] = {}
        self.truncated = 0

    def __call__(self, task: Task) -> Chunks:
        key = id(task.document)
        if key not in self._known:
            self._known[key] = task.document, self._make(task.document)
        return self._known[key][1]

    def _make(self, document: Document) -> Chunks:
        parts = list(self._tokenizer.encode_pieces(document.pieces()))
        ids = tokens(np.concatenate(parts)) if parts else tokens()
        self.truncated += len(ids) > self._max_document
        return ChunkList(centre_truncate(ids, self._max_document), self._chunk_size)


class DocumentStreams:
    """Task -> Chunks for documents of any length, in constant memory.

    All readings of a document that are under way share one stream; when the last of them
    ends, it goes. They read at nearly the same pace, so that a window of WINDOW tokens
    hardly ever makes a document start again.
    """

    def __init__(self, tokenizer: Tokenizer, chunk_size: int) -> None:
        _check_size(chunk_size)
        self._tokenizer = tokenizer
        self._chunk_size = chunk_size
        self._live: weakref.WeakValueDictionary[int, ChunkStream] = weakref.WeakValueDictionary()

    def __call__(self, task: Task) -> Chunks:
        stream = self._live.get(id(task.document))
        if stream is None:
            window = max(2, WINDOW // self._chunk_size)
            stream = ChunkStream(self._tokenizer, task.document, self._chunk_size, window)
            self._live[id(task.document)] = stream
        return stream


def _check_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; a chunk needs at least 1 token")


def _cut(encoded: Iterator[Tokens], chunk_size: int) -> Iterator[Tokens]:
    """Re-cuts a stream of id arrays of any length into arrays of `chunk_size`."""
    held: list[Tokens] = []
    count = 0
    for ids in itertools.chain(encoded):
        held.append(ids)
        count += len(ids)
        if count < chunk_size:
            continue
        joined = np.concatenate(held)
        whole = count - count % chunk_size
        for start in range(0, whole, chunk_size):
            yield tokens(joined[start : start + chunk_size])
        held, count = [joined[whole:]], count - whole
    if count:
        yield tokens(np.concatenate(held))
