"""When, from which code and on what a page's numbers were made: the `Origin` of every report.

Asked once, when a page is written. A checkout tells its commit; where there is none, the package
its version. Above: quickstart, evaluate, training.record and training.outcome; below:
report.origin.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax

import notepad_jax
from notepad_jax.report.origin import Next, Origin

GIT_SECONDS = 10.0  # after which git is not waited for


def origin(next_commands: Sequence[Next], here: bool = True) -> Origin:
    """Returns the origin of a page that is written now; `here` is False for numbers that another
    machine made, an endpoint's."""
    now = datetime.datetime.now(datetime.UTC)
    return Origin(
        date=f"{now:%Y-%m-%d %H:%M} UTC",
        commit=commit(),
        hardware=hardware() if here else "",
        next=tuple(next_commands),
    )


def commit() -> str:
    """Returns "d3ee518", "d3ee518 and changes", or "version 0.1.0" where there is no checkout."""
    file = Path(notepad_jax.__file__).resolve()
    # A user's own repository may have an environment in it, with this package in that.
    if _git(file.parent, "ls-files", "--error-unmatch", file.name):
        told = _git(file.parent, "describe", "--always", "--dirty", "--exclude=*")
        if told:
            return told.replace("-dirty", " and changes")
    return f"version {notepad_jax.__version__}"


def _git(folder: Path, *words: str) -> str:
    """Returns what git says; nothing where it is not there, refuses, or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True, text=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def hardware() -> str:
    """Returns "4 x TPU v5p", or a CPU's name and its cores that this process may use."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return f"{cores} {'core' if cores == 1 else 'cores'} of {cpu()}"


def cpu() -> str:
    """Returns what the processor is called, and of a PC its widest vectors.

    One name, as "AMD EPYC" on rented machines, may be of several, of which one computes twice as
    fast as the other.
    """
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        told = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", told, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    wide = [name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if f" {flag}" in told]
    return f"{name}, {wide[0]}" if wide else name
