"""Placement of arrays: commits all that feeds a compiled program to devices under a sharding.

jax compiles a program once for arguments that are committed to a device and once more for the
same arguments where they are not, and what comes out of storage, or of a program that was given
a committed argument, is committed. So arrays are committed when they are made, and always to a
mesh: one device is the mesh (1, 1). `rules` (beside) says where on a mesh a parameter lives;
above: all modules that make arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from notepad_jax.parallel import hosts
from notepad_jax.parallel import mesh as meshes


def first_device() -> NamedSharding:
    """Returns the default sharding of arrays: on this process's first device."""
    return replicated(meshes.one())


def replicated(mesh: Mesh) -> NamedSharding:
    """The replicated sharding: the whole array on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: leading axes, rows or flat over them, cut over "fsdp"."""
    return NamedSharding(mesh, PartitionSpec("fsdp") if mesh.shape["fsdp"] > 1 else PartitionSpec())


def commit(tree: Any, shardings: Any = None) -> Any:
    """Returns `tree` with its leaves, of numpy or jax, committed to where `shardings` says.

    `shardings` is one `Sharding` for all leaves, a tree of them, or None for `first_device`.
    What lies there already is not copied. Where devices of several processes are meant, every
    process has the whole leaf and lays out what its own devices hold.
    """
    where: Sharding | Any = first_device() if shardings is None else shardings
    if hosts.count() == 1:
        return jax.device_put(tree, where)
    if isinstance(where, Sharding):
        return jax.tree.map(lambda leaf: _put(leaf, where), tree)
    return jax.tree.map(_put, tree, where)


def _put(leaf: Any, sharding: Sharding) -> jax.Array:
    spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if spread or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda cut: host[cut])


def laid(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """Reshards an array to other devices of this program, of its own process where so asked.

    Engines' mesh has devices of its process alone, and a trainer's has those of all: then the
    leaf is laid out anew once, for all processes, so that each group of as many devices as one
    engine has holds it whole, and each process takes what lies on its own.
    """
    if leaf.is_fully_addressable or not sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    own, size = sharding.device_set, sharding.mesh.shape["tensor"]
    everywhere = Mesh(np.array(jax.devices()).reshape(-1, size), ("group", "tensor"))
    groups = jax.device_put(leaf, NamedSharding(everywhere, sharding.spec))
    shards = [shard.data for shard in groups.addressable_shards if shard.device in own]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def row(tree: Any, mesh: Mesh, number: int) -> Any:
    """Returns a `mesh` row's replicas of leaves that every row holds whole; copies nothing."""
    alone = meshes.row(mesh, number)
    devices = set(alone.devices.flat)

    def one(leaf: jax.Array) -> jax.Array:
        shards = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
        sharding = NamedSharding(alone, leaf.sharding.spec)
        made = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
        # jaxlib 0.10.2 lists an array's shards when they are first asked for: twice, if two
        # threads ask at once, and then it is an array of two shards for good. Engines would.
        _ = made.addressable_shards
        return made

    return jax.tree.map(one, tree)


def entries(leaf: Any) -> list[Any]:
    """Returns the entries of the first axis of a leaf on one device, each an array of its own.

    On a CPU they share its memory: jax takes host memory as a CPU's where it begins at a multiple
    of 64 bytes, and copies entries that do not (their size is no such multiple). A leaf whose
    entries live is not donated there: a program that would be given its memory gets other memory.
    Elsewhere they are copies. Of a `jax.ShapeDtypeStruct` they are such, too.
    """
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        own = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)
        return [own] * leaf.shape[0]
    if next(iter(leaf.devices())).platform == "cpu":
        return [jax.device_put(entry, sharding) for entry in np.asarray(leaf)]
    return list(jax.jit(tuple, out_shardings=sharding)(leaf))


def same(one: jax.Array, other: Any) -> bool:
    """Whether two arrays on one device each are the same memory; what was deleted is nothing."""
    if not isinstance(other, jax.Array) or one.is_deleted() or one.shape != other.shape:
        return False
    return one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()


def specs(tree: Any) -> tuple[PartitionSpec, ...]:
    """The PartitionSpec of each leaf, as a static value that jit can be given (`held`).

    What was placed on no mesh lies on one device, whole.
    """
    whole = PartitionSpec()
    found = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return tuple(getattr(sharding, "spec", whole) for sharding in found)


def held(tree: Any, cut: tuple[PartitionSpec, ...]) -> Any:
    """A sharding constraint within jit: keeps the leaves cut as `specs` said of such a tree.

    Left alone, the compiler chooses where results lie. What one launch gives and the next one
    takes must not move, or it is compiled twice and its buffers cannot be donated.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, cut, strict=True)
    return structure.unflatten([jax.lax.with_sharding_constraint(x, spec) for x, spec in pairs])


def beside(tree: Any, like: Mapping[str, Any], mesh: Mesh) -> Any:
    """Returns the shardings of `tree`, such as optimizer state, that mirrors the tree `like`.

    An optimizer's state has moments that mirror the parameters, under paths that end as the
    parameters' do, and counters: a leaf with a namesake of its shape lives where that one
    does, all others are on every device.
    """
    known = {path: leaf for path, leaf in jax.tree.flatten_with_path(like)[0]}

    def one(path: tuple, leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            found = known.get(path[start:])
            if found is not None and found.shape == leaf.shape:
                return found.sharding
        return replicated(mesh)

    return jax.tree.map_with_path(one, tree)
