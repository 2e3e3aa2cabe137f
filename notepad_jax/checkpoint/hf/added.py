"""LoRA merging at export, leaf by leaf, and what the export's dtype rounds away of a change.

A weight in bfloat16 has no room for a change below half a unit in its last place, some 1e-3 of it,
and many steps of training at a small rate are less. Above: `programs.export`, which compares a run
with what it began with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from notepad_jax.checkpoint.hf.fields import ImportProblem
from notepad_jax.model.lora import Lora


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """An adapted matrix that is added up, in float32, when it is indexed: `leaf[layer]`."""

    matrix: Any  # [L, *inputs, *outputs]; an array, or a leaf that is read then
    a: np.ndarray  # [L, *inputs, r]
    b: np.ndarray  # [L, r, *outputs]
    scale: float
    rounding: Rounding  # is told of every matrix that is added up

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        matrix = np.asarray(self.matrix[index]).astype(np.float32)
        delta = self.scale * np.tensordot(self.a[index], self.b[index], axes=1)
        total = matrix + delta
        self.rounding.add(matrix, delta, total)
        return total


def added(
    params: Any, lora: Lora, adapters: Mapping[str, Any], rounding: Rounding
) -> dict[str, Any]:
    """Returns `params` with `adapters` added in as they are read; `rounding` is told of it.

    Leaves of both may be on disk (`lazy_arrays.Stored`). Raises ImportProblem for adapters that are
    not those of `lora`.
    """
    layers, ours = dict(params["layers"]), adapters.get("layers", {})
    for name in lora.targets:
        leaves = (f"{name}_lora_in", f"{name}_lora_out")
        for leaf in leaves:
            if leaf not in ours:
                raise ImportProblem(f"the adapters lack {leaf}, which lora.targets asks for")
        a, b = (np.asarray(ours[leaf][()]) for leaf in leaves)  # device to host
        layers[name] = Sum(layers[name], a, b, np.float32(lora.alpha / lora.rank), rounding)
    return {**params, "layers": layers}


# ---------------------------------------------------------------- what a dtype rounds away


class Rounding:
    """Accumulates the rounding error of a change when weights are written in `dtype`.

    `moved` counts the weights that training changed, and `unseen` those of them that are written
    as they were. `lost` is the relative error of what is left of the change D beside the start W,
    both as they are written: |round(W + D) - round(W) - D| / |D|; None where nothing was learnt.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.moved = self.unseen = 0
        self._error = self._whole = 0.0  # squares

    def add(self, start: np.ndarray, change: np.ndarray, now: np.ndarray) -> None:
        """Takes a tensor, what was added to it, and the sum into account, all float32."""
        left = self._rounded(now) - self._rounded(start)
        self.moved += int(np.count_nonzero(change))
        self.unseen += int(np.count_nonzero((left == 0) & (change != 0)))
        self._error += float(np.sum(np.square(left - change), dtype=np.float64))
        self._whole += float(np.sum(np.square(change), dtype=np.float64))

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.dtype).astype(np.float32)

    @property
    def lost(self) -> float | None:
        return math.sqrt(self._error / self._whole) if self._whole else None


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    """A lazy leaf that is compared with its start value when it is indexed: `leaf[layer]`."""

    leaf: Any  # whatever has a shape, a dtype and `[index]`; the next too
    start: Any
    rounding: Rounding

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.leaf.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.leaf.dtype)

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        now = np.asarray(self.leaf[index])
        start, whole = np.asarray(self.start[index]).astype(np.float32), now.astype(np.float32)
        self.rounding.add(start, whole - start, whole)
        return now


def compared(params: Any, start: Any, rounding: Rounding) -> Any:
    """Returns `params`, of which `rounding` is told when they are read, leaf by leaf.

    Leaves that `start` lacks, or has in another shape, are read without a word.
    """
    if isinstance(params, Mapping):
        below = start if isinstance(start, Mapping) else {}
        return {key: compared(leaf, below.get(key), rounding) for key, leaf in params.items()}
    alike = start is not None and tuple(getattr(start, "shape", ())) == tuple(params.shape)
    return Compared(params, start, rounding) if alike else params
