"""A request's document: parts in their order, and its chunks, made before a turn wants them.

Above: `chat_model`, `jobs` and `evidence`; below: text.chunks and `decoding`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from notepad_jax.reading.rules import Rules
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.documents.refusals import full
from notepad_jax.serve.documents.store import in_thread
from notepad_jax.serve.http.decoding import FileText
from notepad_jax.text.chunks import ChunkedDocument, NoRoom, sentence_pieces
from notepad_jax.types import Tokens


@dataclasses.dataclass(frozen=True)
class Parts:
    """A document in parts; a file stands in lines of its own."""

    parts: tuple[str | FileText, ...]

    @property
    def digests(self) -> list[str]:
        """What its files are now: a file may be sent again under its name."""
        return [part.digest for part in self.parts if isinstance(part, FileText)]

    def pieces(self) -> Iterator[str]:
        """Yields the parts' text; Refusal if a file was deleted meanwhile."""
        beside_file = False
        for number, part in enumerate(self.parts):
            is_file = isinstance(part, FileText)
            if number and (is_file or beside_file):
                yield "\n"
            if is_file:
                yield from part.pieces()
            else:
                yield part
            beside_file = is_file


class ReadAhead(ChunkedDocument):
    """Chunks that threads read and tokenise before a turn wants them, one thread at a time.

    A disk or a bucket may be slow, and no other request shall wait for it.
    """

    def __init__(self, served: Served, document: Parts, rules: Rules) -> None:
        pieces = sentence_pieces(served.tokenizer, rules.chunk_ends)
        super().__init__(served.tokenizer, document, rules.chunk_size, pieces=pieces)
        self.document, self._decode = document, served.tokenizer.decode
        self._one, self._counting = asyncio.Lock(), threading.Lock()
        self._letters = [0]  # that stand before the first chunks

    def __getitem__(self, k: int) -> Tokens:
        """As ChunkedDocument; Refusal (507) where the temporary disk is full."""
        try:
            return super().__getitem__(k)
        except NoRoom as why:
            raise full(str(why)) from None

    async def reach(self, k: int) -> None:
        """Returns when a turn over chunk `k` has all it asks for: that, and the one behind it.

        Raises what reading them raises.
        """
        if self.total_chunks is None:
            async with self._one:
                await in_thread(self._touch, k)

    def has(self, k: int) -> bool:
        """Says whether there is a chunk `k`, once it was reached."""
        with contextlib.suppress(IndexError):
            return self[k] is not None
        return False

    def letters_before(self, k: int) -> int:
        """Returns how many characters but white space stand before chunk `k`, which was read."""
        with self._counting:
            while len(self._letters) <= k:
                chunk = self._decode(self[len(self._letters) - 1])
                self._letters.append(self._letters[-1] + letters(chunk))
            return self._letters[k]

    def _touch(self, k: int) -> None:
        with contextlib.suppress(IndexError):  # the document ends before
            self[k], self[k + 1]


def letters(text: str) -> int:
    """Returns how many characters are no white space: what every tokenizer keeps."""
    return sum(map(len, text.split()))
