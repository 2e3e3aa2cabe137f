"""The entropy gate (AEPO): at high entropy, tokens of negative advantage are left out.

Pushing tokens down spreads their probability over all others, so what is learnt from advantages
below 0 raises entropy. While the entropy of turns of a kind is high, their tokens in such
trajectories are left out; the gate shuts above one bound and opens below another (AEPO,
QwenLong-L1.5 2025). Updates and answers have each a gate of their own: a memory is long and an
answer short, and neither's entropy says anything of the other's. Pure numpy; the shut kinds are
all the state there is, and a checkpoint keeps it. Above: `algorithm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from notepad_jax.types import TrainBatch, TurnKind

Gate = frozenset[str]  # the kinds of turns for which it is shut
OPEN: Gate = frozenset()
KINDS = tuple(kind.value for kind in TurnKind)


def mean_entropies(
    batches: Sequence[TrainBatch], entropies: Sequence[np.ndarray]
) -> dict[str, float]:
    """The mean over all turns of a kind of their mean token entropy, of each kind that there is.

    `entropies` [B, T] are of the batches' completion tokens, in nats.
    """
    found = {}
    for kind in KINDS:
        means = [
            _means_of_turns(one, entropy_BT, _of_kind(one, kind))
            for one, entropy_BT in zip(batches, entropies, strict=True)
        ]
        means_N = np.concatenate(means)
        if len(means_N):
            found[kind] = float(means_N.mean())
    return found


def after(gate: Gate, found: Mapping[str, float], low: float, high: float) -> Gate:
    """Returns the next gate, given the mean entropies that were found under `gate`.

    Between the bounds, and where no turn of a kind was seen, it stays as it is.
    """

    def shut(kind: str) -> bool:
        if kind not in found:
            return kind in gate
        return found[kind] > high or (kind in gate and not found[kind] < low)

    return frozenset(kind for kind in KINDS if shut(kind))


def left_out(batch: TrainBatch, gate: Gate) -> np.ndarray:
    """Which tokens, bool [B, T], the gate takes out: of shut kinds, of advantages below 0."""
    shut_BT = np.zeros(batch.weights.shape, bool)
    for kind in gate:
        shut_BT |= _of_kind(batch, kind)
    return shut_BT & (batch.advantages < 0)


def _of_kind(batch: TrainBatch, kind: str) -> np.ndarray:
    update = kind == TurnKind.UPDATE.value
    return (batch.weights > 0) & ((batch.update_turn > 0) == update)


def _means_of_turns(batch: TrainBatch, entropy_BT: np.ndarray, on_BT: np.ndarray) -> np.ndarray:
    _, which_N, count = np.unique(batch.turn[on_BT], return_inverse=True, return_counts=True)
    return np.bincount(which_N, entropy_BT[on_BT], len(count)) / count
