"""Windows: the draws of some steps sorted by length, so that long documents meet in one step.

A step's rollout waits for its longest document. How long documents are is known before they are
read, so the draws of W steps are sorted by length and dealt to the W batches: the longest is
waited for once in W steps, and every draw is still read by the newest policy. (RollPacker, 2025,
without its guess at lengths and without dropping anything.) A window is a permutation of aligned
places of the stream, a function of the seed and its first place, so whoever goes by ordinals
(ledger, resume, replacements, journals) needs nothing new. Above: setup.lengths; below: records.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from notepad_jax.data.records import Records

KEPT = 4  # windows whose permutations are remembered


def permutation(lengths: Sequence[int], steps: int, seed: int, first: int) -> list[int]:
    """Returns which draw of a window stands at each of its places.

    `lengths` are those of its draws, a multiple of `steps`. The longest make one batch, the next
    longest another, and chance (of the seed and the window's first place) puts the batches in
    order: which step reads the longest must not follow from its number. Draws of one length keep
    their order, and so do those of one batch, whose minibatches would differ in length else.
    """
    by_length = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    batches = np.sort(by_length.reshape(steps, -1), axis=1)
    chance = np.random.default_rng([seed, zlib.crc32(b"rollout.window"), first])
    return batches[chance.permutation(steps)].ravel().tolist()


def windowed(
    records: Records, length: Callable[[int], int], steps: int, documents: int, seed: int
) -> Records:
    """Returns the records in windows of `steps` batches of `documents` draws.

    `length` is that of an ordinal's document, the same whenever it is asked for. Of one step these
    are the records themselves.
    """
    if steps == 1:
        return records
    size = steps * documents

    @functools.lru_cache(KEPT)
    def window(first: int) -> list[int]:
        return permutation([length(first + k) for k in range(size)], steps, seed, first)

    def order(place: int) -> int:
        within = place % size
        return place - within + window(place - within)[within]

    return records.reordered(order, [steps, documents])
