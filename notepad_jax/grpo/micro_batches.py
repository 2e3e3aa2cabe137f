"""From a `TrainBatch` on the host to the micro-batches that a device runs one after another.

Every micro-batch has the same number of rows and, flat over them, the completion tokens that
are trained on: the host knows which, so the device gathers just the hidden states that predict
one. How many there are varies; their number is padded up to one of a few sizes (`bucket`), so
that few programs are compiled. Above: `update` runs them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from notepad_jax.types import TrainBatch

Leaf = Any  # an array, or whatever jax puts in its place when it maps over a tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """b rows and, flat over them, the X completion tokens that are trained on."""

    tokens: Leaf  # [b, T]
    positions: Leaf  # [b, T]
    kv_end: Leaf  # [b, T]
    before: Leaf  # [X] flat index of the hidden state that predicts the token
    labels: Leaf  # [X]
    weights: Leaf  # [X] 0 on the padding of X
    advantages: Leaf  # [X]
    behaviour: Leaf  # [X]
    proximal: Leaf  # [X]
    reference: Leaf  # [X]
    update_turn: Leaf  # [X]


def bucket(count: int) -> int:
    """Rounds up to a power of two, at least 256; above 4,096 to quarters of one.

    Padded positions cost a row of logits each. For a few thousand, compiling the update once
    more costs far more than they do; for many, at most 25% are padding.
    """
    if count <= 4096:
        return max(256, 1 << (count - 1).bit_length())
    unit = 1 << (count - 1).bit_length() - 3
    return -(-count // unit) * unit


def split(batch: TrainBatch, rows: int) -> list[MicroBatch]:
    """Splits the batch's rows, in order, into micro-batches of equal shape, on the host.

    Raises ValueError: the rows cannot be split, or no token or a row's first token is trained.
    """
    height, width = batch.tokens.shape
    if height % rows:
        raise ValueError(
            f"{height} rows cannot be split into micro-batches of {rows}; "
            f"pack with rows_multiple={rows}"
        )
    trained_BT = batch.weights > 0
    if trained_BT[:, 0].any():
        raise ValueError("the first token of a row is trained, but nothing precedes it")
    places = [np.flatnonzero(trained_BT[at : at + rows]) for at in range(0, height, rows)]
    most = max(len(place_X) for place_X in places)
    if not most:
        raise ValueError("the batch holds not one trained token; there is nothing to learn from")
    size = bucket(most)

    def one(number: int, place_X: np.ndarray) -> MicroBatch:
        here = slice(number * rows, (number + 1) * rows)

        def take(values_BT: np.ndarray) -> np.ndarray:
            out_X = np.zeros(size, values_BT.dtype)
            out_X[: len(place_X)] = values_BT[here].reshape(-1)[place_X]
            return out_X

        before_X = np.zeros(size, np.int32)
        before_X[: len(place_X)] = place_X - 1
        return MicroBatch(
            tokens=batch.tokens[here],
            positions=batch.positions[here],
            kv_end=batch.kv_end[here],
            before=before_X,
            labels=take(batch.tokens),
            weights=take(batch.weights),
            advantages=take(batch.advantages),
            behaviour=take(batch.behaviour_logprobs),
            proximal=take(batch.proximal_logprobs),
            reference=take(batch.reference_logprobs),
            update_turn=take(batch.update_turn),
        )

    return [one(number, place_X) for number, place_X in enumerate(places) if len(place_X)]
