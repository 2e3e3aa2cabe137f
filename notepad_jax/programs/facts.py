"""What the TPU compiler made of a plan's programs: memory, collectives, FLOPs, traffic, a floor.

Programs are lowered one after the other and compiled side by side; the compiler works outside of
Python's lock. The text of what it made is read by `pallas_kernels.hlo` and `collectives`. Seconds
are estimates: every instruction at the device's published peak or bandwidth, whichever takes
longer. Above: `plan`; below: `planned`, which lists the programs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping

import jax

from notepad_jax.programs import planned
from notepad_jax.programs.planned import Planned, Program
from notepad_jax.telemetry.progress import Screen
from pallas_kernels import hlo
from pallas_kernels.collectives import KINDS, collectives
from pallas_kernels.estimate import Chip

THREADS = 4  # the most; a compilation takes a core and up to 2 GB


@dataclasses.dataclass(frozen=True)
class Read:
    """One compiled program, of one device, in one launch; attention's kernels are not in it."""

    arguments: int  # bytes; the next too
    beside: int  # temporaries, results that are no donated argument, code
    refused: str  # the compiler's words where it found no room, and then no more is known
    whole: bool  # of what was refused: whether `beside` counts the arguments as well
    flops: float  # of matrix products
    moved: float  # bytes to and from HBM
    sent: Mapping[str, float]  # bytes to other devices, by kind of collective
    compute_seconds: float  # of instructions that compute for longer than they move
    memory_seconds: float  # of the others


@dataclasses.dataclass(frozen=True)
class Facts:
    """A program in its place in a run; of one device, in one launch."""

    name: str
    phase: str
    launches: float  # in a step (estimate)
    arguments: int  # bytes; the next two too
    beside: int
    peak: int  # with the residents that it is not given
    refused: str
    flops: float  # attention's kernels are in it, by arithmetic
    moved: float
    sent: Mapping[str, float]
    compute_seconds: float  # estimates, from here on
    memory_seconds: float
    link_seconds: float
    seconds: float  # a floor: links run beside everything else
    limit: str  # what most of them are spent on: "compute", "HBM" or "links"


def compiled(
    made: Planned, chip: Chip, screen: Screen, known: dict[str, Read]
) -> tuple[Facts, ...]:
    """Compiles what is not among `known` (by the program's text) and adds it there."""
    bar = screen.bar("compile", len(made.programs), "programs")
    workers = min(THREADS, os.cpu_count() or 1)
    with contextlib.ExitStack() as stack:
        pool = concurrent.futures.ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting = []
        for program in made.programs:
            lowered = program.lower()
            key = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            devices = made.engine.size if program.phase == planned.ROLLOUT else made.trainer.size
            one = pool.submit(_known, known, f"{key} {devices}", lowered, devices, chip)
            one.add_done_callback(lambda done: bar.advance())
            waiting.append(one)
        found = [one.result() for one in waiting]
    bar.finish()
    pairs = zip(made.programs, found, strict=True)
    return tuple(placed(program, read, made, chip) for program, read in pairs)


def _known(
    known: dict[str, Read], key: str, lowered: jax.stages.Lowered, devices: int, chip: Chip
) -> Read:
    if key not in known:
        known[key] = read(lowered, devices, chip)
    return known[key]


def read(lowered: jax.stages.Lowered, devices: int, chip: Chip) -> Read:
    """Compiles a program for `devices` devices of `chip` and reads what came of it."""
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error))
    memory, text = program.memory_analysis(), program.as_text()
    sent = dict.fromkeys(KINDS, 0.0)
    for one in collectives(text):
        sent[one.kind] += one.sent(devices)
    costs = hlo.instructions(text)
    times = [_seconds(cost.flops, cost.moved, chip) for cost in costs]
    return Read(
        arguments=memory.argument_size_in_bytes,
        beside=memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes,
        refused="",
        whole=False,
        flops=sum(cost.flops for cost in costs),
        moved=sum(cost.moved for cost in costs),
        sent={kind: size for kind, size in sent.items() if size},
        compute_seconds=sum(compute for compute, _ in times),
        memory_seconds=sum(memory for _, memory in times),
    )


def _refused(said: str) -> Read:
    """A program that the compiler found no room for: its own words, and the size in them."""
    line = " ".join(said.split())[:400]
    size, whole = 0.0, False
    if told := re.search(r"temporaries \(([\d.]+)([KMGT]?)\)|[Uu]sed ([\d.]+)([KMGT]?)", line):
        whole = told[3] is not None
        number, unit = (told[3], told[4]) if whole else (told[1], told[2])
        size = float(number) * 1024 ** " KMGT".index(unit or " ")
    return Read(
        arguments=0, beside=int(size), refused=line, whole=whole, flops=0.0, moved=0.0, sent={},
        compute_seconds=0.0, memory_seconds=0.0,
    )  # fmt: skip


def placed(program: Program, found: Read, made: Planned, chip: Chip) -> Facts:
    """Adds what stays on the device, and attention, to what was compiled."""
    residents = made.residents[program.phase]
    given = sum(size for name, size in residents.items() if name in program.holds)
    others = sum(residents.values()) - given
    # What a program does not use of what it is given is not in its arguments, and yet stays.
    arguments = 0 if found.whole else max(given, found.arguments)
    kernels = _seconds(program.kernel_flops, program.kernel_bytes, chip)
    times = {
        "compute": found.compute_seconds + kernels[0],
        "HBM": found.memory_seconds + kernels[1],
        "links": sum(found.sent.values()) / chip.ici_bytes,
    }
    return Facts(
        name=program.name,
        phase=program.phase,
        launches=program.launches,
        arguments=found.arguments,
        beside=found.beside,
        peak=others + arguments + found.beside,
        refused=found.refused,
        flops=found.flops + program.kernel_flops,
        moved=found.moved + program.kernel_bytes,
        sent=found.sent,
        compute_seconds=times["compute"],
        memory_seconds=times["HBM"],
        link_seconds=times["links"],
        seconds=max(times["compute"] + times["HBM"], times["links"]),
        limit=max(times, key=lambda name: times[name]),
    )


def _seconds(flops: float, moved: float, chip: Chip) -> tuple[float, float]:
    """(computing, moving) of one instruction: the longer of the two, and 0."""
    compute = flops / (chip.peak_flops * chip.cores)
    memory = moved / (chip.hbm_bytes * chip.cores)
    return (compute, 0.0) if compute >= memory else (0.0, memory)
