"""The device mesh of a program, ("fsdp", "tensor"), always there, and its sharding rules.

Parameters are split over both axes (`TRAINING`), rows of a batch over "fsdp". One device is the
mesh (1, 1), so there is no second path for laptops. Trainer and engine have a mesh each: the
trainer's spans all its devices, an engine's is one `row` of devices, cut over "tensor" alone.

A program is launched `within` the mesh of its arrays (`of`): that is how the code
that cuts a kernel by hand (`shards`) learns of it, and jit keeps one program per mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AXES = ("fsdp", "tensor")


def make(tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `devices` (default: all), shaped (devices / tensor, tensor).

    Raises ValueError if the devices cannot be split so.
    """
    devices = list(jax.devices() if devices is None else devices)
    if tensor < 1 or len(devices) % tensor:
        raise ValueError(
            f"{len(devices)} devices cannot be split into tensor groups of {tensor}; "
            f"use a divisor of {len(devices)}"
        )
    return Mesh(np.array(devices).reshape(-1, tensor), AXES)


def one() -> Mesh:
    """The mesh (1, 1) of this process's first device."""
    return make(1, jax.local_devices()[:1])


def memory_stats(device: jax.Device) -> dict[str, int]:
    """What a device says of its memory, in bytes; {} where it does not: one only compiled for."""
    try:
        return device.memory_stats() or {}
    except (NotImplementedError, RuntimeError):  # jax raises the second for what it has not
        return {}


def row(mesh: Mesh, number: int) -> Mesh:
    """The mesh (1, tensor) of a row's devices."""
    return Mesh(mesh.devices[number : number + 1], AXES)


def of(tree: Any) -> Mesh:
    """The mesh that the leaves of `tree`, arrays or abstract, lie on.

    What was not placed lies on the first device, so without such a leaf it is `one`.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf.sharding.mesh
    return one()


def within(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """A context in which programs over `mesh` are traced and launched.

    Only its axes count, not which devices they are: those are where the arguments lie. So a
    program that is being traced may trace another one within.
    """
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


# ---------------------------------------------------------------- sharding rules

# The one table from logical axes to mesh axes. A parameter declares logical axes
# (`model.parameters`), never mesh axes: to lay a policy out differently, change this. Heads and
# feed-forward are split over "tensor", as in Megatron; what is left over "fsdp", along the width or
# the vocabulary.
TRAINING: Mapping[str, str | None] = {
    "layer": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "tensor",  # whole experts; none is cut
    "vocab": "tensor",
}

# An engine reads every weight at every step: nothing is gathered, only heads are split.
SERVING: Mapping[str, str | None] = TRAINING | {"embed": None}


def sharding(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    rules: Mapping[str, str | None],
) -> NamedSharding:
    """Returns the sharding of an array with these logical axes.

    Mesh axes of one device cut nothing and are not named, nor are trailing dimensions that are
    whole, so that layouts that are the same compare equal. Raises ValueError for an axis that
    the table does not know, or a dimension that its mesh axis does not divide.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; there are {', '.join(rules)}")
        target = rules[axis] if axis is not None else None
        if target is not None and size % mesh.shape[target]:
            raise ValueError(
                f"{size} {axis} cannot be split over {target}={mesh.shape[target]}; "
                f"use a divisor of {size}"
            )
        spec.append(target if target is not None and mesh.shape[target] > 1 else None)
    return NamedSharding(mesh, trimmed(spec))


def trimmed(spec: Sequence[str | None]) -> PartitionSpec:
    """A PartitionSpec without the unsharded dimensions at its end."""
    cut = [i for i, name in enumerate(spec) if name is not None]
    return PartitionSpec(*spec[: cut[-1] + 1 if cut else 0])
