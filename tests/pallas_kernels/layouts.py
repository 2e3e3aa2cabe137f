"""Packed rows for the attention tests: their kv_end, drawn at random; and the GPU kernels' name.

`JAX_PLATFORMS=cuda python -m pytest tests/pallas_kernels/test_triton.py` runs them on a GPU.
"""

from collections.abc import Sequence

import jax
import numpy as np

TRITON = "triton" if jax.default_backend() == "gpu" else "triton-interpret"


def kv_end(rng: np.random.Generator, length: int) -> np.ndarray:
    """A packed row: bundles of a prefix and its tails, then padding, all of random lengths.

    Prefixes may be empty or tail-less, tails may be a single token, or bundles themselves.
    """
    ends, at = np.arange(1, length + 1), 0

    def grow(at: int, deep: int) -> int:
        """Writes a bundle from `at` on; returns its end."""
        tails = at + int(rng.integers(0, min(3 * length // 4, length - at) + 1))
        end = tails
        for tail in rng.integers(1, length // 5, rng.integers(0, 5)).tolist():
            if deep and rng.random() < 0.3:
                end = grow(end, deep - 1)
            else:
                begin, end = end, min(end + tail, length)
                ends[begin:end] = end
        ends[at:tails] = end
        return end

    while at < length and rng.random() < 0.9:
        at = grow(at, 2)
    return ends.astype(np.int32)


def bundle(prefix: int, tails: Sequence[int], length: int) -> np.ndarray:
    """One shared prefix and its tails, then padding up to `length`."""
    ends = np.arange(1, length + 1)
    ends[:prefix] = prefix + sum(tails)
    at = prefix
    for tail in tails:
        ends[at : at + tail] = at + tail
        at += tail
    return ends.astype(np.int32)
