"""Incremental UTF-8 decoding of documents, and the errors of those that are no text.

Above: `store` (what clients sent) and `roots` (what they may name); below: nothing of ours.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterator

from notepad_jax.serve.http.errors import Refusal, bad, shown


class NotText(ValueError):
    """The error of bytes that are no text; says which."""


class Decoding:
    """An incremental decoder of UTF-8 that comes in blocks, wherever they are cut."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a byte order mark is no text
        self._size = 0

    def add(self, block: bytes, final: bool = False) -> str:
        """Returns the text of one block more; raises NotText."""
        if b"\0" in block:
            raise NotText(f"it is binary: byte {self._size + block.index(0):,} is zero")
        try:
            text = self._decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise NotText(f"it is not UTF-8 near byte {self._size + error.start:,}") from None
        self._size += len(block)
        return text


@dataclasses.dataclass(frozen=True)
class FileText:
    """A document's text, which can be read from its beginning any number of times."""

    id: str
    digest: str  # changes when the bytes do
    blocks: Callable[[], Iterator[bytes]]  # Refusal where they are not what they were

    def pieces(self) -> Iterator[str]:
        """Yields the text; Refusal if it is none, and as `blocks` has it."""
        decoding = Decoding()
        try:
            for block in self.blocks():
                if text := decoding.add(block):
                    yield text
            decoding.add(b"", final=True)
        except NotText as why:
            raise unreadable(self.id, str(why), "file_id") from None


def unreadable(id: str, why: str, param: str) -> Refusal:
    """Returns the Refusal (400) for a document that is no text."""
    mend = "convert it to UTF-8 text first, for example with iconv or pdftotext"
    return bad(param, f"the file {shown(id)} cannot be read, since {why}; {mend}")
