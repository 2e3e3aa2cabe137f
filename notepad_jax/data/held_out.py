"""The held-out split of training files: tasks never drawn, and read to see what was learnt.

Which side a task is on follows from its document alone: the hash of the text, in which white space
and composed characters do not count, is below `share` of all hashes or it is not. So questions
about one document, and a row that stands in two files or sources, are on one side; neither the
order of files, nor their names, nor rows that are added change it, and every run of one share
holds out the same. A task that asks, of another document, what a held-out one asks, in the same
words and with the same answers, is withheld: neither drawn nor read. Where there are too few
documents for that, the hash of a task's words may decide instead (QUESTIONS), and how many of those
held out share their document with others is counted. Above: setup.task_stream and
training.validation; below: task_sources.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from notepad_jax.data.array_records import Chosen
from notepad_jax.data.rows import Pair
from notepad_jax.data.task_sources import LateBar, TaskSources, remembered, shares
from notepad_jax.telemetry.screen import Screen
from notepad_jax.types import Document, Task

HASHES = 2**64
LONGEST_COMPOSED = 1024  # code points of one character and all that composes with it
DOCUMENTS, QUESTIONS = "documents", "questions"  # by what tasks are held out


def split(
    opened: TaskSources,
    share: float,
    weights: Mapping[str, float],
    screen: Screen,
    by: str = DOCUMENTS,
) -> tuple[TaskSources, dict[str, Sequence[Pair]]]:
    """Returns the sources without what is held out, and what is, by source, in order of `rank`.

    Reads every document of the sources that `weights` draws from, with a bar if that takes a
    while; hashes of large files are remembered. Raises ValueError where nothing would be held out
    at all, and naming a source of which nothing would be left to train on.
    """
    names = list(shares(opened.tasks, weights))
    texts = documents(opened, names, screen)
    words = {
        name: np.array([rank(task) for task, _ in opened.tasks[name]], np.uint64) for name in names
    }
    keys = {DOCUMENTS: texts, QUESTIONS: words}[by]
    below = np.uint64(min(int(share * HASHES), HASHES - 1))
    held = {name: keys[name] < below for name in names}
    if not any(mask.any() for mask in held.values()):
        every = np.unique(np.concatenate(list(keys.values())))
        raise ValueError(
            f"validation.split={share:g} holds out none of the {len(every):,} {by} of "
            f"tasks.files; {_more(every, by)}, or name held-out tasks of their own "
            f"(validation.files)"
        )
    asked = np.unique(np.concatenate([words[name][held[name]] for name in names]))
    tasks, found, withheld = dict(opened.tasks), {}, {}
    for name in names:
        pairs, same = opened.tasks[name], ~held[name] & np.isin(words[name], asked)
        drawn = np.flatnonzero(~held[name] & ~same)
        if not len(drawn):
            raise ValueError(
                f"source {name!r} has {len(pairs):,} tasks about {len(np.unique(texts[name])):,} "
                f"documents, of which {held[name].sum():,} tasks would be held out and "
                f"{same.sum():,} ask the same as those: none is left to train on; lower "
                f"validation.split, or name held-out tasks of their own (validation.files)"
            )
        chosen = np.flatnonzero(held[name])
        tasks[name] = Chosen(pairs, drawn)
        if len(chosen):
            order = np.argsort(words[name][chosen], kind="stable")
            found[name] = Chosen(pairs, chosen[order])
        if same.any():
            withheld[name] = int(same.sum())
    read = np.concatenate([texts[name][~held[name]] for name in names])
    known = sum(int(np.isin(texts[name][held[name]], read).sum()) for name in names)
    left = dataclasses.replace(
        opened,
        tasks=tasks,
        held_out={name: len(pairs) for name, pairs in found.items()},
        held_out_by=by,
        withheld=withheld,
        shared=known,
    )
    return left, found


def _more(keys: np.ndarray, by: str) -> str:
    least = math.floor(int(keys.min()) / HASHES * 10_000 + 1) / 10_000
    raised = f"from validation.split={least:g} on one is"
    if by == QUESTIONS:
        return raised
    said = "questions about one document stay on one side"
    apart = f"hold out {QUESTIONS} instead (validation.split_by={QUESTIONS})"
    return f"{said if len(keys) < 2 else raised}; {apart}"


def shared(
    trained: TaskSources, names: Iterable[str], others: Sequence[Task], screen: Screen
) -> tuple[int, int]:
    """Returns how many of `others` are trained on word for word, and how many by their document."""
    names = list(names)
    asked = {rank(task) for name in names for task, _ in trained.tasks[name]}
    read = {int(key) for keys in documents(trained, names, screen).values() for key in keys}
    return (
        sum(rank(task) in asked for task in others),
        sum(document_key(task.document) in read for task in others),
    )


# ---------------------------------------------------------------- what a task is known by


def rank(task: Task) -> int:
    """Returns a number in [0, 2**64) that depends on the question and the answers alone."""
    words = [_plain(task.question), sorted(map(_plain, task.answers))]
    return _number(hashlib.sha256(json.dumps(words).encode()))


def documents(opened: TaskSources, names: Sequence[str], screen: Screen) -> dict[str, np.ndarray]:
    """Returns the `document_key` of every task of some sources, in their order."""
    total = sum(len(opened.tasks[name]) for name in names)
    files = sorted({(file.digest, file.size) for name in names for file in opened.files[name]})
    bar = LateBar(screen, "documents", total, "tasks")

    def find() -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for name in names:
            own = found.setdefault(name, {})
            for task, _ in opened.tasks[name]:
                own[task.id] = f"{document_key(task.document):016x}"
                bar.advance(1)
        return found

    known = json.dumps([files, opened.max_question, *names])
    digest = hashlib.sha256(known.encode()).hexdigest()
    found = remembered("documents", digest, sum(size for _, size in files), find)
    bar.finish()
    return {name: _in_order(found.get(name, {}), opened.tasks[name]) for name in names}


def _in_order(found: Mapping[str, str], pairs: Sequence[Pair]) -> np.ndarray:
    keys = np.empty(len(pairs), np.uint64)
    for number, (task, _) in enumerate(pairs):
        said = found.get(task.id)
        keys[number] = int(said, 16) if said else document_key(task.document)
    return keys


def document_key(document: Document) -> int:
    """Returns a number in [0, 2**64): the hash of a text, however it is cut into pieces.

    Of its words between single spaces, in NFC; case counts. A piece is normalised up to its last
    character that nothing before it can be composed with, so the text is never held as a whole.
    """
    digest, held = hashlib.sha256(), ""
    begun = gap = False
    for piece in itertools.chain(document.pieces(), [None]):
        held += piece or ""
        end = len(held) if piece is None else _certain(held)
        part, held = held[:end], held[end:]
        text = _plain(part)
        if text:
            apart = begun and (gap or part[0].isspace())
            digest.update((" " * apart + text).encode("utf-8", "surrogatepass"))
            begun, gap = True, part[-1].isspace()
        else:
            gap = gap or bool(part)
    return _number(digest)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _certain(text: str) -> int:
    """Returns the place of the last character that composes with nothing before it; 0 if none."""
    for place in range(len(text) - 1, max(0, len(text) - LONGEST_COMPOSED), -1):
        one = text[place]
        if unicodedata.category(one)[0] != "M" and not "\u1100" <= one <= "\u11ff":
            return place
    return max(0, len(text) - LONGEST_COMPOSED)  # no language has such a character


def _number(digest: hashlib._Hash) -> int:
    return int.from_bytes(digest.digest()[:8], "big")
