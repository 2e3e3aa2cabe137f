"""`shard_map` for code that XLA cannot partition, or partitions badly: run on each shard.

A Pallas kernel is opaque to the partitioner, and a gather at flat places knows nothing of
rows. `shard_map` runs such a function once a device, on the rows, heads or pages that lie there,
under `jax.shard_map` over the mesh that the program is traced within (`mesh.within`). On one
device, and where there is no mesh, a shard is the whole and the function is simply called.

The specs below are the layouts that cross such a border. Above: model and engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array

from notepad_jax.parallel import mesh

ROWS = PartitionSpec("fsdp")  # [B, ...], or flat over rows
HEADS = PartitionSpec("fsdp", None, "tensor")  # [B, T, heads, ...]
STACKED = PartitionSpec(None, "fsdp", None, "tensor")  # [L, B, T, heads, ...]
PAGES = PartitionSpec(None, None, "tensor")  # a paged cache: [pages, 2, kv heads, ...]
WHOLE = PartitionSpec()


def shard_map(
    function: Callable[..., Any], in_specs: Any, out_specs: Any, typed: bool = False
) -> Callable[..., Any]:
    """Returns `function` as every device runs it, on shards cut as the specs say.

    Specs are prefixes of the arguments' and results' trees. A result that is not cut over an
    axis must be the same on all its devices. `typed` is for functions with collectives whose
    gradients follow from which axes a value varies over (`jax.shard_map`'s check_vma).
    """
    if _mesh() is None:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, check_vma=typed, axis_names=set(_AXES)
    )


def rows(x: Any) -> Any:
    """Constrains an activation [B, ...] to be sharded by rows over "fsdp", all else whole."""
    if _mesh() is None:
        return x
    return jax.lax.with_sharding_constraint(x, ROWS)


def gathered(x: Array, axes: tuple[str | None, ...], dtype: Any) -> Array:
    """All-gathers a weight with these logical axes over "fsdp", rounded to `dtype`.

    Left alone, the compiler multiplies slice by slice while they travel round the ring, and
    adds the products up in the activations' dtype: rounded once a device, and an accumulator
    of the activations' size read and written as often.

    What travels is `dtype`. The result has the wider dtype of the two, so a product with it casts
    it back, which costs nothing; its gradient is of that wider dtype, and that is how
    devices sum it, each its own slice. In `dtype` the sum would be rounded at every addition.
    """
    if x.dtype == dtype and not _cut():
        return x  # as it is: a copy would be kept of every layer for the way back
    wider, own = jnp.promote_types(x.dtype, dtype), x.dtype

    @jax.custom_vjp
    def seen(x: Array) -> Array:
        return _laid(x.astype(dtype), axes, mesh.SERVING).astype(wider)

    def back(_: None, d_x: Array) -> tuple[Array]:
        return (_laid(d_x, axes, mesh.TRAINING).astype(own),)

    seen.defvjp(lambda x: (seen(x), None), back)
    return seen(x)


def _cut() -> bool:
    return _mesh() is not None and _size("fsdp") > 1


def _laid(x: Array, axes: tuple[str | None, ...], table: Mapping[str, str | None]) -> Array:
    if not _cut():
        return x
    names = (table[axis] if axis else None for axis in axes)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*names))


def all_gather(x: Any) -> Any:
    """All-gathers `x` onto every device, for a host to read."""
    if _mesh() is None:
        return x
    return jax.lax.with_sharding_constraint(x, WHOLE)


def name(axis: str) -> str | None:
    """The axis' name for a collective within `shard_map`, or None where it is not cut."""
    return axis if _size(axis) > 1 else None


def number(axis: str) -> Any:
    """Which shard along `axis` this device has, within `shard_map`."""
    return jax.lax.axis_index(axis) if _size(axis) > 1 else 0


def psum(x: Any, axis: str) -> Any:
    """The sum of `x` over the shards along `axis`, within `shard_map`."""
    return jax.lax.psum(x, axis) if _size(axis) > 1 else x


_AXES = ("fsdp", "tensor")


def _traced_within() -> AbstractMesh:
    return jax.sharding.get_abstract_mesh()


def _mesh() -> AbstractMesh | None:
    """The mesh to cut over, or None where there is nothing to cut, or it is cut already."""
    mesh = _traced_within()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return None
    return mesh


def _size(axis: str) -> int:
    mesh = _traced_within()
    return 1 if mesh.empty else mesh.shape[axis]
