"""Micro-batching: cuts a `TrainBatch` on the host into parts that devices run one by one.

Every micro-batch has the same number of rows and, flat over them, the completion tokens that
are trained on: the host knows which, so the device gathers just the hidden states that predict
one. On a mesh the rows are cut into as many parts as "fsdp" has devices, and a token's place
counts within its part, so that no device needs another's rows. How many tokens there are
varies; their number is padded up to one of a few sizes (`bucket`), so that few programs are
compiled (`shapes` is one, abstract). Above: `update` runs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from notepad_jax.types import TrainBatch

Leaf = Any  # an array, or whatever jax puts in its place when it maps over a tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: b rows and, flat over them, the X completion tokens that are trained on.

    Both in equal parts for the devices of a mesh: the first X / parts tokens belong to the
    first b / parts rows, and so on, each part with padding of its own.
    """

    tokens: Leaf  # [b, T]
    positions: Leaf  # [b, T]
    kv_end: Leaf  # [b, T]
    before: Leaf  # [X] flat index, within its part's rows, of the state that predicts the token
    labels: Leaf  # [X]
    weights: Leaf  # [X] 0 on the padding of X
    advantages: Leaf  # [X]
    behaviour: Leaf  # [X]
    proximal: Leaf  # [X]
    reference: Leaf  # [X]
    update_turn: Leaf  # [X]
    turn: Leaf  # [X] which turn of its part's, counted from 0; the padding is one of its own
    age: Leaf  # [X]
    trajectory_ratio: Leaf  # [X] mean log ratio over the token's trajectory, if a ratio needs it


def bucket(count: int) -> int:
    """Rounds a token count up to a power of two, at least 256; above 4,096 to quarters of one.

    Padded positions cost a row of logits each. For a few thousand, compiling the update once
    more costs far more than they do; for many, at most 25% are padding.
    """
    if count <= 4096:
        return max(256, 1 << (count - 1).bit_length())
    unit = 1 << (count - 1).bit_length() - 3
    return -(-count // unit) * unit


def split(
    batch: TrainBatch, rows: int, parts: int = 1, trajectory_ratio_BT: np.ndarray | None = None
) -> list[MicroBatch]:
    """Splits the batch's rows, in order, into micro-batches of equal shape, on the host.

    Each has `rows` rows in `parts` parts; log ratios of trajectories are 0 unless told. Raises
    ValueError: the rows cannot be split, or no token or a row's first token is trained.
    """
    height, width = batch.tokens.shape
    check_parts(rows, parts)
    if height % rows:
        raise ValueError(
            f"{height} rows cannot be split into micro-batches of {rows}; "
            f"pack with rows_multiple={rows}"
        )
    trained_BT = batch.weights > 0
    if trained_BT[:, 0].any():
        raise ValueError("the first token of a row is trained, but nothing precedes it")
    places = _places(trained_BT, rows, parts)
    most = max(len(place_Y) for micro in places for place_Y in micro)
    if not most:
        raise ValueError("the batch holds not one trained token; there is nothing to learn from")
    size = bucket(most)
    if trajectory_ratio_BT is None:
        trajectory_ratio_BT = np.zeros_like(batch.weights)

    def one(number: int, micro: list[np.ndarray]) -> MicroBatch:
        here = slice(number * rows, (number + 1) * rows)

        def take(values_BT: np.ndarray, padded: Callable = _padded) -> np.ndarray:
            values_PY = values_BT[here].reshape(parts, -1)
            return np.concatenate(
                [padded(own[place_Y], size) for own, place_Y in zip(values_PY, micro, strict=True)]
            )

        return MicroBatch(
            tokens=batch.tokens[here],
            positions=batch.positions[here],
            kv_end=batch.kv_end[here],
            before=np.concatenate([_padded(place_Y - 1, size) for place_Y in micro], dtype="int32"),
            labels=take(batch.tokens),
            weights=take(batch.weights),
            advantages=take(batch.advantages),
            behaviour=take(batch.behaviour_logprobs),
            proximal=take(batch.proximal_logprobs),
            reference=take(batch.reference_logprobs),
            update_turn=take(batch.update_turn),
            turn=take(batch.turn, _numbered),
            age=take(batch.age),
            trajectory_ratio=take(trajectory_ratio_BT),
        )

    return [one(n, micro) for n, micro in enumerate(places) if any(map(len, micro))]


def shapes(rows: int, width: int, parts: int, most: int) -> MicroBatch:
    """An abstract micro-batch of `rows` x `width` whose fullest part has `most` trained tokens."""
    check_parts(rows, parts)
    by_row, flat = (rows, width), (parts * bucket(most),)
    whole, real = np.dtype(np.int32), np.dtype(np.float32)
    kinds = dict.fromkeys(
        ("tokens", "positions", "kv_end", "before", "labels", "turn", "age"), whole
    )
    return MicroBatch(
        **{
            field.name: jax.ShapeDtypeStruct(
                by_row if field.name in ("tokens", "positions", "kv_end") else flat,
                kinds.get(field.name, real),
            )
            for field in dataclasses.fields(MicroBatch)
        }
    )


def check_parts(rows: int, parts: int) -> None:
    """Raises ValueError for rows that cannot be spread evenly over a mesh's devices."""
    if rows % parts:
        raise ValueError(
            f"grpo.micro_batch_rows is {rows}, which {parts} devices cannot share; use a multiple "
            f"of {parts}, or more parallel.tensor"
        )


def put_back(batch: TrainBatch, rows: int, parts: int, found: list[np.ndarray]) -> np.ndarray:
    """The inverse of `split`: scatters results of trained tokens to float32 [B, T], 0 elsewhere.

    `found` is [X] a micro-batch, in the order of `split(batch, rows, parts)`.
    """
    trained_BT = batch.weights > 0
    places = [micro for micro in _places(trained_BT, rows, parts) if any(map(len, micro))]
    kept = [
        own[: len(place_Y)]
        for found_X, micro in zip(found, places, strict=True)
        for own, place_Y in zip(found_X.reshape(parts, -1), micro, strict=True)
    ]
    out_BT = np.zeros(trained_BT.shape, np.float32)
    out_BT[trained_BT] = np.concatenate(kept)
    return out_BT


def _places(trained_BT: np.ndarray, rows: int, parts: int) -> list[list[np.ndarray]]:
    """The trained tokens of every part of every micro-batch, flat within the part."""
    own = rows // parts
    return [
        [np.flatnonzero(trained_BT[at : at + own]) for at in range(first, first + rows, own)]
        for first in range(0, len(trained_BT), rows)
    ]


def _padded(values_Y: np.ndarray, size: int) -> np.ndarray:
    return np.pad(values_Y, (0, size - len(values_Y)))


def _numbered(ids_Y: np.ndarray, size: int) -> np.ndarray:
    """Ids counted from 0 in the order of their values, padded with a number of their own.

    Every turn has a token, so all numbers are below `size`, unless there is no padding.
    """
    distinct, number_Y = np.unique(ids_Y, return_inverse=True)
    padding = np.full(size - len(ids_Y), len(distinct))
    return np.concatenate([number_Y, padding]).astype(np.int32)
