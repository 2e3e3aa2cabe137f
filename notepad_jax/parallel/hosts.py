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
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

AUTO = "auto"  # on TPU pods, and under SLURM or Open MPI, jax finds the others by itself


WAIT = 300  # seconds for all to come


def join(where: str) -> None:
    """Makes this process one of several; before anything asks for a device.

    `where` is "HOST:PORT,COUNT,INDEX", of which HOST:PORT is the first process' and INDEX
    counts from 0, or "auto". Raises ValueError, in one line, for anything else, and where the
    others cannot be found.
    """
    found = re.fullmatch(r"([^,\s]+:(\d+)),(\d+),(\d+)", where)
    if where != AUTO and (
        found is None or int(found[4]) >= int(found[3]) or not 0 < int(found[2]) < 2**16
    ):
        raise ValueError(
            f"--hosts is {where!r}; use 'auto', or HOST:PORT,COUNT,INDEX such as "
            f"10.0.0.2:8476,4,0 with an index below the count"
        )
    try:
        if found is None:
            jax.distributed.initialize(initialization_timeout=WAIT)
        else:
            jax.distributed.initialize(
                found[1], int(found[3]), int(found[4]), initialization_timeout=WAIT
            )
    except (RuntimeError, ValueError) as problem:
        said = (str(problem).splitlines() or [type(problem).__name__])[0][:300]
        raise ValueError(f"the other processes of --hosts {where} cannot be joined: {said}") from (
            problem
        )


def count() -> int:
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    return jax.process_index() if jax.distributed.is_initialized() else 0


def first() -> bool:
    return index() == 0


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
    return _all_said(work if first() else lambda: None)[0]


def told_by_all(work: Callable[[], Any]) -> list[Any]:
    """Returns on every process what `work` returned on each, by number: JSON values.

    What it raises anywhere is raised there, and as a ValueError in the same words by the others.
    """
    return [work()] if count() == 1 else _all_said(work)


def _all_said(work: Callable[[], Any]) -> list[Any]:
    failed: Exception | None = None
    try:
        ours = {"value": work()}
    except Exception as problem:
        failed, ours = problem, {"problem": str(problem)}
    told = [json.loads(said) for said in gather(json.dumps(ours).encode())]
    if failed is not None:
        raise failed
    for one in told:
        if "problem" in one:
            raise ValueError(one["problem"])
    return [one["value"] for one in told]


def added(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums over all processes; each gives the same names."""
    if count() == 1:
        return dict(numbers)
    every = [json.loads(said) for said in gather(json.dumps(dict(numbers)).encode())]
    return {name: sum(said[name] for said in every) for name in numbers}
