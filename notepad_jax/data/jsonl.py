"""Task files with one row a line, written and read with documents in constant memory.

The metadata of a row comes first and the document last, so a reader gets the questions
without decoding the texts: `scan` goes through the file once, and hands out documents that
know their byte range (`long_strings`). Rows that other people wrote are read the same way: the
text may be called `context`, and stand anywhere in its row. Above: files and formats; below:
rows and long_strings.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from notepad_jax.data import long_strings, rows, sources
from notepad_jax.data.admission import NO_TEXT, Fault
from notepad_jax.data.long_strings import StringInFile, Window
from notepad_jax.data.rows import Pair, Row


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


def scan(path: str | Path, on_block: sources.OnBlock | None = None) -> Iterator[Row | Fault]:
    """Yields the rows of a file one by one; blank lines count, so numbers are an editor's.

    In the place of a row that has no text under `document` or `context`, an empty one, or a
    column twice, yields what is to be said of it. Raises ValueError naming file and row for what
    is no JSON object, or is cut short.
    """
    window = Window(path, on_block)
    for number in itertools.count(1):
        where = f"{path} row {number}"
        head, ends = window.until_document(where)
        if head is None:
            return
        if number == 1:
            head = head.removeprefix(codecs.BOM_UTF8)  # that some editors put first
        if ends and not head.strip():
            continue
        try:
            row = _row(window, head, ends, number, path)
        except Fault as fault:
            row = fault
        yield row


def _row(window: Window, head: bytes, ends: bool, number: int, path: str | Path) -> Row:
    """Consumes the rest of a line that begins with `head`, whatever is wrong with it."""
    where = f"{path} row {number}"
    if ends:
        # Says what is wrong with the line itself, if anything is.
        raise long_strings.missing(rows.parsed(head, where), where)
    start = window.at
    blank = window.skip_string(where)
    stop = window.at
    tail = window.until_newline(where)
    # With the document taken out, what is left must be a JSON object of its own.
    columns = rows.parsed(head + long_strings.TAKEN.encode() + tail, where)
    long_strings.placed(columns, where)
    if blank:
        raise Fault(f"{where} has an empty document; remove the row", NO_TEXT)
    return Row(number, columns, StringInFile(str(path), start, stop))
