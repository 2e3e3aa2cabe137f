"""Multi-process runs (one process a host, one program): start, collectives over host data, end.

A pod is one process a host, each with the chips of its host, and one program over all chips:
the trainer's. Every process runs the same code in the same order. What only one may do, the
`first` does: it writes what is no array. What each finds out alone, such as the readings of its
own engine, it tells the others (`all_gather`), so that all go on from the same. One process is all
there is unless it has `joined` others.

A process that is gone takes the others with it (`peers`, below, notices): one program over all
chips has no use for a part of them. Each keeps what it can (`keeping`) and ends, and the run goes
on anew.

Above: training, checkpoint, `place`, setup.stopping, cli and `api`. No other module asks how many
there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import clusters  # no public door
from jax.experimental import multihost_utils

from notepad_jax.parallel.peers import FAREWELL, First, Meeting, Other, Peers, Say

AUTO = "auto"  # on TPU pods, and under SLURM or Open MPI, jax finds the others by itself
WAIT = 300  # seconds for all to come
# Seconds until jax aborts the others of a process that is frozen, whose connections stay (`peers`
# sees those that break, at once); it looks at threads of C++, so one that computes is not frozen.
HEARTBEAT = 30
# Seconds for the news that a process is gone to come, after what we were in with it has failed;
# of one that has ended by itself it comes later than FAREWELL.
SETTLE = FAREWELL + 2.0
BROKEN = re.compile(r"[A-Z][A-Z_]+: ")  # how what XLA raises begins: UNKNOWN, INTERNAL, ...

_keeping: list[Callable[[], None]] = []  # what is done before this process ends with another


@contextlib.contextmanager
def joined(where: str, ends: Callable[[str], object], say: Say) -> Iterator[None]:
    """Joins the other processes (`jax.distributed`), for the block; before any device is asked for.

    `where` is "HOST:PORT,COUNT,INDEX", of which HOST:PORT is the first process' and INDEX
    counts from 0, or "auto". Raises ValueError, in one line, for anything else, and where the
    others cannot be found; while they are late, it `say`s once for which it waits. Once one of the
    processes is gone, or has failed and the others have not, `ends` is called in a thread, with
    what happened in words: it ends the process, whose main thread may wait for the lost one and
    cannot be told.
    """
    found = re.fullmatch(r"(\[?[^,\s\]]+\]?):(\d+),(\d+),(\d+)", where)
    if where != AUTO and (
        found is None or int(found[4]) >= int(found[3]) or not 0 < int(found[2]) < 2**16
    ):
        raise ValueError(
            f"--hosts is {where!r}; use 'auto', or HOST:PORT,COUNT,INDEX such as "
            f"10.0.0.2:8476,4,0 with an index below the count"
        )

    def lost(why: str) -> None:
        for keep in tuple(_keeping):
            keep()
        ends(why)

    try:
        if found is None:
            *there, devices = _found_by_jax()
        else:
            there, devices = [found[1], *map(int, found.groups()[1:])], None
        them = _meet(*there, lost, Meeting(WAIT, say))
        # It would take SIGTERM for itself, in C++: a run that is told to stop would not know.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            them.coordinator, them.count, them.index, devices, initialization_timeout=WAIT,
            coordinator_bind_address=them.coordinator, heartbeat_timeout_seconds=HEARTBEAT,
        )  # fmt: skip
    except (RuntimeError, ValueError) as problem:
        said = _first_line(problem)
        raise ValueError(f"the other processes of --hosts {where} cannot be joined: {said}") from (
            problem
        )
    failed = None
    try:
        yield
    except BaseException as problem:
        failed = _first_line(problem)
        if BROKEN.match(failed):  # the connections of a process that is gone break as well
            time.sleep(SETTLE)
        raise
    finally:
        them.leave(failed)


@contextlib.contextmanager
def keeping(keep: Callable[[], None]) -> Iterator[None]:
    """A context in which `keep` is called, in a thread, before this process ends with another."""
    _keeping.append(keep)
    try:
        yield
    finally:
        _keeping.remove(keep)


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:300]


def _found_by_jax() -> tuple[str, int, int, int, Any]:
    """Returns host and port of the first process, count, index, and our devices (None: all)."""
    address, number, ours, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, WAIT
    )
    if address is None or number is None or ours is None:
        raise ValueError("jax finds no pod here, nor SLURM or Open MPI; say HOST:PORT,COUNT,INDEX")
    host, _, port = address.rpartition(":")
    return host, int(port), number, ours, devices


def _meet(
    host: str, port: int, number: int, ours: int, lost: Callable[[str], object], meeting: Meeting
) -> Peers:
    if ours == 0:
        return First(port, number, lost, meeting)
    return Other(host.strip("[]"), port, number, ours, lost, meeting)


def count() -> int:
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    return jax.process_index() if jax.distributed.is_initialized() else 0


def first() -> bool:
    return index() == 0


def gather(said: bytes) -> list[bytes]:
    """All-gather of bytes: what every process said, by number; all must ask at the same point."""
    if count() == 1:
        return [said]
    sizes = multihost_utils.process_allgather(np.array([len(said)], np.int64)).reshape(-1)
    room = 1 << int(sizes.max() - 1).bit_length() if sizes.max() > 1 else 1  # few programs
    padded = np.zeros(room, np.uint8)
    padded[: len(said)] = np.frombuffer(said, np.uint8)
    every = multihost_utils.process_allgather(padded).reshape(count(), room)
    return [every[i, : sizes[i]].tobytes() for i in range(count())]


def broadcast(work: Callable[[], Any]) -> Any:
    """Broadcast: returns on every process what `work` returned on the first: JSON values.

    What it raises is raised there, and as a ValueError in the same words by the others.
    """
    if count() == 1:
        return work()
    return _all_said(work if first() else lambda: None)[0]


def all_gather(work: Callable[[], Any]) -> list[Any]:
    """All-gather: returns on every process what `work` returned on each, by number: JSON values.

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


def all_sum(numbers: Mapping[str, float]) -> dict[str, float]:
    """All-reduce: returns the sums over all processes; each gives the same names."""
    every = all_gather(lambda: dict(numbers))
    return {name: sum(said[name] for said in every) for name in numbers}
