"""Where a run draws its questions: an endless, seeded, resumable stream of documents.

`generated` makes a sample, one document's questions, on the spot from a document seed;
`of_files` draws it from task files, each source by its weight and not by its size.
Either way the state is a position, and a position is all it takes to go on with the very
next sample after a restart. Grain shuffles, shards, mixes and repeats numbers in this
process (no workers: making or reading a document is cheap, and a worker would be one more
thing to kill). Grain imports jax for itself; nothing here uses it. Above: programs.train;
below: formats (what is read; what is made comes in as a function).
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from notepad_jax.data import array_records, formats
from notepad_jax.types import Task

ALL_DOCUMENTS = range(2**31)  # document seeds; give a part of it to hold documents out

_IN_PROCESS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)


class Records:
    """An endless iterator of samples, and a position in it; `generated` and `of_files` make one."""

    def __init__(self, samples: grain.MapDataset, identity: Mapping[str, Any]) -> None:
        self._identity = identity
        self._samples = iter(samples.to_iter_dataset(_IN_PROCESS))

    def __iter__(self) -> Iterator[tuple[Task, ...]]:
        return self

    def __next__(self) -> tuple[Task, ...]:
        return next(self._samples)

    def get_state(self) -> bytes:
        """Returns the position and what it is a position in, as JSON bytes."""
        return json.dumps({"identity": self._identity, "grain": self._samples.get_state()}).encode()

    def set_state(self, state: bytes) -> None:
        """Goes to a position: the next sample is the one that came next at `get_state`.

        Raises ValueError if the state belongs to another seed, shard, mix or set of documents.
        """
        saved = json.loads(state)
        for name, ours in self._identity.items():
            theirs = saved["identity"].get(name)
            if theirs != ours:
                raise ValueError(
                    f"this data position was saved with {name} = {theirs} and the run has {ours}; "
                    "resume with the settings of the saved run"
                )
        self._samples.set_state(saved["grain"])


def generated(
    make: Callable[[int], tuple[Task, ...]],
    seed: int,
    shard_index: int = 0,
    shard_count: int = 1,
    documents: range = ALL_DOCUMENTS,
) -> Records:
    """Samples `make(document_seed)` in a seeded, shuffled order.

    `make` gets every seed of `documents` once per epoch, reshuffled each epoch; shard i
    of n sees every n-th seed, so shards are disjoint and together complete. Two samples
    of one epoch never have the same document seed. `make` must be a pure function.
    """
    _check(seed, shard_index, shard_count)
    if len(documents) < shard_count:
        raise ValueError(
            f"{len(documents)} documents cannot be split over {shard_count} shards; "
            "use more documents or fewer shards"
        )
    identity = {
        "seed": seed,
        "shard_index": shard_index,
        "shard_count": shard_count,
        "documents": [documents.start, documents.stop, documents.step],
    }
    shard = grain.MapDataset.range(documents.start, documents.stop, documents.step)
    shard = shard[shard_index::shard_count].seed(seed).shuffle().repeat()
    return Records(shard.map(make), identity)


def of_files(
    sources: Mapping[str, Sequence[tuple[Task, int]]],
    seed: int,
    weights: Mapping[str, float] | None = None,
    shard_index: int = 0,
    shard_count: int = 1,
) -> Records:
    """Samples out of task files, one task each, in a seeded order; `sources` as of `by_source`.

    Sources take turns by their weights (1 if not given), whatever their sizes: with weights
    2 and 1, every three samples have two of the first. Each source is shuffled anew when it
    has been gone through. Shard i of n has every n-th task of every source, so shards are
    disjoint and together complete, and all of them draw from the same source at the same
    step. A source of weight 0 is left out.

    Raises ValueError for a weight of nothing, or below 0, or a source with fewer tasks than
    shards.
    """
    _check(seed, shard_index, shard_count)
    shares = _shares(sources, weights or {})
    for name in shares:
        if len(sources[name]) < shard_count:
            raise ValueError(
                f"{len(sources[name])} tasks of {name!r} cannot be split over {shard_count} "
                f"shards; use more tasks or fewer shards"
            )
    identity = {
        "seed": seed,
        "shard_index": shard_index,
        "shard_count": shard_count,
        "weights": shares,
        "tasks": {name: len(sources[name]) for name in shares},
        "files": _digest(sources[name] for name in shares),
    }
    parts = [
        grain.MapDataset.range(len(sources[name]))[shard_index::shard_count]
        .seed(_own_seed(seed, name))
        .shuffle()
        .repeat()
        .map(functools.partial(_sample, sources[name]))
        for name in shares
    ]
    return Records(grain.MapDataset.mix(parts, weights=list(shares.values())), identity)


def by_source(paths: Iterable[str | Path]) -> dict[str, Sequence[tuple[Task, int]]]:
    """Opens task files and RULER files, and sorts their tasks by `Task.source`.

    An .array_record is one source, named after the file, since its records are only read
    when they are drawn. Raises ValueError for what `formats.read_any` refuses, for two
    ArrayRecord files of one name, and for a task id that stands in two files.
    """
    found: dict[str, Any] = {}
    known: dict[str, str | Path] = {}
    for path in paths:
        pairs = formats.read_any(path)
        if isinstance(pairs, array_records.ArrayRecords):
            name = Path(path).stem
            if name in found:
                raise ValueError(f"{path}: there is a source {name!r} already; rename the file")
            found[name] = pairs
            continue
        for task, length in pairs:
            if task.id in known:
                raise ValueError(
                    f"{path} has task {task.id!r}, and so has {known[task.id]}; give each file once"
                )
            known[task.id] = path
            own = found.setdefault(task.source, [])
            if not isinstance(own, list):
                raise ValueError(f"{path}: an ArrayRecord file is named {task.source!r}, too")
            own.append((task, length))
    return found


def _shares(sources: Mapping[str, Sequence[Any]], weights: Mapping[str, float]) -> dict[str, float]:
    """The weight of every source that is to be drawn from, in order of name."""
    for name, weight in weights.items():
        if name not in sources:
            raise ValueError(f"no source {name!r} to weigh; there are {', '.join(sorted(sources))}")
        if not 0 <= weight < float("inf"):
            raise ValueError(f"the weight of {name!r} is {weight}; it must be 0 or more")
    shares = {name: float(weights.get(name, 1)) for name in sorted(sources)}
    shares = {name: weight for name, weight in shares.items() if weight}
    if not shares:
        raise ValueError("there is no source to draw from; give a file, or a weight above 0")
    return shares


def _sample(pairs: Sequence[tuple[Task, int]], number: int) -> tuple[Task, ...]:
    return (pairs[number][0],)


def _own_seed(seed: int, name: str) -> int:
    """A seed for each source: two sources of one size must not be shuffled alike."""
    state = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    return int(state.generate_state(1, np.uint32)[0])


def _digest(sources: Iterable[Sequence[tuple[Task, int]]]) -> str:
    """Tells files apart by their task ids; of an ArrayRecord, by its first and last one."""
    digest = hashlib.blake2b(digest_size=8)
    for pairs in sources:
        known = isinstance(pairs, list | tuple)
        for number in range(len(pairs)) if known else (0, len(pairs) - 1):
            digest.update(json.dumps(pairs[number][0].id).encode())
    return digest.hexdigest()


# ---------------------------------------------------------------- what both have in common


def _check(seed: int, shard_index: int, shard_count: int) -> None:
    if not 0 <= shard_index < shard_count:
        raise ValueError(
            f"shard {shard_index} of {shard_count} does not exist; "
            f"shard_index must be in 0..{shard_count - 1}"
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f"the data seed is {seed}; it must be in 0..{2**32 - 1}")
