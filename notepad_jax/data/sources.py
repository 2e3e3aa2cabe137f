"""Bytes of a file as a stream, from a local path or a bucket, and rows out of data files.

Local files are opened; anything with `://` (gs://, s3://, file://) goes through
tensorstore's key-value store and is read by ranges of `BLOCK` bytes. Either way a file is
never held whole unless `read` is asked to. `rows` turns the three forms in which data sets
are published (jsonl, one JSON array, parquet) into numbered dictionaries, one at a time.

Everything that can be wrong with a file is a ValueError of one line that names the file,
the row or the byte, and the mend. Above: jsonl and array_records (task files), and
the readers in foreign.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

BLOCK = 1 << 20  # bytes of one read; a remote request costs a round trip, so not less
LONGEST_ROW = 256 << 20  # bytes of one jsonl line or array element that is parsed whole
LONGEST_FILE = 1 << 30  # bytes of a file that `read` holds

OnBlock = Callable[[bytes], None]  # is shown each block as it is read, in order


def is_remote(path: str | Path) -> bool:
    """Whether the path is a URL of a key-value store and not a local file."""
    return "://" in str(path)


def blocks(
    path: str | Path,
    start: int = 0,
    stop: int | None = None,
    size: int = BLOCK,
    on_block: OnBlock | None = None,
) -> Iterator[bytes]:
    """Yields the bytes [start, stop) of a file in blocks of at most `size`; to its end if None.

    Raises ValueError for a file that is missing or unreadable, or ends before `stop`.
    """
    found = _remote if is_remote(path) else _local
    at = start
    for block in found(path, start, stop, size):
        at += len(block)
        if on_block is not None:
            on_block(block)
        yield block
    if stop is not None and at < stop:
        raise ValueError(f"{path} ends at byte {at:,}, before {stop:,}; it is cut short")


def read(path: str | Path) -> bytes:
    """Returns a whole file; ValueError if it is missing or longer than `LONGEST_FILE`."""
    held: list[bytes] = []
    total = 0
    for block in blocks(path):
        held.append(block)
        total += len(block)
        if total > LONGEST_FILE:
            raise ValueError(f"{path} is longer than {LONGEST_FILE:,} bytes; split it")
    return b"".join(held)


def open_lines(
    path: str | Path, longest: int = LONGEST_ROW, on_block: OnBlock | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Yields (line number from 1, byte where it starts, line without its newline).

    Raises ValueError for a line of more than `longest` bytes.
    """
    number, at = 1, 0
    held: list[bytes] = []  # of a line that goes on; joined once, so long lines stay linear
    waiting = 0
    for block in blocks(path, on_block=on_block):
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            line = b"".join([*held, block[start:end]])
            yield number, at, line
            number, at, start = number + 1, at + len(line) + 1, end + 1
            held, waiting = [], 0
        held.append(block[start:])
        waiting += len(held[-1])
        if waiting > longest:
            raise ValueError(
                f"{path} line {number} is longer than {longest:,} bytes; split it, or check that "
                f"the file has one JSON object per line"
            )
    if waiting:
        yield number, at, b"".join(held)


def decode(raw: bytes, path: str | Path, line: int, start: int) -> str:
    """Decodes UTF-8; errors name `line` and the byte (`raw` begins at byte `start` of the file)."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{path} line {line} is not UTF-8 (byte {start + problem.start:,}); "
            f"convert the file, e.g. with iconv"
        ) from None


# ---------------------------------------------------------------- rows of a data set


def rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number from 1, row) of a .jsonl, .json (one array of objects) or .parquet file.

    One row is held at a time (of parquet, a batch of 16). Raises ValueError for anything
    that is not a table of JSON objects, or cut short.
    """
    name = str(path).lower()
    if name.endswith(".parquet"):
        found = _parquet_rows(path)
    elif name.endswith(".json"):
        found = _array_rows(path)
    elif name.endswith(".jsonl"):
        found = _line_rows(path)
    else:
        raise ValueError(f"{path} ends in none of .jsonl, .json and .parquet; rename or convert it")
    for number, row in found:
        if not isinstance(row, dict):
            raise ValueError(
                f"{path} row {number} is {type(row).__name__}, not an object with named columns"
            )
        yield number, row


def parse(raw: bytes, path: str | Path, line: int, start: int) -> Any:
    """Parses one line of JSON; ValueError naming the line if it is none or nested too deeply."""
    text = decode(raw, path, line, start)
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        short = " (it ends early; is the file cut short?)" if problem.pos >= len(text) - 1 else ""
        raise ValueError(f"{path} line {line} is not JSON: {problem.msg}{short}") from None
    except RecursionError:
        raise ValueError(f"{path} line {line} is nested too deeply to be a row") from None
    except ValueError as problem:  # a number of thousands of digits
        raise ValueError(f"{path} line {line} cannot be read: {first_line(problem)}") from None


def columns_of(row: dict[str, Any]) -> str:
    """The names of a row's columns, for messages: short, and on one line whatever they are."""
    names = (name if name.isprintable() else repr(name) for name in row)
    return ", ".join(names)[:200] or "none"


def _line_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    for number, start, line in open_lines(path):
        if line.strip():
            yield number, parse(line, path, number, start)


def _array_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Elements of one JSON array, parsed as the text comes in."""
    text = _Text(path)
    text.skip(" \t\r\n\ufeff")
    if text.take() != "[":
        raise ValueError(f"{path} does not begin with '['; a .json data set is one array of rows")
    number = 1
    while True:
        text.skip(" \t\r\n")
        if text.held[text.at : text.at + 1] == "]":
            return
        if number > 1:
            if text.take() != ",":
                raise ValueError(f"{path}: after row {number - 1} comes neither ',' nor ']'")
            text.skip(" \t\r\n")
        yield number, text.value(number)
        number += 1


class _Text:
    """A window of a UTF-8 file, from `at` on, that grows while a value does not fit in it."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.held, self.at = path, "", 0
        self._blocks = blocks(path)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read = 0

    def more(self, wanted: int = 1) -> bool:
        """Reads at least `wanted` more characters if there are any; False at the end."""
        parts = [self.held[self.at :]]
        got = 0
        while got < wanted:
            block = next(self._blocks, None)
            try:
                parts.append(self._decoder.decode(block or b"", final=block is None))
            except UnicodeDecodeError as problem:
                raise ValueError(
                    f"{self.path} is not UTF-8 near byte {self._read + problem.start:,}; "
                    f"convert the file, e.g. with iconv"
                ) from None
            got += len(parts[-1])
            if block is None:
                break
            self._read += len(block)
        self.held, self.at = "".join(parts), 0
        return got > 0

    def skip(self, characters: str) -> None:
        while True:
            while self.at < len(self.held) and self.held[self.at] in characters:
                self.at += 1
            if self.at < len(self.held) or not self.more():
                return

    def take(self) -> str:
        """Returns the next character, "" at the end."""
        if self.at >= len(self.held) and not self.more():
            return ""
        self.at += 1
        return self.held[self.at - 1]

    def value(self, number: int) -> Any:
        """Parses the JSON value that begins here."""
        decoder = json.JSONDecoder()
        while True:
            try:
                found, end = decoder.raw_decode(self.held, self.at)
                if end < len(self.held):  # a number might go on in the next block
                    self.at = end
                    return found
                problem = ""
            except json.JSONDecodeError as error:
                found, end, problem = None, None, error.msg
            except RecursionError:
                raise ValueError(f"{self.path} row {number} is nested too deeply") from None
            except ValueError as error:  # a number of thousands of digits
                raise ValueError(
                    f"{self.path} row {number} cannot be read: {first_line(error)}"
                ) from None
            held = len(self.held) - self.at
            if held > LONGEST_ROW:
                raise ValueError(
                    f"{self.path} row {number} is no JSON within {LONGEST_ROW:,} characters"
                )
            # A broken row is only known to be broken when more text does not mend it; asking
            # for as much again each time keeps the repeated parsing linear.
            if not self.more(max(BLOCK, held)):
                raise ValueError(
                    f"{self.path} row {number} is not JSON: {problem or 'the array does not end'} "
                    f"(is the file cut short?)"
                )


def _parquet_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    if is_remote(path):
        raise ValueError(f"{path}: parquet is read from a local disk; copy the file here first")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} is parquet, which needs: pip install pyarrow") from None
    if not Path(path).is_file():
        raise ValueError(f"{path} is missing")
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=16):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as problem:
        where = f"after row {number}" if number else "at its beginning or end"
        raise ValueError(
            f"{path} is no whole parquet file ({first_line(problem)}), broken {where}; "
            f"download it again"
        ) from None


# ---------------------------------------------------------------- where bytes come from


def _local(path: str | Path, start: int, stop: int | None, size: int) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while stop is None or start < stop:
                block = file.read(size if stop is None else min(size, stop - start))
                if not block:
                    return
                start += len(block)
                yield block
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}") from None


def _remote(path: str | Path, start: int, stop: int | None, size: int) -> Iterator[bytes]:
    try:
        store = ts.KvStore.open(str(path)).result()
    except (ValueError, OSError) as problem:
        raise ValueError(f"{path} cannot be opened: {first_line(problem)}") from None
    while stop is None or start < stop:
        end = start + size if stop is None else min(start + size, stop)
        block = _range(store, path, start, end)
        if block is None:  # fewer than `size` bytes are left
            rest = _range(store, path, start, None)
            if rest:
                yield rest
            return
        yield block
        start = end


def _range(store: Any, path: str | Path, start: int, end: int | None) -> bytes | None:
    """Reads bytes [start, end); None if the file ends before that."""
    try:
        found = store.read("", byte_range=slice(start, end)).result()
    except (ValueError, OSError) as problem:
        if "OUT_OF_RANGE" in str(problem):
            return None
        raise ValueError(f"{path} cannot be read: {first_line(problem)}") from None
    if found.state != "value":
        raise ValueError(f"{path} is missing")
    if end is not None and len(found.value) < end - start:
        return None
    return bytes(found.value)


def first_line(problem: Exception) -> str:
    """The first line of a library's message: tensorstore and arrow add more below."""
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]
