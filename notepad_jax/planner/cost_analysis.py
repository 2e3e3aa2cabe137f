"""Cost analysis of a plan's compiled programs: memory, collectives, FLOPs, traffic, a time floor.

Programs are lowered, compiled and read side by side in child processes (`subprocesses`), each of
which makes the plan for itself: the compiler may crash, or want more memory than there is, and
then a program has no figures and the others have theirs. The text of what was compiled is read by
`hlo` and `collectives`. Seconds are estimates: every instruction at the device's
published peak or bandwidth, whichever takes longer. Above: `plan`; below: `lowering`, which lists
the programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import pallas_kernels
from notepad_jax.planner import hlo, lowering, subprocesses
from notepad_jax.planner.chips import CHIPS, Chip
from notepad_jax.planner.collectives import KINDS, collectives
from notepad_jax.planner.lowering import PlannedRun, Program
from notepad_jax.planner.planned_policy import PlannedPolicy
from notepad_jax.planner.subprocesses import Died
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.screen import Screen
from pallas_kernels import aot

SAID = 400  # characters of the compiler's words
MOST = 4  # programs at once; a compilation takes a core or two and up to 3 GB


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Costs of one compiled program on one device in one launch, without attention's kernels."""

    arguments: int  # bytes; the next too
    beside: int  # temporaries, results that are no donated argument, code
    refused: str  # the compiler's words where it found no room, and then no more is known
    failed: str  # why there is no program at all; nothing else is known
    whole: bool  # of what was refused: whether `beside` counts the arguments as well
    flops: float  # of matrix products
    moved: float  # bytes to and from HBM
    sent: Mapping[str, float]  # bytes to other devices, by kind of collective
    compute_seconds: float  # of instructions that compute for longer than they move
    memory_seconds: float  # of the others


@dataclasses.dataclass(frozen=True)
class Facts:
    """Costs of a program in its place in a run; of one device, in one launch."""

    name: str
    phase: str
    launches: float  # in a step (estimate)
    arguments: int  # bytes; the next two too
    beside: int
    peak: int  # with the residents that it is not given
    refused: str
    failed: str
    flops: float  # attention's kernels are in it, by arithmetic
    moved: float
    sent: Mapping[str, float]
    compute_seconds: float  # estimates, from here on
    memory_seconds: float
    link_seconds: float
    seconds: float  # a floor: links run beside everything else
    limit: str  # what most of them are spent on: "compute", "HBM" or "links"


@dataclasses.dataclass(frozen=True)
class ProgramSource:
    """A picklable source of a plan's programs, from which a child process makes them."""

    config: Training
    slice_name: str

    def sketch(self, policy: PlannedPolicy | None = None) -> PlannedRun:
        """The same plan for stand-ins of the slice's devices: to count, and not to compile.

        `policy` is the config's, where it was found before.
        """
        there = aot.sketch_of(self.slice_name)
        host = [device for device in there if device.process_index == 0]
        return lowering.plan_of(self.config, there, host, policy)

    def __call__(self) -> Compiler:
        kernels = "pallas" if self.config.kernels == "auto" else self.config.kernels
        return Compiler(self.made(), kernels, self.chip, self.slice_name)

    def made(self) -> PlannedRun:
        """Raises what `lowering.plan_of` and `aot.slice_of` raise."""
        there, host = aot.slice_of(self.slice_name), aot.host_of(self.slice_name)
        return lowering.plan_of(self.config, there, host)

    @property
    def chip(self) -> Chip:
        return CHIPS[self.slice_name.partition(":")[0]]


class Compiler:
    """Lowers and compiles a plan's programs by their place in it: what works in a child."""

    def __init__(self, made: PlannedRun, kernels: str, chip: Chip, slice_name: str) -> None:
        self._made, self._kernels, self._chip = made, kernels, chip
        self._slice, self._libtpu = slice_name, version("libtpu")
        self._lowered: jax.stages.Lowered | None = None

    def key(self, item: int) -> str:
        program = self._made.programs[item]
        with pallas_kernels.using(self._kernels):
            self._lowered = program.lower()
        text = hashlib.sha256(self._lowered.as_text().encode()).hexdigest()
        # An engine lives on a host, and all hosts of a chip are alike.
        there = self._chip.name if program.phase == lowering.ROLLOUT else self._slice
        return f"{text} {self._devices(program)} {there} {self._libtpu}"

    def answer(self, item: int) -> ProgramCost:
        program, lowered = self._made.programs[item], self._lowered
        with aot.nothing_kept():
            return read(lowered, self._devices(program), self._chip)

    def _devices(self, program: Program) -> int:
        mesh = self._made.engine if program.phase == lowering.ROLLOUT else self._made.trainer
        return mesh.size


class CostCache(dict[str, ProgramCost]):
    """A cache of compiled programs' costs, by their texts; with a file, it survives the process.

    A line of JSON for each, written when it is there. Lines of others are left alone, and one
    that is cut is what a process was killed in.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                said = json.loads(line)
                super().__setitem__(said["compiled"], ProgramCost(**said["read"]))

    def __setitem__(self, key: str, value: ProgramCost) -> None:
        super().__setitem__(key, value)
        self.add({"compiled": key, "read": dataclasses.asdict(value)})

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends a line to the file. Raises OSError as the system does."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def compiled(
    source: ProgramSource,
    made: PlannedRun,
    wanted: Sequence[int],
    screen: Screen,
    known: dict[str, ProgramCost],
) -> tuple[Facts, ...]:
    """Compiles the `wanted` of the programs of `made`, by their place, and returns their facts.

    What is among `known`, by a program's text, slice and compiler, is not compiled again, and
    what is new is added.
    """
    if not wanted:
        return ()
    bar = screen.bar("compile", len(wanted), "programs")
    # Those of the update first: one of them takes as long as five others.
    items = sorted(wanted, key=lambda item: made.programs[item].phase != lowering.UPDATE)
    workers = min(MOST, os.cpu_count() or 1)

    def done(item: int) -> None:
        bar.advance(newest=made.programs[item].name)

    found = dict(subprocesses.run(source, items, workers, known, done))
    killed = [item for item in items if isinstance(found[item], Died) and found[item].killed]
    if killed and workers > 1:  # they may have been too many
        screen.say(f"{len(killed)} compilations were killed, and are tried again one by one")
        found |= subprocesses.run(source, killed, 1, known, lambda item: None)
    bar.finish()
    facts = []
    for item in wanted:
        one = found[item]
        one = _failed(_words(one, source)) if isinstance(one, Died) else one
        facts.append(placed(made.programs[item], one, made, source.chip))
    return tuple(facts)


def _words(died: Died, source: ProgramSource) -> str:
    """Why a program is not there, and the mend."""
    if died.killed:
        held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        return (
            f"compiling it for {source.slice_name} was killed ({died.words}): most likely it takes "
            f"more memory than is free of this machine's {held:.0f} GB; end other programs"
        )
    return (
        f"the compiler, libtpu {version('libtpu')}, crashed on it for {source.slice_name} "
        f"({died.words}): its own fault and not the config's; try another version of libtpu, or "
        f"plan for another chip"
    )


def read(lowered: jax.stages.Lowered, devices: int, chip: Chip) -> ProgramCost:
    """Compiles a program for `devices` devices of `chip` and reads what came of it."""
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return _refused(str(error))
        return _failed(f"the compiler gave up: {' '.join(str(error).split())[:SAID]}")
    memory, text = program.memory_analysis(), program.as_text()
    sent = dict.fromkeys(KINDS, 0.0)
    for one in collectives(text):
        sent[one.kind] += one.sent(devices)
    costs = hlo.instructions(text)
    times = [seconds(cost.flops, cost.moved, chip) for cost in costs]
    return ProgramCost(
        arguments=memory.argument_size_in_bytes,
        beside=memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes,
        refused="",
        failed="",
        whole=False,
        flops=sum(cost.flops for cost in costs),
        moved=sum(cost.moved for cost in costs),
        sent={kind: size for kind, size in sent.items() if size},
        compute_seconds=sum(compute for compute, _ in times),
        memory_seconds=sum(memory for _, memory in times),
    )


def _refused(said: str) -> ProgramCost:
    """A program that the compiler found no room for: its own words, and the size in them."""
    line = " ".join(said.split())[:SAID]
    size, whole = 0.0, False
    if told := re.search(r"temporaries \(([\d.]+)([KMGT]?)\)|[Uu]sed ([\d.]+)([KMGT]?)", line):
        whole = told[3] is not None
        number, unit = (told[3], told[4]) if whole else (told[1], told[2])
        size = float(number) * 1024 ** " KMGT".index(unit or " ")
    return dataclasses.replace(_failed(""), beside=int(size), refused=line, whole=whole)


def _failed(why: str) -> ProgramCost:
    return ProgramCost(
        arguments=0, beside=0, refused="", failed=why, whole=False, flops=0.0, moved=0.0, sent={},
        compute_seconds=0.0, memory_seconds=0.0,
    )  # fmt: skip


def placed(program: Program, found: ProgramCost, made: PlannedRun, chip: Chip) -> Facts:
    """Adds what stays on the device, and attention, to what was compiled."""
    residents = made.residents[program.phase]
    given = sum(size for name, size in residents.items() if name in program.holds)
    others = sum(residents.values()) - given
    # What a program does not use of what it is given is not in its arguments, and yet stays.
    arguments = 0 if found.whole else max(given, found.arguments)
    kernels = seconds(program.kernel_flops, program.kernel_bytes, chip)
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
        failed=found.failed,
        flops=found.flops + program.kernel_flops,
        moved=found.moved + program.kernel_bytes,
        sent=found.sent,
        compute_seconds=times["compute"],
        memory_seconds=times["HBM"],
        link_seconds=times["links"],
        seconds=max(times["compute"] + times["HBM"], times["links"]),
        limit=max(times, key=lambda name: times[name]),
    )


def seconds(flops: float, moved: float, chip: Chip) -> tuple[float, float]:
    """(computing, moving) of one instruction: the longer of the two, and 0."""
    compute = flops / (chip.peak_flops * chip.cores)
    memory = moved / (chip.hbm_bytes * chip.cores)
    return (compute, 0.0) if compute >= memory else (0.0, memory)
