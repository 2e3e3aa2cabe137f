"""Reads Parquet files: columns in batches, and long texts only when they are read.

`values` gives whole rows, a batch at a time. `scan` gives rows without their text, which is read
when it is asked for: the row group that holds it, if that is small enough to be decoded for one
text. What pandas writes is one row group of everything, gigabytes that cannot be entered in the
middle; such texts are unpacked once into a temporary file, from front to back, and read from there.
Nothing larger than a row group of `LARGEST_GROUP`, or two pages, is ever in memory, from a disk or
a bucket (pandas writes pages of 1,024 rows: some 100 MB of documents of 28K tokens).
Above: tables and formats; below: rows, admission and sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from notepad_jax.data import admission, sources
from notepad_jax.data.admission import NO_TEXT, Fault, Memo
from notepad_jax.data.rows import Row

TEXTS = ("document", "context")  # what a row's text is called: the first that there is
LARGEST_GROUP = 64 << 20  # bytes of the texts of a row group that is decoded to read one of them
GROUPS_HELD = 2  # row groups whose texts stay decoded
TOGETHER = 16  # rows decoded at a time
PIECE = 1 << 16  # bytes of an unpacked text that are read at a time
BLANK = 4096  # bytes: a longer text is not asked whether it is all white space
# Whose nulls mean that a row does not say: a table has the same columns in all rows.
MAY_BE_NULL = ("id", "source", "metric", "contract", "length", "evidence", "note_script", "extra")


def values(
    path: str | Path, wanted: list[str] | None = None, together: int = TOGETHER
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number from 1, row with the columns `wanted`, None: all), `together` decoded.

    Raises ValueError for a file that is missing, broken or short.
    """
    yield from enumerate(_batches(path, wanted, together), start=1)


def cell(path: str | Path, column: str, place: int) -> Any:
    """Returns the value of a column in row `place`, from 0; the rows before it are passed over.

    Raises ValueError for a file that is missing or broken, and for one without such a row.
    """
    with _opened(path) as table, _named(path):
        for batch in table.iter_batches(batch_size=1, columns=[column]):
            if not place:
                return batch.column(0)[0].as_py()
            place -= 1
    raise ValueError(f"{path} changed after it was opened: it has fewer rows; start again")


def columns(path: str | Path) -> list[str]:
    """Returns the names of a file's columns."""
    with _opened(path) as table:
        return table.schema_arrow.names


def keys(path: str | Path) -> set[str]:
    """Returns the names of a file's columns, and of what stands in its answers."""
    with _opened(path) as table:
        schema = table.schema_arrow
        kinds = [schema.field(name).type for name in schema.names if name == "answers"]
        within = (part.name for kind in filter(pyarrow.types.is_struct, kinds) for part in kind)
        return {*schema.names, *within}


def scan(
    path: str | Path, on_block: sources.OnBlock | None = None, memo: Memo = admission.anew
) -> Iterator[Row | Fault]:
    """Yields the rows of a file, numbered from 1.

    In the place of a row whose text is null or blank, yields what is to be said of it: texts
    are decoded for this, a few at a time, unless `memo` knows. `on_block`, if given, is shown all
    bytes of the file, in order, before that. Raises ValueError for a file that is missing, broken
    or has no column of texts, or two of them.
    """
    names = columns(path)
    text = next((name for name in TEXTS if name in names), None)
    if set(TEXTS) <= set(names):
        raise ValueError(f"{path} has two columns of texts, {' and '.join(TEXTS)}; keep one")
    if text is None:
        raise ValueError(
            f"{path} has no column {' or '.join(map(repr, TEXTS))}; it has {', '.join(names)[:200]}"
        )
    if on_block is not None:
        for block in sources.blocks(path):
            on_block(block)
    texts = Texts(path, text)
    blank = frozenset(memo(texts.blank))
    rest = [name for name in names if name != text]
    for number, row in enumerate(_batches(path, rest), start=1):
        if number in blank:
            yield _empty(text, f"{path} row {number}")
            continue
        for name in MAY_BE_NULL:
            if name in row and row[name] is None:
                del row[name]
        yield Row(number, row, RowDocument(texts, number - 1))


@dataclasses.dataclass(frozen=True)
class RowDocument:
    """The text of one row, by its place in the file from 0."""

    texts: Texts = dataclasses.field(repr=False)
    place: int

    def pieces(self) -> Iterator[str]:
        """Yields the text; ValueError if the file is gone, broken or another one by now."""
        return self.texts.pieces(self.place)


class Texts:
    """The texts of a file, by row. It owns open files, and may be asked by several threads."""

    def __init__(self, path: str | Path, column: str) -> None:
        self._path, self._column = path, column
        self._lock = threading.Lock()
        self._file = _Bytes(path)
        with _named(path):
            plain = pyarrow.parquet.ParquetFile(self._file)
            data, field = plain.metadata, plain.schema_arrow.field(column).type
            if not (pyarrow.types.is_string(field) or pyarrow.types.is_large_string(field)):
                raise ValueError(f"{path}: column {column!r} must hold texts, it holds {field}")
            # A text that many rows share lies in the file once, and stays so in memory.
            self._table = pyarrow.parquet.ParquetFile(
                self._file, metadata=data, read_dictionary=[column]
            )
        groups = [data.row_group(number) for number in range(data.num_row_groups)]
        self._starts = [0]  # the row that each group begins with, and their number
        for group in groups:
            self._starts.append(self._starts[-1] + group.num_rows)
        sizes = [_size(group, column) for group in groups]
        self._group = functools.lru_cache(maxsize=GROUPS_HELD)(self._read_group)
        unpack = max(sizes, default=0) > LARGEST_GROUP
        self._unpacked = _unpacked(path, column, sum(sizes)) if unpack else None

    def pieces(self, place: int) -> Iterator[str]:
        """Yields the text of row `place`, from 0."""
        where = f"{self._path} row {place + 1}"
        if self._unpacked is not None:
            yield from self._unpacked.pieces(place)
            return
        number = next(n for n, start in enumerate(self._starts[1:]) if place < start)
        with self._lock:
            text = self._group(number)[place - self._starts[number]].as_py()
        if not text:
            raise _empty(self._column, where)
        yield text

    def blank(self) -> list[int]:
        """Returns the numbers, from 1, of rows whose text is null or blank."""
        if self._unpacked is not None:
            return list(self._unpacked.blank)
        found, done = [], 0
        with _opened(self._path) as table:
            batches = table.iter_batches(batch_size=TOGETHER, columns=[self._column])
            while True:
                with _named(self._path, done):
                    batch = next(batches, None)
                    if batch is None:
                        return found
                    batch.validate(full=True)  # that they are UTF-8
                (texts,) = batch.columns
                for number, text in enumerate(texts, start=done + 1):
                    if not text.is_valid or _is_blank(text):
                        found.append(number)
                done += len(texts)

    def _read_group(self, number: int) -> Any:
        with _named(self._path):
            return self._table.read_row_group(number, [self._column]).column(0)


@dataclasses.dataclass(frozen=True)
class _Unpacked:
    """Texts one after the other in a file that has no name and is gone with this process."""

    file: Any
    ends: list[int]  # the byte where each text ends
    blank: list[int]  # numbers from 1 of those of which nothing was written

    def pieces(self, place: int) -> Iterator[str]:
        at, end = self.ends[place - 1] if place else 0, self.ends[place]
        held = b""
        while at < end:
            held += os.pread(self.file.fileno(), min(PIECE, end - at), at)
            at += PIECE
            whole = _whole_characters(held) if at < end else len(held)
            yield held[:whole].decode()
            held = held[whole:]


def _whole_characters(raw: bytes) -> int:
    """Returns how many bytes of UTF-8 make whole characters."""
    for back in range(1, min(4, len(raw)) + 1):
        first = raw[-back]
        if first >= 0xC0:  # a character of 2 to 4 bytes begins here
            size = 2 + (first >= 0xE0) + (first >= 0xF0)
            return len(raw) - (back if size > back else 0)
        if first < 0x80:
            break
    return len(raw)


def _unpacked(path: str | Path, column: str, size: int) -> _Unpacked:
    """Writes all texts of a file, of about `size` bytes, to a temporary one."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ValueError(
            f"{path} is one block of {size / 1e9:.1f} GB, which has to be unpacked to be read, and "
            f"{folder} has {free / 1e9:.1f} GB left; make room, or set TMPDIR to another folder"
        )
    file, ends, blank, at = tempfile.TemporaryFile(), [], [], 0  # it lives as long as its texts
    for number, row in enumerate(_batches(path, [column]), start=1):
        raw = (row[column] or "").encode()
        if len(raw) < BLANK and not raw.decode().strip():
            raw = b""
            blank.append(number)
        file.write(raw)
        at += len(raw)
        ends.append(at)
    file.flush()
    return _Unpacked(file, ends, blank)


def _is_blank(text: Any) -> bool:
    return text.as_buffer().size < BLANK and not text.as_py().strip()


def _empty(column: str, where: str) -> Fault:
    return Fault(f"{where} has an empty {column!r}; remove the row", NO_TEXT)


def _size(group: Any, column: str) -> int:
    parts = (group.column(number) for number in range(group.num_columns))
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema == column)


# ---------------------------------------------------------------- opening and decoding


def _batches(
    path: str | Path, wanted: list[str] | None, together: int = TOGETHER
) -> Iterator[dict[str, Any]]:
    """Yields rows with the columns `wanted` (None: all), decoded `together` at a time."""
    done = 0
    with _opened(path) as table:
        batches = table.iter_batches(batch_size=together, columns=wanted)
        while True:
            with _named(path, done):
                batch = next(batches, None)
                found = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for row in found:
                done += 1
                yield row


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    with _Bytes(path) as file:
        with _named(path):
            # With a buffer a column is decoded as it comes in; without one, read as a whole.
            table = pyarrow.parquet.ParquetFile(file, buffer_size=sources.BLOCK, pre_buffer=False)
            names = table.schema_arrow.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{path} has two columns {twice!r}; keep one, or rename the other")
        yield table


@contextlib.contextmanager
def _named(path: str | Path, done: int | None = None) -> Iterator[None]:
    """Arrow's errors as one line that names the file."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        where = f"after row {done}" if done else "at its beginning or end"
        raise ValueError(
            f"{path} is no whole parquet file ({sources.first_line(problem)}), broken {where}; "
            f"download it again"
        ) from None


class _Bytes(io.RawIOBase):
    """A file's bytes with random access, on a disk or in a bucket."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path, self._at = path, 0
        self._size = sources.size_of(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._size, self._at + size)
        blocks = sources.blocks(self._path, self._at, stop, max(1, stop - self._at))
        found = b"".join(blocks) if self._at < stop else b""
        self._at += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)
