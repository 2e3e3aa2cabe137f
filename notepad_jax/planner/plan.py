"""`notepad-jax plan`: whether a config fits a slice that is not here, and a step's time there.

Every program of the run is compiled by the real TPU compiler (`lowering` lists them,
`cost_analysis` reads them). Together with what stays on a device this gives a verdict for each
phase. What comes out of the compiler is called compiled; arithmetic over shapes and shardings is
called exact; times are estimates, a floor. `fit` changes a config by its own advice until it fits.
Above: the command; below: `lowering`, `cost_analysis`, `advice` (what to change).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from notepad_jax.model import parameters
from notepad_jax.planner import (
    advice,
    arithmetic,
    chips,
    cost_analysis,
    document,
    lowering,
    planned_policy,
)
from notepad_jax.planner.cost_analysis import Facts, ProgramCost
from notepad_jax.planner.lowering import PHASES, PlannedRun
from notepad_jax.setup import configuration
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.screen import Screen
from pallas_kernels import aot

ROUNDS = 8  # of changing and planning again
ALL, LARGEST, NONE = "all", "largest", "none"  # which programs are compiled, or instead
ESTIMATE = "estimate"  # of those that a step launches: by arithmetic, without a compiler


class DoesNotFit(ValueError):
    """A config that is too large for the slice, or may be. `plan` is all that was found out."""

    def __init__(self, plan: SlicePlan) -> None:
        super().__init__(plan.verdict)
        self.plan = plan


@dataclasses.dataclass(frozen=True)
class Phase:
    """The memory that a phase needs of a device, and its time in a step."""

    name: str
    residents: Mapping[str, int]  # bytes (exact)
    largest: str  # the program with the largest peak; "" where none runs
    peak: int  # bytes
    seconds: float  # estimate
    flops: float  # of a device in a step
    limit: str


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """The whole plan of a config on a slice; bytes are of one device."""

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
    compiled: bool  # or what is said of programs is `arithmetic`
    programs: tuple[Facts, ...]
    left_out: int  # programs that were not compiled, narrower than those
    step: Mapping[str, float]  # what was counted of a step at its limits
    seconds: float  # of a step, at least (estimate)
    fits: bool
    verdict: str
    advice: tuple[advice.Advice, ...]
    documents: tuple[document.DocumentTime, ...] = ()  # read on one engine (estimate)


def fit(
    config: Training,
    slice_name: str,
    screen: Screen,
    programs: str = ALL,
    known: dict[str, ProgramCost] | None = None,
) -> tuple[SlicePlan, list[advice.Advice]]:
    """Changes `config` until it fits; returns its plan and what was changed, in order.

    One change at a time: one that keeps the result of a step if there is such a one, else what
    saves most. While it searches, what stays on a device is held against it before anything is
    compiled, and then of every kind of program only the largest is compiled, the one that full
    turns launch; what a change leaves as it was is not compiled again. What `programs` asks for
    is compiled once, of what was found. Raises as `run` does, `DoesNotFit` with the last plan
    where no change is left.
    """
    known = {} if known is None else known
    changed: list[advice.Advice] = []
    steps = (ESTIMATE,) if programs == ESTIMATE else dict.fromkeys((NONE, LARGEST, programs))
    while True:
        try:
            for step in steps:
                plan = run(config, slice_name, screen, known, step)
            return plan, changed
        except DoesNotFit as problem:
            change = advice.next_of(problem.plan.advice)
            if change is None or len(changed) == ROUNDS:
                raise
            screen.say(f"{problem.plan.verdict.partition(';')[0]}: trying {change.words}")
        config = configuration.changed(config, change.overrides)
        changed.append(change)


def run(
    config: Training,
    slice_name: str,
    screen: Screen,
    known: dict[str, ProgramCost] | None = None,
    programs: str = ALL,
    policy: planned_policy.PlannedPolicy | None = None,
    documents: bool = True,
) -> SlicePlan:
    """Plans `config` for a slice such as "v5p:2x4x4".

    `known` holds what was compiled before, and takes what is compiled now; `programs` says which
    are: ALL, the LARGEST of each kind, or NONE; with ESTIMATE those are counted, and libtpu need
    not be there. `policy` is the config's, where it was found before; a search, which compares
    steps, does without `documents`. Raises ValueError for a slice that does not exist, a config
    that cannot run on it, or where libtpu is missed, and `DoesNotFit`.
    """
    source = cost_analysis.ProgramSource(config, slice_name)
    if programs == ESTIMATE:
        made = source.sketch(policy)
        launched = [program for program in made.programs if program.launches]
        found = arithmetic.estimated(made, source.chip, launched)
    else:
        made, found = _compiled(source, screen, {} if known is None else known, programs)
    chip = source.chip
    phases = tuple(_phase(name, made.residents[name], found) for name in PHASES)
    phases = (*phases[:-1], _handed_off(phases[-1], made, chip))
    worst = max(phases, key=lambda phase: phase.peak)
    room = worst.peak <= chip.hbm_size and not any(fact.refused for fact in found)
    missing = [fact.name for fact in found if fact.failed]
    changes = () if room else _changes(config, made, phases, found, chip.hbm_size, slice_name)
    compiled = programs != ESTIMATE
    plan = SlicePlan(
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
        compiled=compiled,
        programs=found,
        left_out=len(made.programs) - len(found),
        step=_step(made),
        seconds=sum(phase.seconds for phase in phases),
        fits=room and not missing,
        verdict=_verdict(slice_name, worst, chip.hbm_size, room, missing, changes)
        + ("" if compiled else " (an estimate: nothing was compiled)"),
        advice=changes,
        documents=document.documents(made, chip) if documents else (),
    )
    if not plan.fits:
        raise DoesNotFit(plan)
    return plan


def _compiled(
    source: cost_analysis.ProgramSource,
    screen: Screen,
    known: dict[str, ProgramCost],
    programs: str,
) -> tuple[PlannedRun, tuple[Facts, ...]]:
    try:
        made = source.made()
    except aot.MissingCompiler as problem:
        raise ValueError(f"{problem}; or say --estimate, which compiles nothing") from problem
    wanted = [
        item
        for item, program in enumerate(made.programs)
        if programs == ALL or (programs == LARGEST and program.launches)
    ]
    return made, cost_analysis.compiled(source, made, wanted, screen, known)


# ---------------------------------------------------------------- the verdict


def _phase(name: str, residents: Mapping[str, int], found: Sequence[Facts]) -> Phase:
    own = [fact for fact in found if fact.phase == name]
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


def _handed_off(phase: Phase, made: PlannedRun, chip: chips.Chip) -> Phase:
    """The hand-off's time: every device of an engine receives its float32 part over the links."""
    sent = 4 * parameters.count(made.policy) / made.engine.shape["tensor"]
    return dataclasses.replace(phase, seconds=sent / chip.ici_bytes, limit="links")


def _changes(
    config: Training,
    made: PlannedRun,
    phases: Sequence[Phase],
    found: Sequence[Facts],
    hbm: int,
    name: str,
) -> tuple[advice.Advice, ...]:
    beside = max((fact.beside for fact in found if fact.phase == lowering.UPDATE), default=0)
    peaks = {phase.name: phase.peak for phase in phases}
    return advice.changes(config, made, advice.Found(peaks, beside, hbm), name)


def _step(made: PlannedRun) -> Mapping[str, float]:
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
        "computed_tokens": update.computed * update.optimizer_steps,
        "fill": update.fill,
        "prefix_copies": update.copies,
    }


def _verdict(
    name: str,
    worst: Phase,
    hbm: int,
    room: bool,
    missing: Sequence[str],
    changes: Sequence[advice.Advice],
) -> str:
    needs = f"{worst.peak / 1e9:.1f} of {hbm / 1e9:.1f} GB a device in the {worst.name}"
    if room and missing:
        return (
            f"not known whether it fits {name}: {', '.join(missing)} could not be compiled "
            f"(why: see the programs); without, it needs {needs}"
        )
    if room:
        return f"fits {name}: {needs}"
    over = f"does not fit {name}: {needs}, {(worst.peak - hbm) / 1e9:.1f} GB too much"
    if not changes:
        return f"{over}; no change that is known here would do: take a larger slice"
    enough = [change for change in changes if change.enough]
    same = [change for change in changes if change.result == advice.SAME and change.sets]
    together = sum(change.saves for change in same) >= worst.peak - hbm
    if enough and (enough[0] in same or not together):
        return f"{over}; {enough[0].words} would do (estimate)"
    listed = same if together else changes
    return f"{over}; no single change does, together they save " + (
        f"{sum(change.saves for change in listed) / 1e9:.1f} GB (estimate): "
        + ", ".join(change.words for change in listed)
    )
