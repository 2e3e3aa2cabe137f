"""A text file of any size as a document, streamed piece by piece."""

from __future__ import annotations

import codecs
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECE = 1 << 10  # bytes read at a time: few, so that bytes read tell how far the tokens are


class CannotRead(ValueError):
    """The document is missing, empty or not text."""


@dataclasses.dataclass
class FileDocument:
    """A text file, or standard input where `path` is None; decoded as it is read."""

    path: Path | None
    bytes_read: int = 0  # of the current pass

    def __post_init__(self) -> None:
        if self.path is None and sys.stdin is None:
            raise CannotRead("standard input is closed; name a file, or pipe one in")

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
        decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a byte order mark is no text
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
            self.bytes_read += len(block)
            if text:
                yield text
            if not block:
                return
