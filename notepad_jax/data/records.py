"""The dataset that a run draws from: an endless, seeded stream of samples, known by place.

`generated` makes a sample, one document's questions, on the spot from a document seed; `of_files`
draws it from task files, each source by its weight and not by its size. Either way a sample has an
**ordinal**, its place in the stream, and `Records.at` gives the sample of any ordinal: a machine
that is told a number has the sample, and a run that knows which ordinals it is done with goes on
with the very next one after a restart. Grain shuffles, mixes and repeats numbers in this
process (no workers: making or reading a document is cheap, and a worker would be one more thing to
kill). Grain imports jax for itself; nothing here uses it. Above: setup.task_stream; below:
task_sources (what is read; what is made comes in as a function).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from notepad_jax.data.array_records import in_memory
from notepad_jax.data.rows import Pair
from notepad_jax.data.task_sources import TaskSources, shares
from notepad_jax.types import Task

WINDOW = "window"  # in an identity that has one
ALL_DOCUMENTS = range(2**31)  # document seeds; give a part of it to hold documents out


class Records:
    """A dataset of samples by ordinal; `generated` and `of_files` make one.

    `identity` says what it is a stream of, in values that JSON holds: two streams of one
    identity have the same sample at every ordinal. `tasks` are those that it draws again and
    again, by source: how many; empty where no sample ever comes again.
    """

    def __init__(
        self,
        keys: grain.MapDataset | _Reordered,
        read: Callable[[Any], tuple[Task, ...]],
        identity: Mapping[str, Any],
        tasks: Mapping[str, int],
    ) -> None:
        self.identity = identity
        self.tasks = tasks
        self._keys, self._read = keys, read

    def at(self, ordinal: int) -> tuple[Task, ...]:
        """Returns the sample of an ordinal: the same one whatever was asked for before.

        Raises ValueError for an ordinal below 0, and what reading or making the sample does.
        """
        return self._read(self.key(ordinal))

    def reordered(self, order: Callable[[int], int], window: Sequence[int]) -> Records:
        """Returns the same samples in another order: at a place stands what stood at `order`.

        `window` says which order, in the identity: (steps, documents a step) of `windows`.
        """
        identity = {**self.identity, WINDOW: list(window)}
        return Records(_Reordered(self._keys, order), self._read, identity, self.tasks)

    def key(self, ordinal: int) -> Any:
        """Returns what an ordinal draws, and reads nothing: (source, number in it) of a task out
        of files, or the seed of a document that is made. Raises ValueError for one below 0.
        """
        if ordinal < 0:
            raise ValueError(f"there is no ordinal {ordinal}; they are counted from 0")
        return self._keys[ordinal]

    def check(self, saved: Mapping[str, Any], mended: bool = False) -> None:
        """Raises ValueError, saying how to mend it, if `saved` is another stream's identity.

        Task files are the same if their bytes are, wherever they lie now; with `mended`, if the
        tasks have the same ids in the same order, so that every ordinal draws the task that it
        drew, whatever its words are by now.
        """
        drawn = [_KINDS["documents" in identity] for identity in (saved, self.identity)]
        if drawn[0] != drawn[1]:
            raise ValueError(
                f"this data position was saved in a run that draws {drawn[0]}, and this one "
                f"draws {drawn[1]}; resume with the tasks.files of the saved run"
            )
        if mended and WINDOW in self.identity and _bytes(self.identity) != _bytes(saved):
            raise ValueError(
                "rows were mended, and rollout.window sorts draws by the lengths of documents, "
                "which they may have changed; go on with the files as they were, without --mended"
            )
        for name in {**self.identity, "held_out": None, WINDOW: None}:
            theirs, ours = saved.get(name), self.identity.get(name)
            if name == "max_question":
                continue  # it matters where it leaves something out, and `left_out` says so
            if name == "tasks":
                if mended and ours != theirs:
                    raise ValueError(_other_tasks(ours, theirs))
            elif name == "files":
                _check_files(ours, theirs, mended)
            elif name == "left_out" and ours != theirs:
                raise ValueError(
                    f"this data position was saved with questions of more than "
                    f"{saved.get('max_question')} tokens left out ({_counts(theirs)}), and the "
                    f"run leaves out those of more than {self.identity['max_question']} "
                    f"({_counts(ours)}); resume with the reading.max_question of the saved run"
                )
            elif name == "held_out_by" and theirs is None:
                raise ValueError(
                    "this data position was saved by a version that held tasks out in another "
                    "way; begin a new run"
                )
            elif name == "held_out_by" and theirs != ours:
                raise ValueError(
                    f"this data position was saved with {theirs} held out, and the run holds out "
                    f"{ours}; resume with validation.split_by={theirs}"
                )
            elif name == "held_out" and theirs != ours:
                raise ValueError(
                    f"this data position was saved with tasks held out: {_counts(theirs)}, and "
                    f"the run holds out: {_counts(ours)}; resume with the validation.split of the "
                    f"saved run"
                )
            elif name == WINDOW and theirs != ours:
                raise ValueError(
                    f"this data position was saved {_windows(theirs)}, and the run goes on "
                    f"{_windows(ours)}; resume with the rollout.window and rollout.documents of "
                    f"the saved run"
                )
            elif theirs != ours:
                raise ValueError(
                    f"this data position was saved with {name} = {theirs} and the run has {ours}; "
                    "resume with the settings of the saved run"
                )


@dataclasses.dataclass(frozen=True)
class _Reordered:
    """Keys in another order."""

    keys: Any  # by place
    order: Callable[[int], int]

    def __getitem__(self, ordinal: int) -> Any:
        return self.keys[self.order(ordinal)]


def generated(
    make: Callable[[int], tuple[Task, ...]],
    seed: int,
    documents: range = ALL_DOCUMENTS,
) -> Records:
    """Samples `make(document_seed)` in a seeded, shuffled order.

    `make` gets every seed of `documents` once per epoch, reshuffled each epoch. Two samples of one
    epoch never have the same document seed. `make` must be a pure function.
    """
    _check(seed)
    bounds = documents.start, documents.stop, documents.step
    seeds = grain.MapDataset.range(*bounds).seed(seed).shuffle().repeat()
    return Records(seeds, make, {"seed": seed, "documents": [*bounds]}, {})


def of_files(
    sources: TaskSources,
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> Records:
    """Samples out of task files, one task each, in a seeded order.

    Sources take turns by their weights (1 if not given), whatever their sizes: with weights
    2 and 1, every three samples have two of the first. Each source is shuffled anew when it
    has been gone through. A source of weight 0 is left out.

    Raises ValueError for a weight of nothing, or below 0.
    """
    _check(seed)
    drawn = shares(sources.tasks, weights or {})
    identity = {
        "seed": seed,
        "weights": drawn,
        "files": {
            name: [[file.path, file.digest] for file in sources.files[name]] for name in drawn
        },
        "left_out": {name: n for name, n in sources.left_out.items() if name in drawn},
        "max_question": sources.max_question,
        "tasks": {name: _told(sources.tasks[name]) for name in drawn},
    }
    if held_out := {name: n for name, n in sources.held_out.items() if name in drawn}:
        identity |= {"held_out": held_out, "held_out_by": sources.held_out_by}
    parts = [
        grain.MapDataset.range(len(sources.tasks[name]))
        .seed(_own_seed(seed, name))
        .shuffle()
        .repeat()
        .map(functools.partial(_place, name))
        for name in drawn
    ]
    return Records(
        grain.MapDataset.mix(parts, weights=list(drawn.values())),
        functools.partial(_sample, sources.tasks),
        identity,
        {name: len(sources.tasks[name]) for name in drawn},
    )


def _told(pairs: Sequence[Pair]) -> list[Any]:
    """Returns how many tasks a source has, and a digest of their ids; of records, how many."""
    if not in_memory(pairs):
        return [len(pairs)]
    ids = hashlib.sha256(json.dumps([task.id for task, _ in pairs]).encode())
    return [len(pairs), ids.hexdigest()[:32]]


def _place(name: str, number: int) -> tuple[str, int]:
    return name, number


def _sample(tasks: Mapping[str, Sequence[Pair]], place: tuple[str, int]) -> tuple[Task, ...]:
    name, number = place
    return (tasks[name][number][0],)


def _own_seed(seed: int, name: str) -> int:
    """A seed for each source: two sources of one size must not be shuffled alike."""
    state = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    return int(state.generate_state(1, np.uint32)[0])


# ---------------------------------------------------------------- one stream or another


_KINDS = {True: "generated documents", False: "tasks out of files"}


def _other_tasks(ours: Mapping[str, Sequence[Any]], theirs: Any) -> str:
    """Says why rows that were mended cannot be gone on with."""
    if not isinstance(theirs, Mapping):
        return (
            "this data position was saved by a version that did not take down which tasks a file "
            "has, so nobody can tell whether mended rows stand where they stood; begin a new run"
        )
    name = next(name for name in ours if ours[name] != theirs.get(name))
    now, then = ours[name], theirs.get(name, [0])
    same = now[0] == then[0]
    what = (
        f"{now[0]:,} tasks to draw from as before, and they are others or in another order"
        if same
        else f"{now[0]:,} tasks to draw from, and had {then[0]:,} when this data position was saved"
    )
    return (
        f"source {name!r} has {what}; rows may be mended where they stand, under their ids, but "
        f"none may come, go or change sides of validation.split; go on with the file as it was, "
        f"or begin a new run"
    )


def _check_files(ours: Mapping[str, Sequence[Sequence[str]]], theirs: Any, mended: bool) -> None:
    """Compares the [path, digest] lists of all sources; ValueError naming the first difference."""
    if not isinstance(theirs, Mapping):
        raise ValueError(
            "this data position was saved by a version that did not take down the bytes of task "
            "files, so nobody can tell whether they are the same; begin a new run"
        )
    for name in ours:
        now, then = ours[name], theirs.get(name, ())
        paths = ", ".join(path for path, _ in then) or "none"
        if sorted(digest for _, digest in now) == sorted(digest for _, digest in then):
            if [digest for _, digest in now] != [digest for _, digest in then]:
                raise ValueError(
                    f"the files of source {name!r} stand in another order than when this data "
                    f"position was saved; resume with tasks.files in that order: {paths}"
                )
        elif len(now) != len(then):
            raise ValueError(
                f"source {name!r} has {len(now)} files, and had {len(then)} when this data "
                f"position was saved; resume with these: {paths}"
            )
        elif not mended:
            known = {digest for _, digest in then}
            changed = next(path for path, digest in now if digest not in known)
            raise ValueError(
                f"{changed} (source {name!r}) is not what it was when this data position was "
                f"saved: its bytes or its ids differ; resume with the file as it was ({paths}), "
                f"or, if its rows were mended where they stand, with --mended"
            )


def _bytes(identity: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the digests of each source's files, wherever they lie."""
    return {
        name: sorted(digest for _, digest in files)
        for name, files in (identity.get("files") or {}).items()
    }


def _windows(said: Sequence[int] | None) -> str:
    return "in windows of {} steps of {} documents".format(*said) if said else "without windows"


def _counts(left_out: Mapping[str, int] | None) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in (left_out or {}).items()) or "none"


def _check(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"the data seed is {seed}; it must be in 0..{2**32 - 1}")
