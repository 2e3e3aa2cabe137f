"""The device mesh of a program: ("fsdp", "tensor"), always there.

Parameters are split over both axes (`rules`), rows of a batch over "fsdp". One device is the
mesh (1, 1), so there is no second path for laptops. Trainer and engine have a mesh each: the
trainer's spans all its devices, an engine's is one `row` of devices, cut over "tensor" alone.

A program is launched `within` the mesh of its arrays (`of`): that is how the code
that cuts a kernel by hand (`shards`) learns of it, and jit keeps one program per mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

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
