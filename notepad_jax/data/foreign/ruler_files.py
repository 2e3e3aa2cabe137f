"""RULER's own files, as NVIDIA's scripts write them, read as tasks.

A row is {"index", "input", "outputs", "length", and in newer files "answer_prefix"}. The
input is one prompt: an instruction, the text, and the question as its last line. The
document is everything up to that line, so RULER's instruction stays in front of the text
and its one-shot examples stay where they were; the question is the line without its
"Question:". Older files end that line with the first words of the answer, newer ones keep
them apart as `answer_prefix`; they are joined, so both give the same task. The scores are
RULER's: all gold strings wanted (`ruler_all`), for qa tasks any one (`ruler_part`).
Below: rows and sources. Above: formats.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, rows, sources
from notepad_jax.data.admission import NO_GOLD, NO_QUESTION, NO_TEXT, Fault, OnFault
from notepad_jax.data.rows import Pair, Row
from notepad_jax.types import Task

FAMILIES = ("niah", "vt", "cwe", "fwe", "qa")
LONGEST_ROW = 64 << 20  # bytes: a row is parsed whole, and 64 MB are about 16M tokens

_SPLITS = ("validation", "test", "train", "dev")
_MARKERS = re.compile(r"<\||\[/?INST\]|<(?:start|end)_of_turn>|</?s>")
_QUESTION = re.compile(r"question:\s*", re.IGNORECASE)


def read(
    path: str | Path, on_block: sources.OnBlock | None = None, name: str = "",
    on_fault: OnFault = admission.refuse,
) -> list[Pair]:  # fmt: skip
    """Returns the tasks of a file with their lengths in tokens, in the file's order.

    Source ("ruler/niah_single_1") and length are told by the path: RULER writes
    .../8192/data/niah_single_1/validation.jsonl. Where no folder names a length it is the row's
    own. A task is known by its row, `name`:NUMBER (source and length if not given), for RULER's
    `index` repeats: `niah.py` writes the place of the answer there. Texts are not kept: a document
    reads its row again. `on_fault` is told of rows with a missing column, a wrong type, an empty
    input or no outputs. Raises ValueError for a file without another row.
    """
    return rows.pairs(path, name, _rows(path, on_block), _tasks_of, on_fault)


def _rows(path: str | Path, on_block: sources.OnBlock | None) -> Iterator[Row | Fault]:
    for number, start, line in sources.open_lines(path, LONGEST_ROW, on_block):
        if line.strip():
            document = RulerDocument(str(path), number, start, start + len(line))
            try:
                yield Row(number, sources.parse(line, path, number, start), document)
            except Fault as fault:
                yield fault


def _tasks_of(row: Row, where: str, name: str) -> list[Pair]:
    path = row.document.path
    source = f"ruler/{_task_name(path)}"
    columns = _checked(row.columns, where)
    _, question = split(columns["input"], where)
    prefix = str(columns.get("answer_prefix") or "").strip()
    # A folder of another number, such as a year, is no length.
    aimed = max(_length_of(path), columns["length"])
    task = Task(
        id=f"{source}-{aimed}{name}" if name.startswith(":") else name,
        question=f"{question} {prefix}".strip(),
        document=row.document,
        answers=tuple(columns["outputs"]),
        source=source,
        metric="ruler_part" if source.startswith("ruler/qa") else "ruler_all",
    )
    return [(task, aimed)]


@dataclasses.dataclass(frozen=True)
class RulerDocument:
    """The text of one row, in a file's bytes [start, stop): parsed again when it is read."""

    path: str
    line: int
    start: int
    stop: int

    def pieces(self) -> Iterator[str]:
        """Yields the text at once; ValueError if the file has changed since it was read."""
        raw = b"".join(sources.blocks(self.path, self.start, self.stop))
        where = f"{self.path} row {self.line}"
        row = _checked(sources.parse(raw, self.path, self.line, self.start), where)
        yield split(row["input"], where)[0]


def split(text: str, where: str) -> tuple[str, str]:
    """Splits an input into (document, question); ValueError if it has only one line."""
    document, _, question = text.rstrip().rpartition("\n")
    if not document.strip():
        raise Fault(
            f"{where}: 'input' has no line break, so its question cannot be told", NO_QUESTION
        )
    question = _QUESTION.sub("", question.strip(), count=1)
    if _MARKERS.search(question) or question.lower() in ("answer:", "assistant"):
        raise Fault(
            f"{where}: 'input' ends in a chat template's markers, not in its question; generate "
            "the file with RULER's template `base`",
            NO_QUESTION,
        )
    return document.rstrip("\n"), question


def _checked(row: Any, where: str) -> dict[str, Any]:
    """Returns the row with `outputs` as strings and `length` a number, or says what is wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {type(row).__name__}, not an object with named columns")
    for name in ("input", "outputs"):
        if name not in row:
            raise Fault(f"{where} has no column {name!r}; it has {sources.columns_of(row)}")
    if not isinstance(row["input"], str) or not row["input"].strip():
        raise Fault(f"{where} has an empty 'input'; generate the file again", NO_TEXT)
    outputs = row["outputs"] if isinstance(row["outputs"], list) else [row["outputs"]]
    if not outputs:
        raise Fault(f"{where} has no gold answer: 'outputs' is empty", NO_GOLD)
    if not all(isinstance(gold, str | int | float) and str(gold).strip() for gold in outputs):
        raise Fault(f"{where}: 'outputs' must be a list of texts, it is {outputs!r:.80}", NO_GOLD)
    length = row.get("length", 0)
    if type(length) is not int or length < 0:
        raise Fault(f"{where}: 'length' must be a number of tokens, it is {length!r:.80}")
    return {**row, "outputs": [str(gold) for gold in outputs], "length": length}


def _task_name(path: str | Path) -> str:
    """The task's name, told by the file's or its folder's."""
    parts = str(path).replace("\\", "/").split("/")
    stem = parts[-1].rpartition(".")[0]
    folder = parts[-2] if len(parts) > 1 else ""
    for name in (stem, folder) if stem not in _SPLITS else (folder,):
        if name.split("_")[0] in FAMILIES:
            return name
    raise ValueError(
        f"{path}: neither the file's name nor its folder's begins with one of "
        f"{', '.join(FAMILIES)}; call either by its RULER task, as niah_single_1.jsonl"
    )


def _length_of(path: str | Path) -> int:
    """The number that a folder above is named after, the innermost; 0 if there is none."""
    numbers = [part for part in str(path).replace("\\", "/").split("/")[:-1] if part.isdecimal()]
    return int(numbers[-1]) if numbers else 0
