"""Reads a file's bytes as a stream, from a local path or a bucket, and rows of data files.

Local files are opened; anything with `://` (gs://, s3://, file://) goes through
tensorstore's key-value store and is read by ranges of `BLOCK` bytes. Either way a file is
never held whole unless `read` is asked to.

Everything that can be wrong with a file is a ValueError of one line that names the file,
the row or the byte, and the mend. Above: tables (rows of any data set), long_strings and
array_records (task files), parquet, and the readers in foreign.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorstore as ts

from notepad_jax.data import admission
from notepad_jax.data.admission import TWICE, Fault, OnFault

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


def size_of(path: str | Path) -> int:
    """Returns how many bytes a file has; ValueError if it is missing or unreadable.

    A bucket is asked whether a byte is there, some fifty times: its stores tell no sizes.
    """
    if not is_remote(path):
        try:
            return Path(path).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except OSError as problem:
            raise ValueError(f"{path} cannot be read: {problem.strerror or problem}") from None
    store = _store(path)
    low, high = 0, BLOCK
    while _range(store, path, high - 1, high) is not None:
        low, high = high, 2 * high
    while low < high - 1:
        middle = (low + high) // 2
        there = _range(store, path, middle - 1, middle) is not None
        low, high = (middle, high) if there else (low, middle)
    return low


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


# ---------------------------------------------------------------- JSON


def once(
    where: str, on_fault: OnFault = admission.refuse
) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Returns what makes a JSON object of its pairs; `on_fault` is told of a column given twice."""

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            on_fault(Fault(f"{where} has two columns {twice!r:.40}; keep one", TWICE))
        return found

    return made


def parse(raw: bytes, path: str | Path, line: int, start: int) -> Any:
    """Parses one line of JSON; ValueError naming the line if it is none or nested too deeply.

    Fault for an object with a column given twice.
    """
    text = decode(raw if start else raw.removeprefix(codecs.BOM_UTF8), path, line, start)
    try:
        return json.loads(text, object_pairs_hook=once(f"{path} row {line}"))
    except Fault:
        raise
    except json.JSONDecodeError as problem:
        short = " (it ends early; is the file cut short?)" if problem.pos >= len(text) - 1 else ""
        raise ValueError(f"{path} line {line} is not JSON: {problem.msg}{short}") from None
    except RecursionError:
        raise ValueError(f"{path} line {line} is nested too deeply to be a row") from None
    except ValueError as problem:  # a number of thousands of digits
        raise ValueError(f"{path} line {line} cannot be read: {first_line(problem)}") from None


def columns_of(row: Mapping[str, Any]) -> str:
    """The names of a row's columns, for messages: short, and on one line whatever they are."""
    names = (name if name.isprintable() else repr(name) for name in row)
    return ", ".join(names)[:200] or "none"


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
    store = _store(path)
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


def _store(path: str | Path) -> Any:
    try:
        return ts.KvStore.open(str(path)).result()
    except (ValueError, OSError) as problem:
        raise ValueError(f"{path} cannot be opened: {first_line(problem)}") from None


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
