"""Arrays on the devices where they stay: everything that feeds a compiled program is placed here.

jax compiles a program once for arguments that are committed to a device and once more for the
same arguments where they are not, and what comes out of storage, or of a program that was given
a committed argument, is committed. So arrays are committed when they are made. `rules` (beside)
says where on a mesh a parameter lives; above: everybody who makes arrays.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding


def first_device() -> SingleDeviceSharding:
    """Returns where arrays live unless somebody says otherwise: this process's first device."""
    return SingleDeviceSharding(jax.local_devices()[0])


def commit(tree: Any, shardings: Any = None) -> Any:
    """Returns `tree` with its leaves, of numpy or jax, committed to where `shardings` says.

    `shardings` is one `Sharding` for all leaves, a tree of them, or None for `first_device`.
    What lies there already is not copied.
    """
    where: Sharding | Any = first_device() if shardings is None else shardings
    return jax.device_put(tree, where)
