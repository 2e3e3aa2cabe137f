"""Some tasks of the training files held out: never drawn, and read to see what was learnt.

Which ones follows from the words of a row (its question and answers) and not from its place or
its file's name, so a row that stands in the files twice is held out twice. Of every source the
same share is taken, at least one task. Above: programs.task_stream; below: task_sources.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from notepad_jax.data.rows import Pair
from notepad_jax.data.task_sources import Chosen, TaskSources, shares
from notepad_jax.types import Task


def split(
    opened: TaskSources, share: float, weights: Mapping[str, float]
) -> tuple[TaskSources, dict[str, Sequence[Pair]]]:
    """Returns the sources without what is held out, and what is, by source, in order of `rank`.

    Looks at every task of the sources that `weights` draws from. Raises ValueError naming a
    source of which nothing would be left to train on.
    """
    tasks, held, counts = dict(opened.tasks), {}, {}
    for name in shares(opened.tasks, weights):
        pairs = tasks[name]
        ranks = np.array([rank(pairs[number][0]) for number in range(len(pairs))], np.uint64)
        count = max(1, round(share * len(pairs)))
        last = np.sort(ranks)[count - 1]  # rows of the same words are on the same side
        chosen = np.flatnonzero(ranks <= last)
        if len(chosen) == len(pairs):
            raise ValueError(
                f"source {name!r} has {len(pairs):,} tasks, all of which would be held out; lower "
                f"validation.split, or name held-out tasks of their own (validation.files)"
            )
        held[name] = Chosen(pairs, chosen[np.argsort(ranks[chosen], kind="stable")])
        tasks[name] = Chosen(pairs, np.flatnonzero(ranks > last))
        counts[name] = len(chosen)
    return dataclasses.replace(opened, tasks=tasks, held_out=counts), held


def rank(task: Task) -> int:
    """Returns a number in [0, 2**64) that depends on the question and the answers alone."""
    words = json.dumps([task.question, sorted(task.answers)]).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "big")
