"""The `params` of an orbax step as arrays that are read when they are indexed.

Orbax restores a whole tree; an export wants one tensor at a time, on a machine that may not
hold the model. A step's arrays are zarr3 inside an OCDBT database, both of which tensorstore
reads directly, so `open_params` returns leaves with a shape, a dtype and `[index]`. Neighbour
above: `huggingface.export_params`, which takes them where it takes jax arrays.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts


class Stored:
    """One parameter on disk; `stored[layer]` or `stored[layer, expert]` reads it.

    What is read is kept until another part of the array is asked for: chunks are decoded
    whole, so neighbouring layers that share chunks are read at once. The host holds as many
    layers as a chunk does: all of them in a chunk as orbax writes it by default.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype.numpy_dtype)
        self._first, self._held = 0, np.empty((0,), self.dtype)

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        """Returns one entry of the leading axes; () is all of it."""
        if not index:
            return self._array.read().result()
        row, held = index[0] - self._first, len(self._held)
        if not 0 <= row < held:
            step = self._array.chunk_layout.read_chunk.shape[0] or 1
            self._held = np.empty((0,), self.dtype)  # let go before the next is read
            self._first = index[0] // step * step
            last = min(self._first + step, self.shape[0])
            self._held = self._array[self._first : last].read().result()
            row = index[0] - self._first
        return self._held[(row, *index[1:])]


def open_params(step: str | Path) -> dict[str, Any]:
    """Returns the tree of `Stored` leaves of a finished step; reads metadata only.

    Raises ValueError for a step that was not written as this project writes them.
    """
    folder = Path(step).absolute() / "params"
    try:
        described = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
        paths = [ast.literal_eval(key) for key in described["tree_metadata"]]
        driver = "zarr3" if described["use_zarr3"] else "zarr"
        if not described["use_ocdbt"]:
            raise KeyError("use_ocdbt")
    except (OSError, ValueError, KeyError, SyntaxError) as problem:
        raise ValueError(
            f"{step} has no params that can be read ({problem}); give a step that this "
            f"project's trainer or import-hf saved"
        ) from None
    tree: dict[str, Any] = {}
    for path in paths:
        spec = {
            "driver": driver,
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{folder}/"},
                "path": ".".join(path) + "/",
            },
        }
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = Stored(ts.open(spec, open=True, read=True).result())
    return tree
