"""The device mesh of a program: ("fsdp", "tensor").

Parameters are split over both axes (`rules`); rows of a batch over "fsdp". One device is the
mesh (1, 1), so there is no second path for laptops.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

AXES = ("fsdp", "tensor")


def make(tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Arranges `devices` (default: all) as (devices / tensor, tensor).

    Raises ValueError if the devices cannot be split so.
    """
    devices = list(jax.devices() if devices is None else devices)
    if tensor < 1 or len(devices) % tensor:
        raise ValueError(
            f"{len(devices)} devices cannot be split into tensor groups of {tensor}; "
            f"use a divisor of {len(devices)}"
        )
    return jax.sharding.Mesh(np.array(devices).reshape(-1, tensor), AXES)
