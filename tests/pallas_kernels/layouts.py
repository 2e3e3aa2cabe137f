"""Packed rows for the attention tests: their kv_end, drawn at random."""

import numpy as np


def kv_end(rng: np.random.Generator, length: int) -> np.ndarray:
    """A packed row: bundles of a prefix and its tails, then padding, all of random lengths.

    Prefixes may be empty or tail-less, tails may be a single token.
    """
    ends, at = np.arange(1, length + 1), 0
    while at < length and rng.random() < 0.9:
        prefix = int(rng.integers(0, min(3 * length // 4, length - at) + 1))
        tails = [int(n) for n in rng.integers(1, length // 5, rng.integers(0, 5))]
        bundle = min(at + prefix + sum(tails), length)
        ends[at : at + prefix] = bundle
        at += prefix
        for tail in tails:
            ends[at : at + tail] = min(at + tail, length)
            at = min(at + tail, length)
    return ends.astype(np.int32)


def bundle(prefix: int, tails: list[int], length: int) -> np.ndarray:
    """One shared prefix and its tails, then padding up to `length`."""
    ends = np.arange(1, length + 1)
    ends[:prefix] = prefix + sum(tails)
    at = prefix
    for tail in tails:
        ends[at : at + tail] = at + tail
        at += tail
    return ends.astype(np.int32)
