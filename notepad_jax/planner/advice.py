"""Advice for a config that does not fit: changes, and about how much memory each saves.

Savings are estimates by proportion from what was compiled (half the rows, half the temporaries);
only planning again with the change says for certain. Changes that leave the result of a step as
it is come first, then those that round numbers, then those that make it another run. Above:
`plan`; below: `arithmetic`, which says what an update keeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from notepad_jax.planner import arithmetic
from notepad_jax.planner.lowering import HANDOFF, ROLLOUT, UPDATE, PlannedRun
from notepad_jax.setup import builders
from notepad_jax.setup.config.whole import Training
from pallas_kernels import aot

EVERYWHERE = (ROLLOUT, UPDATE, HANDOFF)
# What becomes of a step's result, the best first.
SAME, ROUNDED, OTHER = RESULTS = ("same", "rounded", "other")
# Keys that change how a step is computed and not what, and those that round on the way.
EXACT = frozenset(
    "grpo.micro_batch_rows grpo.remat grpo.row_length parallel.devices parallel.tensor "
    "engine.pages engine.tensor engine.replicas engine.give_back checkpoint.handoff".split()
)
ROUNDING = frozenset(("engine.cache_dtype", "checkpoint.rollout_dtype"))
CUT_BY_HEADS = ("weights", "cache", "arriving weights")  # residents of an engine


@dataclasses.dataclass(frozen=True)
class Advice:
    """One change that needs less memory: values of the config, or another slice."""

    sets: Mapping[str, Any]  # keys of the config and what they become; {} for another slice
    slice: str  # "" for the same one
    consequence: str
    saves: int  # bytes of a device, in the phase that needs most (estimate)
    enough: bool  # whether it alone would do (estimate)
    result: str  # of RESULTS

    @property
    def overrides(self) -> list[str]:
        return [f"--config.{key}={value}" for key, value in self.sets.items()]

    @property
    def words(self) -> str:
        return " ".join(self.overrides) or f"--tpu {self.slice}"


@dataclasses.dataclass(frozen=True)
class Found:
    """Memory figures of a plan that does not fit; bytes of a device."""

    peaks: Mapping[str, int]  # of each phase
    temporaries: int  # of the update's largest program
    hbm: int


def changes(config: Training, made: PlannedRun, found: Found, name: str) -> tuple[Advice, ...]:
    """Returns the changes that help on the slice `name`: what keeps the result first, and of equals
    what suffices alone."""
    worst = max(found.peaks, key=lambda phase: found.peaks[phase])
    listed = []
    for sets, larger, consequence, saves in _candidates(config, made, found, name):
        left = {phase: peak - saves.get(phase, 0) for phase, peak in found.peaks.items()}
        if saves.get(worst, 0) > 0:
            enough = max(left.values()) <= found.hbm
            result = _result(sets)
            listed.append(Advice(sets, larger, consequence, int(saves[worst]), enough, result))
    return tuple(sorted(listed, key=lambda c: (RESULTS.index(c.result), not c.enough)))  # stable


def _result(sets: Mapping[str, Any]) -> str:
    if EXACT.issuperset(sets):
        return SAME
    return ROUNDED if ROUNDING.issuperset(sets) else OTHER


def next_of(listed: Sequence[Advice]) -> Advice | None:
    """Returns the change to try first on the same slice, or None: what keeps the result and is
    enough, then what keeps it and saves most, then the same of those that round, and of others."""
    here = [change for change in listed if change.sets]
    order = lambda c: (-RESULTS.index(c.result), c.enough, c.saves)  # noqa: E731
    return max(here, key=order, default=None)


Candidate = tuple[Mapping[str, Any], str, str, Mapping[str, float]]


def _candidates(config: Training, made: PlannedRun, found: Found, name: str) -> Iterator[Candidate]:
    for own in (_of_update, _of_engine, _of_training):
        for sets, consequence, saves in own(config, made, found):
            yield sets, "", consequence, saves
    yield from _of_slices(config, made, found, name)


OnThisSlice = tuple[Mapping[str, Any], str, Mapping[str, float]]


def _of_update(config: Training, made: PlannedRun, found: Found) -> Iterator[OnThisSlice]:
    g, parts, beside = config.grpo, made.trainer.shape["fsdp"], found.temporaries
    if g.micro_batch_rows > parts:
        saved = beside * (1 - parts / g.micro_batch_rows)
        yield {"grpo.micro_batch_rows": parts}, "less at once", {UPDATE: saved}
    tensor = made.trainer.shape["tensor"]
    now = arithmetic.kept(made.policy, tensor, g.remat)
    if not g.remat:
        saved = beside * (1 - arithmetic.kept(made.policy, tensor, True) / now)
        yield {"grpo.remat": "true"}, "a quarter more time", {UPDATE: saved}
    turn = made.reading.update
    longest, length = turn.prompt + turn.completion, made.update.row_length  # a config's may be 0
    shorter = max(math.ceil(longest / 1024) * 1024, length // 2)
    if shorter < length:
        saved = beside * (1 - shorter / length)
        yield {"grpo.row_length": shorter}, "prefixes are repeated", {UPDATE: saved}
    if made.policy.kv_heads % (2 * tensor) == parts % 2 == g.micro_batch_rows % 2 == 0:
        # As many rows on a device as before, by twice as many devices to a row.
        sets = {"parallel.tensor": 2 * tensor, "grpo.micro_batch_rows": g.micro_batch_rows // 2}
        saved = beside * (1 - arithmetic.kept(made.policy, 2 * tensor, g.remat) / now)
        yield sets, "devices of a row exchange activations", {UPDATE: saved}
    if config.parallel.devices not in (0, made.devices):
        share = 1 - made.trainer.size / made.devices
        saved = {phase: share * _learnt(made, phase) for phase in EVERYWHERE}
        yield {"parallel.devices": 0}, "learn on all devices of the slice", saved


def _of_engine(config: Training, made: PlannedRun, found: Found) -> Iterator[OnThisSlice]:
    e, held = config.engine, made.residents[ROLLOUT]
    over = max(found.peaks.values()) - found.hbm
    cached = [ROLLOUT] if e.give_back else EVERYWHERE
    arriving = made.residents[HANDOFF]["arriving weights"]
    if not e.give_back:
        again = held["cache"] + min(held["weights"], arriving)  # what a step does not change stays
        saved = {UPDATE: again, HANDOFF: again}
        yield {"engine.give_back": "true"}, "the cache is filled with zeros once a step", saved
    smaller = {"float32": "bfloat16", "bfloat16": "int8"}.get(e.cache_dtype or made.policy.dtype)
    if smaller:
        share = 0.5 if smaller != "int8" else 0.45  # int8 has scales beside it
        saved = dict.fromkeys(cached, held["cache"] * share)
        yield {"engine.cache_dtype": smaller}, "keys and values are rounded", saved
    turn = made.reading.update
    least = 2 * math.ceil((turn.prompt + turn.completion) / e.page_size)
    now = made.settings.pages  # of a config they may be 0: derived
    pages = max(least, int(now * (1 - over / held["cache"]) * 0.98))
    if pages < now:
        saved = dict.fromkeys(cached, held["cache"] * (1 - pages / now))
        yield {"engine.pages": pages}, "fewer readings at once", saved
    host = made.devices // made.hosts
    wider = [n for n in range(e.tensor + 1, host + 1) if host % n == made.policy.kv_heads % n == 0]
    if wider:
        share = 1 - e.tensor / wider[-1]
        saved = {
            phase: share * sum(made.residents[phase].get(name, 0) for name in CUT_BY_HEADS)
            for phase in EVERYWHERE
        }
        yield {"engine.tensor": wider[-1]}, "one engine over more devices of a host", saved
    dtype = builders.rollout_dtype(config, made.policy)
    smaller = {"float32": "bfloat16", "bfloat16": "int8"}.get(dtype)
    if smaller:
        share = 0.5 if smaller != "int8" else 0.45
        saved = {phase: share * made.residents[phase].get("weights", 0) for phase in EVERYWHERE}
        saved[HANDOFF] += share * arriving if config.checkpoint.handoff == "memory" else 0
        yield {"checkpoint.rollout_dtype": smaller}, "the engine's weights are rounded", saved


def _of_training(config: Training, made: PlannedRun, found: Found) -> Iterator[OnThisSlice]:
    held, arriving = made.residents[UPDATE], made.residents[HANDOFF]["arriving weights"]
    if config.checkpoint.handoff == "storage":
        saved = {HANDOFF: arriving - made.residents[ROLLOUT]["weights"]}
        yield {"checkpoint.handoff": "memory"}, "weights are cast where they are learnt", saved
    if "reference" in held:
        saved = dict.fromkeys(EVERYWHERE, held["reference"])
        yield {"grpo.kl_weight": 0}, "another objective: no distance to the start", saved
    if not config.grpo.lora.rank:
        base = held["masters"] / 2
        saved = {phase: _learnt(made, phase) - base for phase in EVERYWHERE}
        yield {"grpo.lora.rank": 16}, "adapters learn instead of the weights", saved


def _of_slices(config: Training, made: PlannedRun, found: Found, name: str) -> Iterator[Candidate]:
    """The smallest larger slice that would do: what is learnt is cut over more devices."""
    chip = name.partition(":")[0]
    if config.parallel.devices:
        return
    for sides in aot.SLICES[chip]:
        more = math.prod(map(int, sides.split("x"))) * (2 if chip == "tpu7x" else 1)
        if more <= made.devices:
            continue
        share = 1 - made.devices / more
        saved = {phase: share * _learnt(made, phase) for phase in EVERYWHERE}
        saved[UPDATE] += share * found.temporaries if _spread(config, made, more) else 0
        if all(found.peaks[phase] - saved[phase] <= found.hbm for phase in EVERYWHERE):
            yield {}, f"{chip}:{sides}", "more devices", saved
            return


def _spread(config: Training, made: PlannedRun, devices: int) -> bool:
    """Whether the rows of a micro-batch can be spread over so many devices."""
    return config.grpo.micro_batch_rows % (devices // made.trainer.shape["tensor"]) == 0


def _learnt(made: PlannedRun, phase: str) -> int:
    held = made.residents[phase]
    return sum(held.get(part, 0) for part in ("masters", "moments", "gradient"))
