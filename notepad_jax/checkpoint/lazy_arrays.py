"""Lazy arrays of an orbax step: its trees, each leaf read when it is indexed.

Orbax restores a whole tree; an export wants one tensor at a time, on a machine that may not hold
the model. A step's arrays are zarr3 inside an OCDBT database, both of which tensorstore reads
directly, so `open_tree` returns leaves with a shape, a dtype and `[index]`. Once all of a leaf has
been read, its checksum is compared with the one that its step recorded (`checksums`, beside): a
checksum is a sum over elements, so no leaf has to be whole at any time. Above: programs.export,
which gives them to `huggingface.export`, `hf.added` and `hf.adapters`; these take them for jax
arrays.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from notepad_jax.checkpoint import bucket, checksums

MEND = "so the step is damaged; export another step"


class Held:
    """A step's read cache: the rows that were read last, of whichever leaf."""

    def __init__(self) -> None:
        self.leaf: Stored | None = None
        self.first = 0
        self.rows = np.empty((0,))


class Stored:
    """A lazy parameter on disk; `stored[layer]` or `stored[layer, expert]` reads it.

    What is read is kept until another part of the step is asked for: chunks are decoded
    whole, so the layers that share one are read at once. A chunk is one layer (`steps`
    writes them so), or all of a leaf that is small. Raises ValueError where the step's files
    are damaged, at the latest when the last part of the leaf is read.
    """

    def __init__(self, name: str, array: Any, held: Held, published: str | None) -> None:
        self.name, self.shape = name, tuple(array.shape)
        self.dtype = np.dtype(array.dtype.numpy_dtype)
        self._array, self._held, self._published = array, held, published
        self._seen: set[int] = set()  # first rows of the parts that were summed
        self._left, self._sum = self._rows, 0

    @property
    def _rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        """Returns one entry of the leading axes; () is all of it."""
        if not index:
            return self._read(0, self._rows)
        held = self._held
        if held.leaf is not self or not 0 <= index[0] - held.first < len(held.rows):
            step = self._array.chunk_layout.read_chunk.shape[0] or 1
            held.leaf, held.rows = None, np.empty((0,))  # let go before the next is read
            first = index[0] // step * step
            rows = self._read(first, min(first + step, self.shape[0]))
            held.leaf, held.first, held.rows = self, first, rows
        return held.rows[(index[0] - held.first, *index[1:])]

    def _read(self, first: int, last: int) -> np.ndarray:
        """Reads rows; a leaf without axes counts as one row."""
        try:
            part = (self._array[first:last] if self.shape else self._array).read().result()
        except (ValueError, OSError) as problem:
            raise _unreadable(self.name, problem) from None
        if self._published is not None and first not in self._seen:
            self._seen.add(first)
            self._left -= last - first
            self._sum += checksums.part_sum(part, first * math.prod(self.shape[1:]))
            if self._left == 0:
                self._compare(self._published)
        return part

    def _compare(self, published: str) -> None:
        found = checksums.described(self, self._sum % 2**32)
        if found != published:
            raise ValueError(f"{self.name} was saved as {published} and reads as {found}, {MEND}")


def open_tree(
    step: str | Path | epath.Path, item: str = "params", under: tuple[str, ...] = ()
) -> Any:
    """Returns the tree of `Stored` leaves of a finished step; reads metadata only.

    `item` is one of the step's checkpointables, `under` a path inside it, of which the tree
    below is returned ({} if there is none). Raises ValueError for a step that was not written
    as this project writes them, or is damaged.
    """
    folder = bucket.path(step) / item
    try:
        described = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
        paths = [ast.literal_eval(key) for key in described["tree_metadata"]]
        driver = "zarr3" if described["use_zarr3"] else "zarr"
        if not described["use_ocdbt"]:
            raise KeyError("use_ocdbt")
    except (OSError, ValueError, KeyError, SyntaxError) as problem:
        raise ValueError(
            f"{step} has no {item} that can be read ({problem}); give a step that this "
            f"project's trainer or import-hf saved"
        ) from None
    published, held = _checksums(bucket.path(step)) if item == "params" else {}, Held()
    tree: dict[str, Any] = {}
    for path in paths:
        if path[: len(under)] != under:
            continue
        spec = {
            "driver": driver,
            "kvstore": {
                "driver": "ocdbt",
                "base": bucket.kvstore(folder).spec().to_json(),
                "path": ".".join(path) + "/",
            },
        }
        node = tree
        for key in path[len(under) : -1]:
            node = node.setdefault(key, {})
        name = "/".join(path)
        try:
            array = ts.open(spec, open=True, read=True).result()
        except (ValueError, OSError) as problem:
            raise _unreadable(f"{step}: {name}", problem) from None
        node[path[-1]] = Stored(f"{step}: {name}", array, held, published.get(name))
    return tree


def _unreadable(name: str, problem: Exception) -> ValueError:
    said = str(problem).splitlines()[0][:300]
    return ValueError(f"{name} cannot be read, {MEND}: {said}")


def _checksums(step: Path | epath.Path) -> dict[str, str]:
    """Returns what a step recorded of its params; one that recorded nothing is not compared."""
    try:
        meta = json.loads((step / "meta" / "data.json").read_text(encoding="utf-8"))
        return dict(meta.get("leaf_checksums") or {})
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
