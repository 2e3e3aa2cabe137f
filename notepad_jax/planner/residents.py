"""Bytes of the residents of a device, arrays that stay while programs run."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from notepad_jax.checkpoint.abstract_trees import at_once
from notepad_jax.checkpoint.checksums import named_leaves
from notepad_jax.setup.config.whole import Training


def bytes_of(tree: Any, dtype: str | None = None) -> int:
    """Returns the bytes on one device of leaves with shardings; `dtype` instead of their own."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(dtype or leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def on_the_way(leaf: Any) -> int:
    """Bytes, at most, that a leaf takes beside its copy: of layers that travel together, twice.

    Where they are cast, and where they arrive; what travels whole arrives as the copy.
    """
    part = at_once(jax.ShapeDtypeStruct(leaf.shape, "float32"))
    layers = leaf.shape[0] if leaf.ndim else 1
    return bytes_of(leaf) * part // layers * (1 if part == layers else 2)


def shared(config: Training, frozen: Any, weights: Any) -> int:
    """Bytes of the engine's weights that are the trainer's own arrays (`abstract_trees.share`)."""
    if config.checkpoint.handoff == "storage":
        return 0
    ours, theirs = named_leaves(frozen), named_leaves(weights)
    return sum(
        bytes_of(theirs[name])
        for name in set(ours) & set(theirs)  # an int8 matrix has no leaf of that name
        if ours[name].dtype == theirs[name].dtype
        and ours[name].sharding.is_equivalent_to(theirs[name].sharding, ours[name].ndim)
    )
