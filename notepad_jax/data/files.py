"""Task files: tasks written down, one JSON object each, and read back with lazy documents.

A `.jsonl` file has one task per line. The metadata comes first and the document last, so a
reader gets the questions without decoding the texts: `read` scans the file once in constant
memory, checks every row, and hands out documents that know their byte range and decode it
piece by piece when they are read. A document of 3.5 million tokens is therefore never one
string, neither when it is written nor when it is read. An `.array_record` file holds the
same objects as records with random access: the form for training sets of many short
documents, which are decoded whole, when asked for.

    {"id": ..., "question": ..., "answers": [...], "source": ..., "metric": ...,
     "contract": ..., "length": 8192, "evidence": [[text, place], ...], "document": ...}

`contract` ("plain") and `evidence` ([]) may be missing in files from elsewhere; `length` is
the document's length in tokens that its maker aimed at, 0 if unknown. Below: sources.
Above: records, and the programs that build and evaluate.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from array_record.python import array_record_data_source, array_record_module

from notepad_jax.data import sources
from notepad_jax.types import Evidence, Task, TextDocument

FORMS = ("jsonl", "array_record")  # of task files, and how their names end
METADATA_LIMIT = 16 << 20  # bytes of a row beside its document
_PIECE = 1 << 16  # bytes decoded at a time; hundreds of documents are read at once
_BLANK = 4096  # bytes: a longer document is not asked whether it is all white space

Pair = tuple[Task, int]  # a task and its length in tokens


# ---------------------------------------------------------------- writing


def write(path: str | Path, tasks: Iterable[Task], lengths: Iterable[int]) -> int:
    """Writes tasks and their lengths (tokens) to a .jsonl or .array_record file; returns how many.

    All or nothing: the file takes its name when it is whole. The same tasks give the same
    bytes. `lengths` may be endless (`itertools.repeat(8192)`), but not shorter than `tasks`.
    A document of a .jsonl is streamed; one of an .array_record is held whole.

    Raises ValueError for two tasks of one id, an empty document, text that is not Unicode
    (half a surrogate pair), or a path of another kind, in a bucket or not to be written to.
    """
    writing = _write_lines if _kind(path) == "jsonl" else _write_records
    path = Path(_local(path))
    for stale in path.parent.glob(f".{path.name}.*.part"):  # of a writer that was killed
        stale.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = writing(str(beside), _checked(path, tasks, lengths))
        os.replace(beside, path)
    except OSError as problem:
        raise ValueError(f"{path} cannot be written: {problem.strerror or problem}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    return count


def _checked(path: Path, tasks: Iterable[Task], lengths: Iterable[int]) -> Iterator[Pair]:
    """Pairs tasks with lengths, and refuses what a reader would."""
    known: set[str] = set()
    coming = iter(lengths)
    for task in tasks:
        if task.id in known:
            raise ValueError(f"{path}: two tasks have the id {task.id!r}; ids must be unique")
        known.add(task.id)
        for name in ("id", "question", "source", "metric", "contract"):
            if not getattr(task, name):
                raise ValueError(f"{path}: task {task.id!r} has an empty {name}")
        length = next(coming, None)
        if length is None:
            raise ValueError(f"{path}: there are more tasks than lengths ({len(known) - 1})")
        yield task, int(length)


def _write_lines(name: str, pairs: Iterable[Pair]) -> int:
    count = 0
    with open(name, "wb") as file:
        for task, length in pairs:
            for part in _row(task, length):
                file.write(part)
            file.write(b"\n")
            count += 1
    return count


def _write_records(name: str, pairs: Iterable[Pair]) -> int:
    count = 0
    writer = array_record_module.ArrayRecordWriter(name, "group_size:1")
    try:
        for task, length in pairs:
            writer.write(b"".join(_row(task, length)))
            count += 1
    finally:
        writer.close()
    return count


def _row(task: Task, length: int) -> Iterator[bytes]:
    """The JSON object of a task, in parts."""
    head = {
        "id": task.id,
        "question": task.question,
        "answers": list(task.answers),
        "source": task.source,
        "metric": task.metric,
        "contract": task.contract,
        "length": length,
        "evidence": [[fact.text, fact.place] for fact in task.evidence],
    }
    blank = True
    try:
        yield json.dumps(head, ensure_ascii=False)[:-1].encode() + b', "document": "'
        for piece in task.document.pieces():
            blank = blank and not piece.strip()
            yield json.dumps(piece, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"task {task.id!r} holds half a surrogate pair, which UTF-8 cannot express; "
            f"decode its text with errors='replace'"
        ) from None
    if blank:
        raise ValueError(f"task {task.id!r} has an empty document; give it a text to read")
    yield b'"}'


# ---------------------------------------------------------------- reading


def read(path: str | Path) -> Sequence[Pair]:
    """Returns the tasks of a file with their lengths, in the file's order.

    A .jsonl (local or in a bucket) is scanned and checked as a whole, in memory that grows
    with the metadata and not with the documents; raises ValueError naming file and row for
    a missing column, a wrong type, an empty document, no gold answer, an id used twice,
    invalid JSON, a row cut short, bytes that are not UTF-8. An .array_record (local) is
    checked when it is opened for being one, and record by record when these are asked for.
    """
    if _kind(path) == "array_record":
        return ArrayRecords(_local(path))
    pairs: list[Pair] = []
    known: dict[str, int] = {}
    for row in _scan(path):
        where = f"{path} row {row.number}"
        pair = task_of(row.columns, FileDocument(str(path), row.start, row.stop), where)
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
            for block in sources.blocks(self.path, self.start, self.stop, _PIECE):
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


class ArrayRecords(Sequence):
    """The tasks of an .array_record file, each decoded when it is asked for.

    It owns an open file. Indexing raises IndexError past the end and ValueError, naming
    file and record, for a record that is no task.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if not Path(path).is_file():
            raise ValueError(f"{path} is missing")
        try:
            self._records = array_record_data_source.ArrayRecordDataSource([path])
            self._count = len(self._records)
        except (RuntimeError, ValueError) as problem:
            raise ValueError(
                f"{path} is no whole ArrayRecord file ({sources.first_line(problem)}); "
                f"build or copy it again"
            ) from None
        if not self._count:
            raise ValueError(f"{path} has no tasks")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Pair:
        if not -self._count <= index < self._count:
            raise IndexError(f"{self._path} has {self._count} tasks; there is no number {index}")
        index %= self._count
        where = f"{self._path} record {index + 1}"
        try:
            raw = self._records[index]
        except (RuntimeError, ValueError) as problem:
            raise ValueError(
                f"{where} is broken ({sources.first_line(problem)}); copy the file again"
            ) from None
        columns = _object(raw, where)
        document = columns.pop("document", None)
        if not isinstance(document, str):
            raise ValueError(f"{where} has no text under 'document'; every task needs one")
        if not document.strip():
            raise ValueError(f"{where} has an empty document; remove it")
        return task_of(columns, TextDocument(document), where)


def task_of(columns: dict[str, Any], document: Any, where: str) -> Pair:
    """Makes a task from the columns of a row; ValueError saying what is wrong with which."""
    text = {name: _text(columns, name, where) for name in ("id", "question", "source", "metric")}
    if "answers" not in columns:
        raise ValueError(f"{where} has no column 'answers'; it has {', '.join(columns) or 'none'}")
    answers = columns["answers"]
    if not isinstance(answers, list) or not all(isinstance(gold, str) for gold in answers):
        raise ValueError(f"{where}: 'answers' must be a list of strings, it is {answers!r:.80}")
    if not answers:
        raise ValueError(f"{where} has no gold answer; every task needs at least one")
    length = columns.get("length", 0)
    if type(length) is not int or length < 0:
        raise ValueError(f"{where}: 'length' must be a number of tokens, it is {length!r:.80}")
    evidence = columns.get("evidence", [])
    if not isinstance(evidence, list) or not all(map(_is_evidence, evidence)):
        raise ValueError(
            f"{where}: 'evidence' must be a list of [text, place in 0..1], it is {evidence!r:.80}"
        )
    task = Task(
        **text,
        document=document,
        answers=tuple(answers),
        contract=_text({"contract": "plain", **columns}, "contract", where),
        evidence=tuple(Evidence(fact, float(place)) for fact, place in evidence),
    )
    return task, length


def _text(columns: dict[str, Any], name: str, where: str) -> str:
    if name not in columns:
        raise ValueError(f"{where} has no column {name!r}; it has {sources.columns_of(columns)}")
    if not isinstance(columns[name], str) or not columns[name]:
        raise ValueError(f"{where}: {name!r} must be a text, it is {columns[name]!r:.80}")
    return columns[name]


def _is_evidence(fact: Any) -> bool:
    if not isinstance(fact, list) or len(fact) != 2:
        return False
    text, place = fact
    return isinstance(text, str) and type(place) in (int, float) and 0 <= place < 1


def _object(raw: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object in which no column is given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _Twice(f"{where} has two columns {twice!r}; keep one")
        return found

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8; convert the file, e.g. with iconv") from None
    except _Twice:
        raise
    except (ValueError, RecursionError) as problem:
        reason = "nested too deeply" if isinstance(problem, RecursionError) else problem
        raise ValueError(f"{where} is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {type(found).__name__}, not an object with named columns")
    return found


class _Twice(ValueError):
    """A column given twice; told apart from what json itself raises."""


# ---------------------------------------------------------------- scanning a .jsonl


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


def _scan(path: str | Path) -> Iterator[_Row]:
    """Reads rows one by one: what stands before the document, its byte range, what follows."""
    window = _Window(path)
    for number in itertools.count(1):
        where = f"{path} row {number}"
        head, ends = window.until_document(where)
        if head is None:
            return
        if ends and not head.strip():
            continue
        if ends:
            columns = _object(head, where)  # says what is wrong with it, if anything is
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
        columns = _object(head + tail, where)
        if columns.pop("document", None) != "":
            raise ValueError(f"{where} has no text under 'document'; every task needs one")
        if blank:
            raise ValueError(f"{where} has an empty document; remove the row")
        yield _Row(number, columns, start, stop)


class _Window:
    """The bytes of a file from `at` on, as far as they had to be read."""

    def __init__(self, path: str | Path) -> None:
        self.at = 0
        self._held, self._next = b"", 0  # what is consumed is dropped when more is read
        self._blocks = sources.blocks(path)

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


# ---------------------------------------------------------------- paths


def _kind(path: str | Path) -> str:
    name = str(path).lower()
    for form in FORMS:
        if name.endswith("." + form):
            return form
    raise ValueError(f"{path} is no task file; its name must end in .{' or .'.join(FORMS)}")


def _local(path: str | Path) -> str:
    if sources.is_remote(path):
        raise ValueError(
            f"{path}: task files are written, and ArrayRecord files read, on a local disk; "
            f"copy them to or from the bucket"
        )
    return str(path)
