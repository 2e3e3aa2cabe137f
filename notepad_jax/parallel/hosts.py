"""Several processes that run one program: who is who, and what they tell one another.

A pod is one process a host, each with the chips of its host, and one program over all chips:
the trainer's. Every process runs the same code in the same order. What only one may do, the
`first` does: it writes what is no array. What each finds out alone, such as the readings of its
own engine, it tells the others (`gather`), so that all go on from the same. One process is all
there is unless somebody calls `join`.

Above: programs and checkpoint. Nobody else asks how many there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

AUTO = "auto"  # on TPU pods, and under SLURM or Open MPI, jax finds the others by itself


def join(coordinator: str, count: int, index: int) -> None:
    """Makes this process number `index` of `count`; before anything asks for a device.

    `coordinator` is the first process' HOST:PORT, the same for all, or "auto". Raises
    ValueError, in one line, where the others cannot be found.
    """
    if jax.distributed.is_initialized():
        return
    try:
        if coordinator == AUTO:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(coordinator, count, index)
    except (RuntimeError, ValueError) as problem:
        said = (str(problem).splitlines() or [type(problem).__name__])[0][:300]
        raise ValueError(
            f"process {index} of {count} cannot join the others at {coordinator}: {said}"
        ) from problem


def count() -> int:
    return jax.process_count()


def index() -> int:
    return jax.process_index()


def first() -> bool:
    return jax.process_index() == 0


def gather(said: bytes) -> list[bytes]:
    """Returns what every process said, by its number; all must ask at the same point."""
    if count() == 1:
        return [said]
    sizes = multihost_utils.process_allgather(np.array([len(said)], np.int64)).reshape(-1)
    room = 1 << int(sizes.max() - 1).bit_length() if sizes.max() > 1 else 1  # few programs
    padded = np.zeros(room, np.uint8)
    padded[: len(said)] = np.frombuffer(said, np.uint8)
    every = multihost_utils.process_allgather(padded).reshape(count(), room)
    return [every[i, : sizes[i]].tobytes() for i in range(count())]


def wait() -> None:
    """Returns when every process has come here."""
    gather(b"")


def asked_of_first(work: Callable[[], Any]) -> Any:
    """Returns on every process what `work`, run by the first one alone, returned: JSON values.

    What it raises is raised there, and as a ValueError in the same words by the others.
    """
    if count() == 1:
        return work()
    told: dict[str, Any] = {}
    failed: Exception | None = None
    if first():
        try:
            told = {"value": work()}
        except Exception as problem:
            failed, told = problem, {"problem": str(problem)}
    told = json.loads(gather(json.dumps(told).encode())[0])
    if failed is not None:
        raise failed
    if "problem" in told:
        raise ValueError(told["problem"])
    return told["value"]


def added(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums over all processes; each gives the same names."""
    if count() == 1:
        return dict(numbers)
    every = [json.loads(said) for said in gather(json.dumps(dict(numbers)).encode())]
    return {name: sum(said[name] for said in every) for name in numbers}
