"""`notepad-jax plan`: does a config fit a slice that is not here, and what would a step take?

Every program of the run is compiled by the real TPU compiler (`planned` lists them), in several
threads, and read: memory, collectives, FLOPs and traffic (`pallas_kernels.hlo`). Together with
what stays on a device this gives a verdict for each phase. What comes out of the compiler is
called compiled; arithmetic over shapes and shardings is called exact; times are estimates, a
floor: every instruction at the chip's published peak or bandwidth, links beside it. Above: the
command; below: `planned`, `advice` (what to change), `pallas_kernels`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

import jax
from ml_collections import ConfigDict

import pallas_kernels
from notepad_jax.model import parameters
from notepad_jax.programs import advice, planned
from notepad_jax.programs.planned import PHASES, Planned, Program
from notepad_jax.telemetry.progress import Screen
from pallas_kernels import aot, estimate, hlo
from pallas_kernels.collectives import KINDS, collectives

THREADS = 4  # the most; a compilation takes a core and up to 2 GB


class DoesNotFit(ValueError):
    """A config that is too large for the slice. `plan` is all that was found out."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.verdict)
        self.plan = plan


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the compiler made of a program; of one device, in one launch."""

    name: str
    phase: str
    launches: float  # in a step (estimate)
    arguments: int  # bytes; the next too
    beside: int  # temporaries, results that are no donated argument, code
    peak: int  # with the residents that it is not given
    refused: str  # the compiler's words where it found no room, and then no more is known
    flops: float  # of matrix products; attention's kernels by arithmetic
    moved: float  # bytes to and from HBM
    sent: Mapping[str, float]  # bytes to other devices, by kind of collective
    compute_seconds: float  # estimates, from here on
    memory_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        """A floor: links run beside everything else."""
        return max(self.compute_seconds + self.memory_seconds, self.link_seconds)

    @property
    def limit(self) -> str:
        """What its time is spent on."""
        times = {
            "compute": self.compute_seconds,
            "HBM": self.memory_seconds,
            "links": self.link_seconds,
        }
        return max(times, key=lambda name: times[name])


@dataclasses.dataclass(frozen=True)
class Phase:
    """What a phase needs of a device, and how long it takes in a step."""

    name: str
    residents: Mapping[str, int]  # bytes (exact)
    largest: str  # the program with the largest peak; "" where none runs
    peak: int  # bytes
    seconds: float  # estimate
    flops: float  # of a device in a step
    limit: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that `plan` says; bytes are of one device."""

    slice: str
    model: str
    parameters: int
    prompts_counted_by: str
    devices: int
    hosts: int
    trainer: str  # fsdp x tensor
    engines: int
    engine_tensor: int
    hbm: int
    phases: tuple[Phase, ...]
    programs: tuple[Facts, ...]
    step: Mapping[str, float]  # what was counted of a step at its limits
    fits: bool
    verdict: str
    advice: tuple[advice.Change, ...]


def run(config: ConfigDict, slice_name: str, screen: Screen) -> Plan:
    """Plans `config` for a slice such as "v5p:2x4x4".

    Raises ValueError for a slice that does not exist, a config that cannot run on it, or where
    libtpu is not installed, and `DoesNotFit`.
    """
    try:
        there = aot.slice_of(slice_name)
    except aot.MissingCompiler as problem:
        raise ValueError(str(problem)) from problem
    chip = estimate.CHIPS[slice_name.partition(":")[0]]
    kernels = "pallas" if config.kernels == "auto" else config.kernels
    with pallas_kernels.using(kernels), aot.nothing_kept():
        made = planned.plan_of(config, there)
        facts = _compiled(made, chip, screen)
    phases = tuple(_phase(name, made.residents[name], facts) for name in PHASES)
    worst = max(phases, key=lambda phase: phase.peak)
    fits = worst.peak <= chip.hbm_size and not any(fact.refused for fact in facts)
    changes = () if fits else _changes(config, made, phases, facts, chip.hbm_size, slice_name)
    plan = Plan(
        slice=slice_name,
        model=made.model,
        parameters=parameters.count(made.policy),
        prompts_counted_by=made.counted_by,
        devices=made.devices,
        hosts=made.hosts,
        trainer=" x ".join(str(made.trainer.shape[axis]) for axis in ("fsdp", "tensor")),
        engines=made.engines,
        engine_tensor=made.engine.shape["tensor"],
        hbm=chip.hbm_size,
        phases=phases,
        programs=facts,
        step=_step(made),
        fits=fits,
        verdict=_verdict(slice_name, worst, chip.hbm_size, fits, changes),
        advice=changes,
    )
    if not fits:
        raise DoesNotFit(plan)
    return plan


# ---------------------------------------------------------------- compiling


def _compiled(made: Planned, chip: estimate.Chip, screen: Screen) -> tuple[Facts, ...]:
    """Lowers the programs one by one, compiles them side by side, and reads each."""
    bar = screen.bar("compile", len(made.programs), "programs")
    workers = min(THREADS, os.cpu_count() or 1)
    with contextlib.ExitStack() as stack:
        pool = concurrent.futures.ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting = []
        for program in made.programs:
            lowered = program.lower()
            waiting.append(pool.submit(_facts, program, lowered, made, chip))
            waiting[-1].add_done_callback(lambda done: bar.advance())
        found = tuple(one.result() for one in waiting)
    bar.finish()
    return found


def _facts(
    program: Program, lowered: jax.stages.Lowered, made: Planned, chip: estimate.Chip
) -> Facts:
    residents = made.residents[program.phase]
    others = sum(size for name, size in residents.items() if name not in program.holds)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(program, str(error), sum(residents.values()))
    memory = compiled.memory_analysis()
    beside = (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    text = compiled.as_text()
    costs = hlo.instructions(text)
    devices = made.engine.size if program.phase == planned.ROLLOUT else made.trainer.size
    sent = dict.fromkeys(KINDS, 0.0)
    for one in collectives(text):
        sent[one.kind] += one.sent(devices)
    peak_flops, bandwidth = chip.peak_flops * chip.cores, chip.hbm_bytes * chip.cores
    pairs = [(cost.flops / peak_flops, cost.moved / bandwidth) for cost in costs]
    pairs.append((program.kernel_flops / peak_flops, program.kernel_bytes / bandwidth))
    return Facts(
        name=program.name,
        phase=program.phase,
        launches=program.launches,
        arguments=memory.argument_size_in_bytes,
        beside=beside,
        peak=others + memory.argument_size_in_bytes + beside,
        refused="",
        flops=sum(cost.flops for cost in costs) + program.kernel_flops,
        moved=sum(cost.moved for cost in costs) + program.kernel_bytes,
        sent={kind: size for kind, size in sent.items() if size},
        compute_seconds=sum(compute for compute, memory in pairs if compute >= memory),
        memory_seconds=sum(memory for compute, memory in pairs if compute < memory),
        link_seconds=sum(sent.values()) / chip.ici_bytes,
    )


def _refused(program: Program, said: str, residents: int) -> Facts:
    """A program that the compiler found no room for: its own words, and the size in them."""
    line = " ".join(said.split())[:400]
    sizes = re.search(r"\(([\d.]+)([KMGT]?)\)|[Uu]sed ([\d.]+)([KMGT]?)", line)
    size = 0.0
    if sizes:
        number, unit = (sizes[1], sizes[2]) if sizes[1] else (sizes[3], sizes[4])
        size = float(number) * 1024 ** " KMGT".index(unit or " ")
    return Facts(
        name=program.name, phase=program.phase, launches=program.launches, arguments=0,
        beside=int(size), peak=max(int(size), residents), refused=line, flops=0.0, moved=0.0,
        sent={}, compute_seconds=0.0, memory_seconds=0.0, link_seconds=0.0,
    )  # fmt: skip


# ---------------------------------------------------------------- the verdict


def _phase(name: str, residents: Mapping[str, int], facts: Sequence[Facts]) -> Phase:
    own = [fact for fact in facts if fact.phase == name]
    stays = sum(residents.values())
    largest = max(own, key=lambda fact: fact.peak, default=None)
    busiest = max(own, key=lambda fact: fact.seconds * fact.launches, default=None)
    return Phase(
        name=name,
        residents=residents,
        largest=largest.name if largest else "",
        peak=max(stays, largest.peak) if largest else stays,
        seconds=sum(fact.seconds * fact.launches for fact in own),
        flops=sum(fact.flops * fact.launches for fact in own),
        limit=f"{busiest.name}, {busiest.limit}" if busiest else "",
    )


def _changes(
    config: ConfigDict,
    made: Planned,
    phases: Sequence[Phase],
    facts: Sequence[Facts],
    hbm: int,
    name: str,
) -> tuple[advice.Change, ...]:
    beside = max(fact.beside for fact in facts if fact.phase == planned.UPDATE)
    peaks = {phase.name: phase.peak for phase in phases}
    return advice.changes(config, made, advice.Found(peaks, beside, hbm), name)


def _step(made: Planned) -> Mapping[str, float]:
    reading, update = made.reading, made.update
    return {
        "readings": reading.groups * reading.members,
        "turns_of_a_reading": reading.chunks + 1,
        "prompt_tokens_of_a_turn": reading.update.prompt,
        "completion_tokens_of_a_reading": reading.completion_tokens,
        "optimizer_steps": update.optimizer_steps,
        "micro_batches": update.micro_batches * update.optimizer_steps,
        "rows": update.rows * update.optimizer_steps,
        "packed_tokens": update.tokens * update.optimizer_steps,
    }


def _verdict(
    name: str, worst: Phase, hbm: int, fits: bool, changes: Sequence[advice.Change]
) -> str:
    needs = f"{worst.peak / 1e9:.1f} of {hbm / 1e9:.1f} GB a device in the {worst.name}"
    if fits:
        return f"fits {name}: {needs}"
    over = f"does not fit {name}: {needs}, {(worst.peak - hbm) / 1e9:.1f} GB too much"
    if not changes:
        return f"{over}; no change that is known here would do: take a larger slice"
    enough = [change for change in changes if change.enough]
    if enough:
        return f"{over}; {enough[0].words} would do (estimate)"
    return f"{over}; no single change does, together they save " + (
        f"{sum(change.saves for change in changes) / 1e9:.1f} GB (estimate): "
        + ", ".join(change.words for change in changes)
    )
