"""Reads files of one JSON array of objects row by row, in memory that does not grow with them.

`scan` leaves each row's text where it lies (`long_strings`), so evaluation files of hundreds of
megabytes cost a block; `spans` parses whole rows, one at a time, for data sets whose rows are
short. Above: formats and tables; below: rows, long_strings and sources.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notepad_jax.data import long_strings, rows, sources
from notepad_jax.data.admission import NO_TEXT, Fault
from notepad_jax.data.long_strings import StringInFile, Window
from notepad_jax.data.rows import Row

_FIRST = 1 << 14  # bytes that are looked at first; then twice as many, so parsing stays linear
_SPACE = re.compile(rb"[ \t\r\n]*")
_BEFORE = re.compile(rb"[\xef\xbb\xbf \t\r\n]*")  # some editors put a mark first


def scan(path: str | Path, on_block: sources.OnBlock | None = None) -> Iterator[Row | Fault]:
    """Yields the rows of a file, numbered from 1.

    In the place of a row that has no text under `document` or `context`, an empty one, or a
    column twice, yields what is to be said of it. Raises ValueError naming file and row for what
    is no JSON object, or is cut short, and for a file that goes on after its array.
    """
    window = Window(path, on_block)
    for number in _numbers(window, path):
        try:
            row = _row(window, number, path)
        except Fault as fault:
            row = fault
        yield row


def spans(
    path: str | Path, on_block: sources.OnBlock | None = None
) -> Iterator[tuple[int, int, int, Any]]:
    """Yields (row number from 1, bytes [start, stop) of the file, value), one held at a time.

    In the place of a value with a column twice, what is to be said of it (Fault).
    """
    window = Window(path, on_block)
    for number in _numbers(window, path):
        start, where = window.at, f"{path} row {number}"
        twice: list[Fault] = []
        made = sources.once(where, twice.append)
        end, value = _end(window, b"", sources.LONGEST_ROW, where, made)
        window.take(end)
        yield number, start, window.at, twice[0] if twice else value


def _row(window: Window, number: int, path: str | Path) -> Row:
    """Consumes a row, whatever is wrong with it."""
    where = f"{path} row {number}"
    head = _until_text(window, where)
    start = window.at
    blank = window.skip_string(where)
    stop = window.at
    beginning = head + long_strings.TAKEN.encode()
    end, _ = _end(window, beginning, long_strings.METADATA_LIMIT, where)
    tail = window.take(end)
    columns = rows.parsed(beginning + tail, where)
    long_strings.placed(columns, where)
    if blank:
        raise Fault(f"{where} has an empty document; remove the row", NO_TEXT)
    return Row(number, columns, StringInFile(str(path), start, stop))


def _numbers(window: Window, path: str | Path) -> Iterator[int]:
    """Yields the number of each element that begins where the window stands."""
    _skip(window, _BEFORE)
    if _next(window) != b"[":
        raise ValueError(f"{path} does not begin with '['; a .json data set is one array of rows")
    window.take(window.next + 1)
    for number in itertools.count(1):
        _skip(window)
        if _next(window) == b"]":
            window.take(window.next + 1)
            _skip(window)  # to the end: `on_block` is shown all bytes
            if more := window.hold(40):
                raise ValueError(
                    f"{path} goes on after its array of {number - 1:,} rows, with "
                    f"{more.decode('utf-8', 'replace')!r}; make it one array, or one row a line "
                    f"and call it .jsonl"
                )
            return
        if number > 1:
            if _next(window) != b",":
                raise ValueError(f"{path}: after row {number - 1} comes neither ',' nor ']'")
            window.take(window.next + 1)
            _skip(window)
        yield number


def _skip(window: Window, between: re.Pattern[bytes] = _SPACE) -> None:
    while True:
        window.take(between.match(window.held, window.next).end())
        if window.next < len(window.held) or not window.more():
            return


def _next(window: Window) -> bytes:
    return window.held[window.next : window.next + 1]


def _until_text(window: Window, where: str) -> bytes:
    """Consumes a row up to the first character of its text; ValueError if it has none."""
    size = _FIRST
    while True:
        held = window.hold(size)
        key = long_strings.text_key(held, 0, len(held))
        if key and not _whole(held[: key.end()], window.at, where)[0]:
            return window.take(window.next + key.end())
        ends, *_ = _whole(held, window.at, where)
        if ends:  # the row is over; what was found is the text of a later one
            raise long_strings.missing(rows.parsed(window.take(window.next + ends), where), where)
        if len(held) < size:
            raise _cut(held, where)
        if size > long_strings.METADATA_LIMIT:
            raise ValueError(
                f"{where} has no text within {long_strings.METADATA_LIMIT:,} bytes; put the "
                f"metadata before it"
            )
        size *= 2


def _end(
    window: Window, beginning: bytes, limit: int, where: str, made: Any = None
) -> tuple[int, Any]:
    """Returns the place in the window where the row ends that `beginning` begins, and the row.

    `made` makes its objects of their pairs.
    """
    size = _FIRST
    while True:
        held = window.hold(size)
        ends, certain, value = _whole(beginning + held, window.at - len(beginning), where, made)
        if ends and certain:
            return window.next + ends - len(beginning), value
        if len(held) < size:
            raise _cut(beginning + held, where)
        if size > limit:
            raise ValueError(f"{where} is no JSON within {limit:,} bytes: {_problem(held)}")
        size *= 2


def _cut(raw: bytes, where: str) -> ValueError:
    return ValueError(f"{where} is not JSON: {_problem(raw)} (is the file cut short?)")


def _whole(raw: bytes, at: int, where: str, made: Any = None) -> tuple[int, bool, Any]:
    """Returns how many bytes the JSON value has that `raw` begins with; 0 if it is not whole.

    Also whether that is certain, for a number that ends with `raw` might go on, and the value.
    `at` is the byte of the file that `raw` begins with.
    """
    try:  # a character that is cut in the middle is left for later
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)
        value, end = json.JSONDecoder(object_pairs_hook=made).raw_decode(text)
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{where} is not UTF-8 (byte {at + problem.start:,} of the file); convert the file, "
            f"e.g. with iconv"
        ) from None
    except json.JSONDecodeError:
        return 0, False, None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{where} cannot be read: {sources.first_line(error)}") from None
    return len(text[:end].encode()), end < len(text), value


def _problem(raw: bytes) -> str:
    try:
        json.loads(raw.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        return error.msg
    return "the array does not end"
