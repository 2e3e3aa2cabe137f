"""The memory of a device, and of a machine with its cgroups' limits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import jax

from notepad_jax.parallel.mesh import memory_stats
from notepad_jax.setup import builders


@dataclasses.dataclass(frozen=True)
class MachineMemory:
    """Bytes of a device; of a CPU, those of the machine or of the cgroup that bounds it."""

    total: int
    free: int


Look = Callable[[jax.Device], MachineMemory | None]


def look(device: jax.Device) -> MachineMemory | None:
    """Returns a device's memory; None where it does not say (one that is only compiled for)."""
    if device.platform == builders.CPU:
        return of_machine()
    found = memory_stats(device)
    if "bytes_limit" not in found:
        return None
    return MachineMemory(found["bytes_limit"], found["bytes_limit"] - found.get("bytes_in_use", 0))


def of_machine(root: Path = Path("/")) -> MachineMemory | None:
    """Returns the memory of the machine whose files lie under `root`; None where none tell.

    The least of Linux' own figures and of those of all cgroups around this process, v1 or v2.
    Swap is not counted: a cache there would be read at every token.
    """
    told = dict(_lines(root / "proc/meminfo"))
    if "MemTotal" not in told:
        return _of_others() if root == Path("/") else None
    total = 1024 * told["MemTotal"]
    found = [MachineMemory(total, 1024 * told.get("MemAvailable", told.get("MemFree", 0)))]
    for limit, used in _cgroups(root):
        if limit < total:
            found.append(MachineMemory(limit, max(0, limit - used)))
    return MachineMemory(min(m.total for m in found), min(m.free for m in found))


def _of_others() -> MachineMemory | None:
    """macOS says how much there is and not what is free; other systems say neither."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return MachineMemory(total, total) if total > 0 else None


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, used) of every cgroup from this process's up; pages of files can be had."""
    own = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for _, controllers, path in (line for line in own if len(line) == 3):
        second = not controllers
        if not second and "memory" not in controllers.split(","):
            continue
        place = root / "sys/fs/cgroup" / ("" if second else "memory")
        limit, usage, files = (
            ("memory.max", "memory.current", "inactive_file")
            if second
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        inside = PurePosixPath(path.lstrip("/"))
        for folder in dict.fromkeys((inside, *inside.parents)):
            most, used = (_number(_text(place / folder / name)) for name in (limit, usage))
            if most is not None:
                cached = dict(_lines(place / folder / "memory.stat")).get(files, 0)
                yield most, max(0, (used or 0) - cached)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """None for a file that is not there, and for "max"."""
    return int(text) if text.strip().isdecimal() else None


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    for line in _text(path).splitlines():
        name, number, *_ = (*line.replace(":", " ").split(), "", "")
        if number.isdecimal():
            yield name, int(number)
