"""Checksums of weights: a sum for every leaf, whatever its sharding.

They prove that weights really arrived. A leaf's sum is made where the
leaf lies, on the devices (`leaf_checksums`) or part by part as a file is read (`part_sum`);
both give the same number. The sums are recorded with each step (`steps`) and each hand-off,
and compared wherever weights arrive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class HandoffError(ValueError):
    """Weights that are missing, of another shape, or not the ones that were published."""


def _mix(x: Any) -> Any:
    """Scrambles uint32s of jax or numpy one to one (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


_SHIFT = np.uint32(0x9E3779B9)  # element 0 must not be scrambled to 0
_BLOCK = 1 << 16  # elements that numpy scrambles at once, small enough for a core's cache


def _sums(leaf: Array) -> list[Array]:
    """The sums, modulo 2**32, of each element's bit pattern scrambled with its position.

    A sum of integers does not depend on the order, hence not on the sharding. One changed
    bit always changes it, because for a fixed position the scrambling is one to one. A leaf
    of matrices is summed one by one: a CPU writes what it scrambled, twice a bfloat16 leaf.
    """
    if leaf.ndim < 3:
        return [_sum(leaf, np.uint32(0))]
    leaf = jnp.asarray(leaf)
    return [_row_sum(leaf, np.uint32(row)) for row in range(leaf.shape[0])]


@jax.jit
def _row_sum(leaf: Array, row: Array) -> Array:
    return _sum(leaf[row], row)


@jax.jit
def _sum(part: Array, row: Array) -> Array:
    """The sum of entry `row` of a leaf's leading axis, or of a whole leaf (0)."""
    width = part.dtype.itemsize * 8
    pattern = part.astype(jnp.uint8) if part.dtype == bool else part
    bits = jax.lax.bitcast_convert_type(pattern, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    position = jnp.full(part.shape, row, jnp.uint32)
    for axis, size in enumerate(part.shape):
        position = position * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, part.shape, axis
        )
    return jnp.sum(_mix(bits + _mix(position + _SHIFT)), dtype=jnp.uint32)


def part_sum(part: np.ndarray, first: int) -> int:
    """Returns what a part adds to its leaf's sum, for code that reads a leaf part by part.

    `first` is the row-major position in the leaf of the part's first element; the others
    follow it without a gap. Parts' sums add up modulo 2**32.
    """
    flat = np.ascontiguousarray(part).reshape(-1)
    bits, total = flat.view(f"uint{flat.dtype.itemsize * 8}"), 0
    for start in range(0, flat.size, _BLOCK):
        block = bits[start : start + _BLOCK].astype(np.uint32)
        position = np.arange(block.size, dtype=np.uint32) + np.uint32((first + start) % 2**32)
        total += int(_mix(block + _mix(position + _SHIFT)).sum(dtype=np.uint64))
    return total % 2**32


def described(leaf: Any, total: int) -> str:
    """Returns a leaf's checksum, as text, from its sum; `leaf` has a dtype and a shape."""
    return f"{leaf.dtype}[{'x'.join(map(str, leaf.shape))}]:{total:08x}"


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of `tree` by path, such as "layers/q", in the tree's own order."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def leaf_checksums(params: Any) -> dict[str, str]:
    """Returns, per leaf path, a checksum of its bits, dtype and shape.

    The sums are made on the devices that hold the leaves; four bytes a leaf, or a layer of it,
    come back. Leaves must be at most 32 bits wide.
    """
    named = named_leaves(params)
    for name, leaf in named.items():
        if leaf.dtype.itemsize > 4:
            raise HandoffError(f"{name} is {leaf.dtype}; a policy's leaves have at most 32 bits")
    sums = jax.device_get([_sums(leaf) for leaf in named.values()])  # device to host
    return {
        name: described(leaf, sum(map(int, value)) % 2**32)
        for (name, leaf), value in zip(named.items(), sums, strict=True)
    }


def combine(leaves: Mapping[str, str]) -> str:
    """Returns one checksum, 16 hexadecimal digits, for a table of leaf checksums."""
    text = json.dumps(sorted(leaves.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def checksum(params: Any) -> str:
    """Returns the checksum of these weights, 16 hexadecimal digits, whatever their sharding.

    Any changed bit, swapped or transposed leaf, dtype or leaf name changes it.
    """
    return combine(leaf_checksums(params))


def compare(published: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    """Raises HandoffError naming the first leaf that differs from what was published."""
    for name in sorted(set(published) | set(found)):
        was, now = published.get(name, "absent"), found.get(name, "absent")
        if was != now:
            raise HandoffError(
                f"{where}: leaf {name!r} was published as {was} and arrived as {now}; "
                f"these are not the published weights, so publish again"
            )
