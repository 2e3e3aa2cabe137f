"""Long strings of JSON files that stay where they are: found by their bytes, read in pieces.

A row of a task file is a few columns and one text, which may have millions of tokens. `Window`
walks through a file and passes over that text without holding it; `StringInFile` knows its byte
range and decodes it piece by piece when it is read. So a document of 3.5 million tokens is never
one string, whether its file has a row a line (`jsonl`) or is one array of rows (`json_arrays`),
which stand above. Below: admission
and sources.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, sources
from notepad_jax.data.admission import NO_TEXT, TWICE, Fault

METADATA_LIMIT = 16 << 20  # bytes of a row beside its document
PIECE = 1 << 16  # bytes decoded at a time; hundreds of documents are read at once
_BLANK = 4096  # bytes: a longer document is not asked whether it is all white space

# What a row's text is called, here and elsewhere. It may stand in an object `metadata`.
TEXTS = ("document", "context")
WITHIN = "metadata"
_KEY = re.compile(rb'(?<!\\)"(?:document|context)"[ \t\r\n]*:[ \t\r\n]*"')
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OBJECT = r"[ \t\r\n]*:[ \t\r\n]*\{"  # behind the string that is its key
_NESTING = re.compile(  # what opens or closes an object, with all that stands before it
    rf'(?:[^"{{}}]++|{_STRING}(?!{_OBJECT}))*+(?:({_STRING}){_OBJECT}|([{{}}])|\Z)'.encode()
)
_OWN = ([b""], [b"", b'"%b"' % WITHIN.encode()])  # the keys of objects in which the text may stand
TAKEN = "\ue000 a text that stayed in its file \ue000"  # what stands for it in the columns


@dataclasses.dataclass(frozen=True)
class StringInFile:
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


def text_key(raw: bytes, start: int, end: int) -> re.Match[bytes] | None:
    """Finds the key of a row's text, up to its first character, in the row that begins at `start`.

    Keys of that name in other objects of the row are not its.
    """
    opened: list[bytes] = []  # keys of the objects around `at`, b"" where there is none
    at = start
    for key in _KEY.finditer(raw, start, end):
        for found in _NESTING.finditer(raw, at, key.start()):
            if found[2] == b"}":
                del opened[-1:]
            elif found.lastindex:
                opened.append(found[1] or b"")
        if opened in _OWN:
            return key
        at = key.start()
    return None


def placed(columns: dict[str, Any], where: str) -> None:
    """Removes what stands for the text from the columns; Fault if there are two texts."""
    inside = columns.get(WITHIN)
    holders = [columns, inside] if isinstance(inside, dict) else [columns]
    found = [(holder, name) for holder in holders for name in TEXTS
             if holder.get(name) is not None]  # fmt: skip
    if len(found) > 1:
        raise Fault(f"{where} has two texts, 'document' and 'context'; keep one", TWICE)
    for holder in holders:
        for name in TEXTS:
            holder.pop(name, None)


def missing(columns: dict[str, Any], where: str) -> Fault:
    """Returns what is to be said of a row in which no text begins."""
    for name in TEXTS:
        if name in columns:
            said = f"{where}: {name!r} must be a text, it is {columns[name]!r:.80}"
            return Fault(said, NO_TEXT if columns[name] is None else admission.TYPE)
    has = sources.columns_of(columns)
    return Fault(f"{where} has no column 'document' or 'context'; it has {has}", NO_TEXT)


class Window:
    """The bytes of a file from `at` on, as far as they had to be read."""

    def __init__(self, path: str | Path, on_block: sources.OnBlock | None) -> None:
        self.at = 0  # byte of the file that comes next
        self.held, self.next = b"", 0  # what is consumed is dropped when more is read
        self._blocks = sources.blocks(path, on_block=on_block)

    def more(self) -> bool:
        """Reads another block; False at the end of the file."""
        block = next(self._blocks, b"")
        self.held, self.next = self.held[self.next :] + block, 0
        return bool(block)

    def take(self, end: int) -> bytes:
        """Consumes the held bytes up to place `end`."""
        taken = self.held[self.next : end]
        self.at += len(taken)
        self.next = end
        return taken

    def hold(self, size: int) -> bytes:
        """Returns the next `size` bytes without consuming them; fewer at the end of the file."""
        while len(self.held) - self.next < size and self.more():
            pass
        return self.held[self.next : self.next + size]

    def until_document(self, where: str) -> tuple[bytes | None, bool]:
        """Consumes up to the document's first character, or a line that has no document.

        Returns (bytes, whether the line ends there); (None, True) at the end of the file.
        """
        while True:
            newline = self.held.find(b"\n", self.next)
            end = newline if newline >= 0 else len(self.held)
            key = text_key(self.held, self.next, end)
            if key:
                return self.take(key.end()), False
            if newline >= 0:
                return self.take(newline + 1), True
            if end - self.next > METADATA_LIMIT:
                raise ValueError(
                    f"{where} has no 'document' within {METADATA_LIMIT:,} bytes; put the metadata "
                    f"before it, and one JSON object on a line"
                )
            if not self.more():
                rest = self.take(len(self.held))
                return rest or None, True

    def skip_string(self, where: str) -> bool:
        """Consumes a JSON string up to its closing quote; returns whether it is blank."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        begin, first = self.at, b""
        while True:
            carried = len(decoder.getstate()[0])
            start = self.at - carried
            part = self.take(_UNITS_RAW.match(self.held, self.next).end())
            rest = self.held[self.next : self.next + _LONGEST_ESCAPE]
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
            if (rest and not unfinished) or not self.more():
                raise ValueError(_stuck(where, rest, self.at))

    def until_newline(self, where: str) -> bytes:
        """Consumes what follows the document on its line."""
        while (end := self.held.find(b"\n", self.next)) < 0:
            if len(self.held) - self.next > METADATA_LIMIT:
                raise ValueError(
                    f"{where} goes on for more than {METADATA_LIMIT:,} bytes after its document; "
                    f"one JSON object stands on a line"
                )
            if not self.more():
                return self.take(len(self.held))
        return self.take(end + 1)


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
