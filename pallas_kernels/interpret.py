"""Pallas' TPU interpret mode, which runs TPU kernels on a CPU, for tests: the one way to it.

Interpret mode carries a kernel's memory and DMAs in callbacks to python. Three things about
callbacks need care, and get it here. jax copies what they are given to a device, and the
interpreter takes it back at once: five sixths of an interpreted update's time, and with threads
for one core alone each waits for the other for ever; here it stays in numpy. jax refuses their
effects under `jax.checkpoint`, since a callback may do anything and would do it twice; an
interpreted kernel may run twice, so we allow them. And every callback blocks a thread of the CPU
client until the kernels of all devices have met: with as many threads as cores, several devices
wait for each other for ever; that is refused. Above: the calls of `packed`, `paged` and
`logprob`; below: jax.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax._src import callback, effects  # no public door
from jax._src.pallas.mosaic.interpret.params import get_interpret_effects
from jax.experimental.pallas import tpu as pltpu

Interpret = bool | pltpu.InterpretParams  # True: on the CPU, in TPU interpret mode


def interpret_mode(interpret: Interpret) -> Interpret:
    """Returns `pallas_call`'s `interpret`: False as it is, otherwise interpret mode's parameters.

    Never True, which is the older mode and gives wrong gradients for right kernels.

    Raises:
      ValueError: there are several CPU devices and too few threads, which would hang.
    """
    if interpret is False:
        return False
    devices, threads = jax.local_device_count("cpu"), _threads()
    if devices > 1 and threads < 2 * devices:
        raise ValueError(
            f"interpreted kernels on {devices} CPU devices need {2 * devices} threads and have "
            f"{threads}; set PJRT_NPROC={2 * devices} in the environment before jax starts"
        )
    for effect in get_interpret_effects():
        effects.remat_allowed_effects.add_type(type(effect))
        effects.custom_derivatives_allowed_effects.add_type(type(effect))
    callback.io_callback_impl = _io_callback
    return pltpu.InterpretParams() if interpret is True else interpret


_with_copies = callback.io_callback_impl


def _io_callback(*args: np.ndarray, **asked: Any) -> Any:
    """jax's own, but the interpreter's functions, or partials of them, are given numpy arrays."""
    function = getattr(asked["callback"].callback_func, "func", asked["callback"].callback_func)
    if str(getattr(function, "__module__", "")).startswith("jax._src.pallas.mosaic."):
        return [np.asarray(value) for value in asked["callback"](*args)]
    return _with_copies(*args, **asked)


def _threads() -> int:
    """How many threads jax gives its CPU client."""
    if told := os.environ.get("PJRT_NPROC"):
        return int(told)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
