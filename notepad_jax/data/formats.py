"""Opens task files of every known format, ours or published.

The name says how a file is laid out (.jsonl, .json, .parquet, .array_record), its columns whose
format it has: ours, also written by hand (`rows`), that of a published memory agent
(foreign.memagent), of NVIDIA's RULER scripts (foreign.ruler_files), or of LongBench v2,
LongMemEval, MemoryAgentBench and BEAM (foreign, a file each). Rows of data sets that are
made into tasks first (GoLongRL, HotpotQA, SQuAD) are recognised and refused with the way to
convert them. Below: files, jsonl, json_arrays, parquet and foreign. Above: task_sources,
tasks.file_suite and programs.build.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from notepad_jax.data import (
    admission,
    array_records,
    files,
    json_arrays,
    jsonl,
    parquet,
    rows,
    sources,
)
from notepad_jax.data.admission import Fault, Memo, OnFault
from notepad_jax.data.foreign import (
    beam,
    longbench_v2,
    longmemeval,
    memagent,
    memory_agent_bench,
    ruler_files,
)
from notepad_jax.data.rows import Pair, Row

FORMS = ("jsonl", "json", "parquet", "array_record")  # how the names of files of tasks end

_LOOKED_AT = 1 << 16  # bytes of a file's beginning
_OTHERS = {  # a column that only their rows have: whose they are, what makes tasks of them
    "supporting_facts": ("HotpotQA", "build ruler-qa --hotpotqa"),
    "answer_start": ("SQuAD", "build ruler-qa --squad"),
    "paragraphs": ("SQuAD", "build ruler-qa --squad"),
    "reward_model": ("GoLongRL", "build golongrl --rows"),
}
_TEXTS = {"document", "context"}
_OURS = {"document", "extra"}  # columns that no published file has: all others are a user's
_BESIDE = {  # a column of files that lie beside tasks and are none: what they are, which to give
    "ideal_response": "BEAM's probing questions; give the chat.json beside their folder",
    "hypothesis": "answers to LongMemEval's questions; give longmemeval_s.json itself",
}


def read_any(
    path: str | Path, on_block: sources.OnBlock | None = None, name: str = "",
    on_fault: OnFault = admission.refuse, memo: Memo = admission.anew,
) -> Sequence[Pair]:  # fmt: skip
    """Returns the tasks of a file, and their lengths in tokens (0: unknown).

    Every row is checked here, and none when it is drawn; texts stay in the file until they are
    read. A row that has no id is called `name`:NUMBER (`name` is the file's own if not given).
    `on_block`, if given, is shown all bytes of the file, in order; `on_fault` is told of every row
    that is left out (`admission`); `memo` may know what takes long to find out about these bytes.
    Raises ValueError for a file that is none of these, or is damaged, naming file and row.
    """
    form = str(path).lower().rpartition(".")[2]
    if form not in FORMS:
        raise ValueError(
            f"{path} is no file of tasks; its name must end in .{', .'.join(FORMS[:-1])} or "
            f".{FORMS[-1]}"
        )
    if form == "array_record":
        return array_records.admitted(path, files.read(path, on_block), on_fault, memo)
    keys = parquet.keys(path) if form == "parquet" else _keys(path)
    if keys & _OURS and keys & _TEXTS:
        keys = set()
    if form == "jsonl" and "input" in keys and not keys & {"question", "answers", *_TEXTS}:
        return ruler_files.read(path, on_block=on_block, name=name, on_fault=on_fault)
    if whole := _whole(form, keys):
        return whole(path, on_block, name, on_fault)
    for key, (whose, command) in _OTHERS.items():
        # Published memory agents have a reward_model, too, and the text in a column of its own.
        if key in keys and not (key == "reward_model" and keys & _TEXTS):
            raise ValueError(
                f"{path} has rows of {whose}; make tasks of them first: "
                f"notepad-jax {command} {path}"
            )
    for key, whose in _BESIDE.items():
        if key in keys and not keys & _TEXTS:
            raise ValueError(f"{path} holds {whose}")
    found: Iterable[Row | Fault]
    if form == "parquet":
        found = parquet.scan(path, on_block, memo)
    else:
        found = {"jsonl": jsonl.scan, "json": json_arrays.scan}[form](path, on_block)
    return rows.pairs(path, name or Path(str(path)).name, found, tasks_of, on_fault)


def tasks_of(row: Row, where: str, name: str) -> Iterable[Pair | Fault]:
    """Returns a row of any format as tasks and their lengths: one for each of its questions."""
    if memory_agent_bench.matches(row.columns):
        return memory_agent_bench.tasks_of(row, where, name)
    return [task_of(row, where, name)]


def task_of(row: Row, where: str, name: str) -> Pair:
    """Returns a row of one question as a task and its length; `rows.task_of` says more."""
    if longbench_v2.matches(row.columns):
        return longbench_v2.task_of(row, where, name)
    if memagent.matches(row.columns):
        return memagent.task_of(row, where, name)
    return rows.task_of(row.columns, row.document, where, name)


def _whole(form: str, keys: set[str]) -> Callable[..., list[Pair]] | None:
    """Returns the reader of files whose texts are no column, but spread over a row or a file."""
    if form in ("json", "jsonl") and longmemeval.COLUMN in keys:
        return longmemeval.read
    if form == "parquet" and {"chat", beam.QUESTIONS} <= keys:
        return beam.read_hub
    return beam.read_chat if form == "json" and {"batch_number", "turns"} <= keys else None


def _keys(path: str | Path) -> set[str]:
    """The strings followed by a colon near a file's beginning: keys of its first row, or rows."""
    first = next(sources.blocks(path, size=_LOOKED_AT), b"").lstrip()
    if str(path).lower().endswith(".jsonl"):
        first = first.split(b"\n")[0]
    return {key.decode() for key in re.findall(rb'(?<!\\)"([a-z_]{1,40})"\s*:', first)}
