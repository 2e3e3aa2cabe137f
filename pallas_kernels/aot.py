"""Ahead-of-time compilation for TPUs on a machine that has none.

libtpu, an ordinary package, holds the whole compiler, and jax can describe a slice of chips
that is not there. A kernel that compiles here compiles on the chip: the tests
(`tests/pallas_kernels/test_aot.py`) and `estimate` rest on that. Interpret mode proves the
numbers and not that the compiler accepts a kernel; this module proves the other half.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

# The smallest slice of each generation that libtpu describes under a name of its own.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x4x4", "v6e": "v6e:16x16", "tpu7x": "tpu7x:2x2x1"}

# Slices that can be had (cloud.google.com/tpu/docs/{v5e,v6e,v5p,tpu7x}, read 2026-11-22). On v5p
# and tpu7x also those whose three sides are multiples of 4, up to so many chips.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4")
SLICES = {"v5e": _FLAT, "v6e": _FLAT, "v5p": _DEEP, "tpu7x": _DEEP}
MOST_CHIPS = {"v5p": 6144, "tpu7x": 9216}
CORES = {"tpu7x": 2}  # devices of a chip, where it is not one
# Chips of a host, where they are not 2x2: a single chip, and the hosts of eight.
_HOSTS = {"1x1": (1, 1, 1), "1x1x1": (1, 1, 1), "2x4": (2, 4, 1)}

# libtpu reads these once, when it is loaded.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # or jax looks for a TPU to run on, and complains that there is none
    "TPU_SKIP_MDS_QUERY": "1",  # or libtpu asks Google Cloud's metadata server what host this is
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any; the topology's name is what counts
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is held, so no lock file is needed
}

# On tpu7x the compiler multiplies bfloat16 in tiles of 16 x 128, arrays come to it in tiles of 8
# x 128, and so every launch begins with a copy of all stacked weights: of Qwen2.5-7B 3.2 GB on
# each of four devices. In tiles of 8 x 128 throughout its own estimate of the products' cycles is
# the same. It is no option of a compilation, and other chips have these tiles anyway.
SMALL_TILES = "--xla_tpu_impure_enable_large_2nd_minor_layout"
_KNOWN = "0.0.42."  # the libtpu whose flags these are: one that does not know a flag ends


class MissingCompiler(RuntimeError):
    """libtpu is not installed."""


def missing_compiler() -> str:
    """Returns what is missing and how to get it, in one line; "" if libtpu is installed."""
    if importlib.util.find_spec("libtpu") is not None:
        return ""
    return (
        "compiling for TPU needs libtpu, which is not installed: "
        "pip install 'notepad-jax[aot]' (x86_64 Linux only; no TPU is needed)"
    )


@functools.cache
def devices(chip: str) -> tuple[Any, ...]:
    """Returns compile-only devices of a slice of `chip`; one device is one core on tpu7x.

    On v5p a device is a chip, whose two cores the compiler drives as one.

    Raises:
      ValueError: an unknown chip.
      MissingCompiler: libtpu is not installed.
    """
    if chip not in TOPOLOGIES:
        raise ValueError(f"chip {chip!r} is not one of {', '.join(TOPOLOGIES)}")
    return _described(TOPOLOGIES[chip])


@functools.cache
def slice_of(name: str) -> tuple[Any, ...]:
    """Returns compile-only devices of a whole slice, as "v5p:2x4x4"; two a chip on tpu7x.

    Devices that share a `process_index` are of one host.

    Raises:
      ValueError: no such chip, or no such slice of it; the message says which there are.
      MissingCompiler: libtpu is not installed.
    """
    _, sides = _checked(name)
    host = {"chips_per_host_bounds": _HOSTS[sides]} if sides in _HOSTS else {}
    return _described(name, **host)


def _checked(name: str) -> tuple[str, str]:
    """(chip, sides) of a slice that there is."""
    chip, _, sides = name.partition(":")
    if chip not in SLICES:
        raise ValueError(
            f"{name!r} names no TPU that is known here: write CHIP:SIDES as v5p:2x4x4, "
            f"where CHIP is one of {', '.join(SLICES)}"
        )
    if sides not in SLICES[chip] and not _of_cubes(chip, sides):
        more = ", or three sides that are multiples of 4" if chip in MOST_CHIPS else ""
        raise ValueError(
            f"there is no slice {name!r}; {chip} comes as {', '.join(SLICES[chip])}{more}"
        )
    return chip, sides


@dataclasses.dataclass(frozen=True)
class Stand:
    """A stand-in for a device that nothing is compiled for: enough for shapes and shardings."""

    id: int
    process_index: int  # its host
    device_kind: str
    platform: str = "tpu"


def chips_of(name: str) -> int:
    """Returns how many chips the slice `name` has. Raises ValueError as `slice_of`."""
    return math.prod(map(int, _checked(name)[1].split("x")))


@functools.cache
def sketch_of(name: str) -> tuple[Stand, ...]:
    """Returns `slice_of`'s devices as stand-ins, by arithmetic: libtpu need not be there.

    Their number and their hosts are the real ones', their order is not. Raises ValueError alike.
    """
    chip, sides = _checked(name)
    _settle()  # jax asks libtpu for devices when it first counts anything
    each = CORES.get(chip, 1)
    host = each * min(chips_of(name), math.prod(_HOSTS.get(sides, (2, 2, 1))))
    return tuple(Stand(i, i // host, f"TPU {chip}") for i in range(each * chips_of(name)))


def host_of(name: str) -> tuple[Any, ...]:
    """Returns the devices of one host of the slice `name`, described as a slice of their own.

    What runs on one host alone is compiled for these. Four neighbours in a wider slice have ids
    such as 0, 1, 8 and 9, and libtpu 0.0.42 cannot count so within a program of four (v5e, v6e).
    Raises as `slice_of` does.
    """
    chip, _, sides = name.partition(":")
    there = slice_of(name)
    host = sides if sides in _HOSTS else "2x2x1" if chip in MOST_CHIPS else "2x2"
    own = slice_of(f"{chip}:{host}")
    held = sum(device.process_index == there[0].process_index for device in there)
    assert len(own) == held, f"a host of {name} has {held} devices, and {chip}:{host} {len(own)}"
    return own


def _of_cubes(chip: str, sides: str) -> bool:
    if chip not in MOST_CHIPS or not re.fullmatch(r"[1-9]\d?x[1-9]\d?x[1-9]\d?", sides):
        return False
    lengths = [int(side) for side in sides.split("x")]
    return math.prod(lengths) <= MOST_CHIPS[chip] and not any(side % 4 for side in lengths)


def keep_small_tiles() -> None:
    """Sets libtpu's flag by which tpu7x keeps weights as they lie; for before it is loaded.

    Here or on a TPU. A flag that LIBTPU_INIT_ARGS has already, and another libtpu, are left alone.
    """
    said = os.environ.get("LIBTPU_INIT_ARGS", "")
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("libtpu").startswith(_KNOWN) and SMALL_TILES not in said:
            os.environ["LIBTPU_INIT_ARGS"] = f"{said} {SMALL_TILES}=false".strip()


def _settle() -> None:
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    keep_small_tiles()


def _described(name: str, **how: Any) -> tuple[Any, ...]:
    if problem := missing_compiler():
        raise MissingCompiler(problem)
    _settle()
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name, **how).devices)


def targeting(chip: str) -> Any:
    """A context in which Pallas, and code that asks it, sees one device of `chip`."""
    return jax.set_mesh(jax.sharding.Mesh(np.asarray(devices(chip)[:1]), ("device",)))


def compile_for(
    chip: str, function: Callable[..., Any], *avals: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compiles `function` for one device of `chip`; never runs it.

    Args:
      avals: `jax.ShapeDtypeStruct`s, or pytrees of them, one for each argument.
      donate: positions of the arguments whose memory the results may take.
    Returns:
      The compiled program: `.memory_analysis()` and `.as_text()` work, calling it does not.
    Raises:
      what `devices` raises, and whatever the compiler has to say about the function.
    """
    with targeting(chip), nothing_kept():
        return jax.jit(function, donate_argnums=donate).trace(*avals).lower().compile()


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """A context in which no program that is compiled is written to jax's cache on disk.

    What was compiled for chips that are not here can be written there, but not read again:
    every later run would try, and warn.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)
