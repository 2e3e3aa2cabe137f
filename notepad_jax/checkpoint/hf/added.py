"""LoRA merging at export: a base with its adapters added in, leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from notepad_jax.checkpoint.hf.fields import ImportProblem
from notepad_jax.checkpoint.hf.rounding import Rounding
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
