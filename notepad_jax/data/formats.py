"""One way to open a file of tasks, whoever wrote it: ours, or NVIDIA's RULER scripts.

Which of the two a .jsonl is, its first row's keys say. Rows of data sets that are made into
tasks first (GoLongRL, HotpotQA, SQuAD) are recognised and refused with the way to convert
them. Below: files and foreign.ruler_files. Above: records and
tasks.suites.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from notepad_jax.data import files, sources
from notepad_jax.data.foreign import ruler_files
from notepad_jax.types import Task

_LOOKED_AT = 1 << 16  # bytes of a file's beginning
_OTHERS = {"reward_model": "GoLongRL", "supporting_facts": "HotpotQA", "context": "SQuAD"}


def read_any(
    path: str | Path, on_block: sources.OnBlock | None = None
) -> Sequence[tuple[Task, int]]:
    """Returns the tasks of a task file or a RULER file, and their lengths in tokens.

    `on_block`, if given, is shown all bytes of the file, in order. Raises ValueError for a
    file that is neither, and whatever `files.read` and `ruler_files.read` refuse.
    """
    if not str(path).lower().endswith(".jsonl"):
        return files.read(path, on_block)
    keys = _keys(path)
    if "input" in keys and "question" not in keys:
        return ruler_files.read(path, on_block=on_block)
    for key, name in _OTHERS.items():
        if key in keys and "document" not in keys:
            raise ValueError(f"{path} has rows of {name}; make tasks of them first")
    return files.read(path, on_block)


def _keys(path: str | Path) -> set[str]:
    """The strings followed by a colon near the file's beginning: keys of its first row."""
    first = next(sources.blocks(path, size=_LOOKED_AT), b"").lstrip().split(b"\n")[0]
    return {key.decode() for key in re.findall(rb'(?<!\\)"([a-z_]{1,40})"\s*:', first)}
