"""Grammar masks of constrained decoding: a bit for each id that a turn may draw next.

What may follow a token depends on the token, so a turn with a grammar makes one in a launch, while
others beside it make several. The host computes masks for each launch, which has as many as the
engine has slots, used or not: its shape stays. Above: `layout`, `executor`; below: matchers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from notepad_jax.engine.scheduler import Context
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.parallel import place


class Masks(NamedTuple):
    """Token masks of grammars: `bits` int32 [n, W], and which of them each context has."""

    bits: np.ndarray | None  # None: of an engine that has none
    which: list[int]  # -1: none


def found(settings: EngineSettings, contexts: Sequence[Context]) -> Masks:
    """Returns the masks of those contexts that have a grammar."""
    words, bits, which = settings.mask_words, [], []
    for context in contexts:
        which.append(-1 if context.matcher is None else len(bits))
        if context.matcher is not None:
            # The policy may have more ids than the tokenizer: no turn may draw those.
            allowed = context.matcher.allowed()[:words]
            bits.append(np.pad(allowed, (0, words - len(allowed))))
    return Masks(np.array(bits, np.int32).reshape(-1, words) if words else None, which)


class Placed:
    """Places launches' masks on an engine's devices, where one that forbids nothing stays."""

    def __init__(self, settings: EngineSettings, mesh: Mesh) -> None:
        self._shape = settings.slots, settings.mask_words
        self._where = place.replicated(mesh)
        self._none = self._whole(()) if settings.mask_words else None

    def placed(self, arrays: Any) -> Any:
        """Returns a launch's host arrays with its masks on the devices, copied if there are any."""
        if arrays.masks is None:
            return arrays
        masks = self._whole(arrays.masks) if len(arrays.masks) else self._none
        return dataclasses.replace(arrays, masks=masks)

    def _whole(self, bits: Sequence[np.ndarray]) -> jax.Array:
        whole = np.zeros(self._shape, np.int32)
        whole[: len(bits)] = bits if len(bits) else 0
        return place.commit(whole, self._where)


def abstract(settings: EngineSettings, mesh: Mesh, arrays: Any) -> Any:
    """Returns a launch's arrays with abstract masks, sharded as `Placed.placed` places them."""
    if arrays.masks is None:
        return arrays
    shape, where = (settings.slots, settings.mask_words), place.replicated(mesh)
    masks = jax.ShapeDtypeStruct(shape, np.int32, sharding=where)
    return dataclasses.replace(arrays, masks=masks)
