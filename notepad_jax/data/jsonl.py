"""Task files with one row a line, written and read with documents in constant memory.

The metadata of a row comes first and the document last, so a reader gets the questions
without decoding the texts: `read` scans the file once, checks every row, and hands out
documents that know their byte range and decode it piece by piece when they are read. A
document of 3.5 million tokens is therefore never one string, neither when it is written
nor when it is read. Above: files; below: rows and sources.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from notepad_jax.data import rows, sources
from notepad_jax.data.rows import Pair

METADATA_LIMIT = 16 << 20  # bytes of a row beside its document
PIECE = 1 << 16  # bytes decoded at a time; hundreds of documents are read at once
_BLANK = 4096  # bytes: a longer document is not asked whether it is all white space


def write(name: str, pairs: Iterable[Pair]) -> int:
    """Writes a row a line to the local file `name`, piece by piece; returns how many."""
    count = 0
    with open(name, "wb") as file:
        for task, length in pairs:
            for part in rows.written(task, length):
                file.write(part)
            file.write(b"\n")
            count += 1
    return count


def read(path: str | Path, on_block: sources.OnBlock | None = None) -> list[Pair]:
    """Returns the tasks of a file with their lengths; `files.read` says what is refused."""
    pairs: list[Pair] = []
    known: dict[str, int] = {}
    for row in _scan(path, on_block):
        where = f"{path} row {row.number}"
        pair = rows.task_of(row.columns, FileDocument(str(path), row.start, row.stop), where)
        first = known.setdefault(pair[0].id, row.number)
        if first != row.number:
            raise ValueError(f"{where} has the id {pair[0].id!r} of row {first}; ids must differ")
        pairs.append(pair)
    if not pairs:
        raise ValueError(f"{path} has no tasks")
    return pairs


@dataclasses.dataclass(frozen=True)
class FileDocument:
    """A JSON string inside a file: bytes [start, stop) between its quotes."""

    path: str
    start: int
    stop: int

    def pieces(self) -> Iterator[str]:
        """Yields the text; ValueError if the file has changed since it was scanned."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        held = ""
        try:
            for block in sources.blocks(self.path, self.start, self.stop, PIECE):
                held += decoder.decode(block)
                end = _UNITS.match(held).end()
                if end:
                    yield json.loads(f'"{held[:end]}"')
                held = held[end:]
                if len(held) > _LONGEST_ESCAPE:
                    break
            decoder.decode(b"", final=True)
            whole = not held
        except (UnicodeDecodeError, json.JSONDecodeError):
            whole = False
        if not whole:
            raise ValueError(
                f"{self.path} changed after it was opened: bytes {self.start:,} to "
                f"{self.stop:,} are no document any more; start again"
            )


@dataclasses.dataclass(frozen=True)
class _Row:
    number: int  # from 1; blank lines count, so it is the line of an editor
    columns: dict[str, Any]  # all but the document
    start: int  # the document's bytes in the file, between the quotes
    stop: int


# What of a JSON string can be decoded by itself: plain characters and escapes that are
# complete (both halves of a surrogate pair). Possessive, so that a block takes linear time.
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_PLAIN = r'[^"\\\x00-\x1f]*+'
_UNITS = re.compile(f"{_PLAIN}(?:{_ESCAPE}{_PLAIN})*+")
_UNITS_RAW = re.compile(_UNITS.pattern.encode())
_LONGEST_ESCAPE = 12  # \ud83d\ude00
_KEY = re.compile(rb'(?<!\\)"document"[ \t]*:[ \t]*"')


def _scan(path: str | Path, on_block: sources.OnBlock | None) -> Iterator[_Row]:
    """Reads rows one by one: what stands before the document, its byte range, what follows."""
    window = _Window(path, on_block)
    for number in itertools.count(1):
        where = f"{path} row {number}"
        head, ends = window.until_document(where)
        if head is None:
            return
        if ends and not head.strip():
            continue
        if ends:
            columns = rows.parsed(head, where)  # says what is wrong with it, if anything is
            if "document" not in columns:
                raise ValueError(
                    f"{where} has no column 'document'; it has {sources.columns_of(columns)}"
                )
            raise ValueError(f"{where}: 'document' must be a text")
        start = window.at
        blank = window.skip_string(where)
        stop = window.at
        tail = window.until_newline(where)
        # With the document taken out, what is left must be a JSON object of its own.
        columns = rows.parsed(head + tail, where)
        if columns.pop("document", None) != "":
            raise ValueError(f"{where} has no text under 'document'; every task needs one")
        if blank:
            raise ValueError(f"{where} has an empty document; remove the row")
        yield _Row(number, columns, start, stop)


class _Window:
    """The bytes of a file from `at` on, as far as they had to be read."""

    def __init__(self, path: str | Path, on_block: sources.OnBlock | None) -> None:
        self.at = 0
        self._held, self._next = b"", 0  # what is consumed is dropped when more is read
        self._blocks = sources.blocks(path, on_block=on_block)

    def _more(self) -> bool:
        block = next(self._blocks, b"")
        self._held, self._next = self._held[self._next :] + block, 0
        return bool(block)

    def _take(self, end: int) -> bytes:
        taken = self._held[self._next : end]
        self.at += len(taken)
        self._next = end
        return taken

    def until_document(self, where: str) -> tuple[bytes | None, bool]:
        """Consumes up to the document's first character, or a line that has no document.

        Returns (bytes, whether the line ends there); (None, True) at the end of the file.
        """
        while True:
            newline = self._held.find(b"\n", self._next)
            end = newline if newline >= 0 else len(self._held)
            key = _KEY.search(self._held, self._next, end)
            if key:
                return self._take(key.end()), False
            if newline >= 0:
                return self._take(newline + 1), True
            if end - self._next > METADATA_LIMIT:
                raise ValueError(
                    f'{where} has no "document" within {METADATA_LIMIT:,} bytes; put the metadata '
                    f"before it, and one JSON object on a line"
                )
            if not self._more():
                rest = self._take(len(self._held))
                return rest or None, True

    def skip_string(self, where: str) -> bool:
        """Consumes a JSON string up to its closing quote; returns whether it is blank."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        begin, first = self.at, b""
        while True:
            carried = len(decoder.getstate()[0])
            start = self.at - carried
            part = self._take(_UNITS_RAW.match(self._held, self._next).end())
            rest = self._held[self._next : self._next + _LONGEST_ESCAPE]
            closed = rest[:1] == b'"'
            try:
                decoder.decode(part, final=closed)
            except UnicodeDecodeError as problem:
                raise ValueError(
                    f"{where} is not UTF-8 (byte {start + problem.start:,} of the file); "
                    f"convert the file, e.g. with iconv"
                ) from None
            if len(first) < _BLANK:
                first += part[:_BLANK]
            if closed:
                return self.at - begin < _BLANK and not json.loads(b'"%b"' % first).strip()
            unfinished = rest[:1] == b"\\" and len(rest) < _LONGEST_ESCAPE
            if (rest and not unfinished) or not self._more():
                raise ValueError(_stuck(where, rest, self.at))

    def until_newline(self, where: str) -> bytes:
        """Consumes what follows the document on its line."""
        while (end := self._held.find(b"\n", self._next)) < 0:
            if len(self._held) - self._next > METADATA_LIMIT:
                raise ValueError(
                    f"{where} goes on for more than {METADATA_LIMIT:,} bytes after its document; "
                    f"one JSON object stands on a line"
                )
            if not self._more():
                return self._take(len(self._held))
        return self._take(end + 1)


def _stuck(where: str, rest: bytes, at: int) -> str:
    """Says why a document's string does not go on at byte `at`, where `rest` stands."""
    if rest[:1] in (b"", b"\n", b"\r"):
        return (
            f"{where} is cut short inside its document (byte {at:,} of the file); "
            f"build or copy the file again"
        )
    return (
        f"{where} is not JSON: its document has a raw control character, a wrong escape or half "
        f"a surrogate pair at byte {at:,} of the file"
    )
