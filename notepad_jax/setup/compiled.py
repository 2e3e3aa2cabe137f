"""The compilation cache: jax's cache on disk keeps programs from run to run, on by default.

Compiling is most of a short run, and the second run of a command compiles what the first did.
`keep` gives jax a folder of the user's, bounded in size. The variable NOTEPAD_JAX_CACHE names
another folder, or says "off"; where jax's own JAX_COMPILATION_CACHE_DIR is set, that is kept.
Nothing happens on import, and no problem with the folder stops a run. The key of an entry holds
the program, the versions of jax and its compiler, and the devices with a CPU's features, so
machines may share a home folder. `watched` says when jax compiles, for screens, and how long it
has. Above: cli, train, quickstart and `builders`.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import filelock
import jax

from notepad_jax.telemetry.identity import caches

SWITCH = "NOTEPAD_JAX_CACHE"
OFF = "off"
# A program that takes 44 ms to compile, one operation on one array, takes 13 ms to read and 6 ms
# to write (docs/performance.md), so nothing is too small to be kept. A quick start is 4 MB.
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_compilation_cache_max_size": 2**30,  # bytes; the least recently used programs go
}
LEAST_FREE = 2**26  # bytes on the disk below which nothing more is put there
WORK = (  # what jax calls the parts of compiling
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
LOCKED = 10  # seconds to wait for another process that is writing


def keep() -> None:
    """Has jax keep compiled programs on disk, unless jax's own settings decide that.

    A folder that cannot be used costs one logged line, and programs are then compiled anew.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    named = os.environ.get(SWITCH, "")
    if named.lower() == OFF:
        return
    for name, value in SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    try:
        path = str(_opened(_folder(named)))
    except (OSError, RuntimeError) as problem:  # pathlib raises the latter where there is no home
        logging.getLogger(__name__).warning(
            "notepad-jax: compiled programs are not kept: %s; set %s to a folder, or to %r",
            problem, SWITCH, OFF,
        )  # fmt: skip
        jax.config.update("jax_enable_compilation_cache", False)  # and is not said again
        return
    jax.config.update("jax_compilation_cache_dir", path)


class Watch:
    """Says "compiling", when called, while jax traces, lowers or compiles, else "". For screens.

    `seconds` is how long it has done so by now, on whichever and however many threads.
    """

    def __init__(self) -> None:
        self._under_way, self._since, self._past = 0, 0.0, 0.0
        self._lock = threading.Lock()
        # jax calls listeners when such work begins (a scalar, the time) and when it ends, also by
        # an error (a duration).
        jax.monitoring.register_scalar_listener(lambda event, value, **_: self._count(event, 1))
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, took, **_: self._count(event, -1)
        )

    def __call__(self) -> str:
        return "compiling" if self._under_way > 0 else ""

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._past + self._current()

    def elsewhere(self, change: int) -> None:
        """Has a process of ours begin (1) or end (-1) to compile."""
        self._count(WORK[-1], change)

    def _current(self) -> float:
        return time.perf_counter() - self._since if self._under_way > 0 else 0.0

    def _count(self, event: str, change: int) -> None:
        if event not in WORK:
            return
        with self._lock:
            self._past += self._current()
            self._under_way += change
            self._since = time.perf_counter()


@functools.cache
def watched() -> Watch:
    """Returns the one watch of this process, from the first call on."""
    return Watch()


def _folder(named: str) -> Path:
    """The folder that the variable names, or notepad_jax/xla among the user's caches."""
    if "://" in named:
        raise OSError(f"{named} is not a local folder (JAX_COMPILATION_CACHE_DIR takes buckets)")
    if named:
        return Path(named).expanduser().absolute()
    return caches() / "xla"


def _opened(folder: Path) -> Path:
    """Makes `folder` where it is missing and clears what cannot be read; raises OSError.

    What lies there is run: a new folder is its user's alone.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        raise OSError(f"{folder} is on a disk with {free:,} free bytes of {LEAST_FREE:,} wanted")
    with filelock.FileLock(folder / ".lockfile", timeout=LOCKED):  # jax's own
        if jax.config.jax_compilation_cache_max_size != -1:
            _drop_unfinished(folder)
    return folder


def _drop_unfinished(folder: Path) -> None:
    """Removes entries whose writer was killed, or found the disk full, on the way.

    jax stamps an entry when it is whole, if the cache is bounded. It never replaces one that
    is not, and looks for every stamp before it writes: one cut entry would stop all writing.
    """
    for entry in folder.glob("*-cache"):
        if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
            entry.unlink(missing_ok=True)
