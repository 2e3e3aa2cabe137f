"""Pallas' TPU interpret mode, which runs TPU kernels on a CPU, for tests: the one way to it.

Interpret mode carries a kernel's memory and DMAs in callbacks to python. Two things about
callbacks need care, and get it here. jax refuses their effects under `jax.checkpoint`, since
a callback may do anything and would do it twice; an interpreted kernel may run twice, so we
allow them. And every callback blocks a thread of the CPU client until the kernels of all
devices have met: with as many threads as cores, several devices wait for each other for ever;
that is refused. Above: the calls of `packed`, `paged` and `logprob`; below: jax.
"""

from __future__ import annotations

import os

import jax
from jax._src import effects  # no public door
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
    return pltpu.InterpretParams() if interpret is True else interpret


def _threads() -> int:
    """How many threads jax gives its CPU client."""
    if told := os.environ.get("PJRT_NPROC"):
        return int(told)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
