"""Where a run draws its questions: an endless, seeded, resumable stream of documents.

A sample is one document's questions, made on the spot from a document seed, so nothing
has to be stored to be exactly the same after a restart: the state is a position. Grain
shuffles, shards and repeats the document seeds in this process (no workers: making a
document is cheap, and a worker would be one more thing to kill). Grain imports jax for
itself; nothing here uses it. Made by tasks.synthetic, drawn by programs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import grain

from notepad_jax.types import Task

ALL_DOCUMENTS = range(2**31)  # document seeds; give a part of it to hold documents out

_IN_PROCESS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)


class Records:
    """An endless iterator of samples: `make(document_seed)` in a seeded, shuffled order.

    `make` gets every seed of `documents` once per epoch, reshuffled each epoch; shard i
    of n sees every n-th seed, so shards are disjoint and together complete. Two samples
    of one epoch never have the same document seed. `make` must be a pure function.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[Task, ...]],
        seed: int,
        shard_index: int = 0,
        shard_count: int = 1,
        documents: range = ALL_DOCUMENTS,
    ) -> None:
        if not 0 <= shard_index < shard_count:
            raise ValueError(
                f"shard {shard_index} of {shard_count} does not exist; "
                f"shard_index must be in 0..{shard_count - 1}"
            )
        if not 0 <= seed < 2**32:
            raise ValueError(f"the data seed is {seed}; it must be in 0..{2**32 - 1}")
        if len(documents) < shard_count:
            raise ValueError(
                f"{len(documents)} documents cannot be split over {shard_count} shards; "
                "use more documents or fewer shards"
            )
        self._identity = {
            "seed": seed,
            "shard_index": shard_index,
            "shard_count": shard_count,
            "documents": [documents.start, documents.stop, documents.step],
        }
        shard = grain.MapDataset.range(documents.start, documents.stop, documents.step)
        shard = shard[shard_index::shard_count].seed(seed).shuffle().repeat()
        self._samples = iter(shard.map(make).to_iter_dataset(_IN_PROCESS))

    def __iter__(self) -> Iterator[tuple[Task, ...]]:
        return self

    def __next__(self) -> tuple[Task, ...]:
        return next(self._samples)

    def get_state(self) -> bytes:
        """Returns the position and what it is a position in, as JSON bytes."""
        return json.dumps({"identity": self._identity, "grain": self._samples.get_state()}).encode()

    def set_state(self, state: bytes) -> None:
        """Goes to a position: the next sample is the one that came next at `get_state`.

        Raises ValueError if the state belongs to another seed, shard or set of documents.
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
