"""The speeds of one engine's chips for the simulated fleet, from a plan's own arithmetic.

A plan's seconds are floors: peaks and bandwidths as published. A real program reaches a part of
them, and a fleet is judged by how reading and learning compare, so floors are divided here by the
efficiencies that are assumed below, not measured on a TPU. How long weights take from
slice to slice is assumed, too. What a document costs is told turn by turn, at the limits, as a
plan tells it. Above: `fleet_modes`; below: `lowering`, `arithmetic` and `workload`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from notepad_jax.engine import shapes
from notepad_jax.model import parameters
from notepad_jax.planner import arithmetic
from notepad_jax.planner.chips import Chip
from notepad_jax.planner.cost_analysis import Facts
from notepad_jax.planner.fleet_engine import Lot, PlayedDocument, Rates
from notepad_jax.planner.lowering import HANDOFF, UPDATE, PlannedRun, Program, name_of
from notepad_jax.setup.sizes import TurnSize

COMPUTE = 0.5  # of the published peak, in matrix products
HBM = 0.6  # of the published bandwidth
UP, DOWN = 1.25e9, 2.5e9  # byte/s of an engine's weights to and from storage
HOST = 15e9  # byte/s of them from a host's memory to its chips


@dataclasses.dataclass(frozen=True)
class GroupTurns:
    """The turns of a group, at their limits."""

    chunk_size: int  # tokens
    usual: int  # tokens of a document as a plan counts it: whole chunks
    passes: int
    members: int
    together: int  # readings that go on in step: as many as fill an engine's slots evenly
    update: TurnSize
    answers: tuple[TurnSize, ...]

    def turns(self, tokens: int) -> int:
        """Returns how many turns a reading of so many tokens has."""
        return self.passes * math.ceil(tokens / self.chunk_size) + len(self.answers)

    def document(self, tokens: int) -> PlayedDocument:
        """Returns the work of a document of so many tokens for engines and trainer."""
        chunks = math.ceil(tokens / self.chunk_size)
        rest = tokens - (chunks - 1) * self.chunk_size
        last = dataclasses.replace(self.update, shared=self.update.shared - self.chunk_size + rest)
        turns = self.passes * ((self.update,) * (chunks - 1) + (last,)) + self.answers
        shared = tuple(0 if turn.alone else turn.shared for turn in turns)
        lot = Lot(
            readings=self.together,
            private=tuple(turn.prompt - s for turn, s in zip(turns, shared, strict=True)),
            written=tuple(turn.completion for turn in turns),
        )
        lots = (lot,) * (self.members // self.together)
        return PlayedDocument(shared, lots, sum(map(self._packed, turns)))

    def _packed(self, turn: TurnSize) -> int:
        if turn.alone:
            return self.members * turn.whole
        own = turn.private + turn.completion
        return turn.shared + self.members * own - (self.members - 1) * turn.common


def reader(made: PlannedRun) -> GroupTurns:
    """Returns the turns of a plan's groups.

    Raises ValueError for what is not read serially: its turns are no chain.
    """
    rules, reading = made.rules, made.reading
    if rules.order != "serial":
        raise ValueError(
            f"--fleet counts serial readings, and reading.order is {rules.order}; "
            "leave --fleet out, or say --config.reading.order=serial"
        )
    return GroupTurns(
        chunk_size=rules.chunk_size,
        usual=reading.chunks // rules.passes * rules.chunk_size,
        passes=rules.passes,
        members=reading.members,
        together=math.gcd(reading.members, made.settings.slots),
        update=reading.update,
        answers=reading.answers,
    )


def rates(made: PlannedRun, chip: Chip, usual: PlayedDocument) -> Rates:
    """Returns the rates of one engine's chips; `usual` is what a plan's step is made of.

    So with such documents alone, learning takes a plan's seconds over the efficiencies.
    """
    settings, groups = made.settings, made.reading.groups
    launched = [program for program in made.programs if program.launches]
    facts = {fact.name: fact for fact in arithmetic.estimated(made, chip, launched)}
    full = made.rollout.decode_shape
    together = _seconds(facts[name_of(full)]) / settings.steps_per_launch
    alone = _alone(made, chip) / settings.steps_per_launch
    rows = (
        shapes.PrefixRow(shapes.prefix_widths(settings)[-1]),
        shapes.TailRow(shapes.tail_widths(settings)[-1]),
    )
    prefilling = [facts[name_of(row)] for row in rows]
    learning = [fact for fact in facts.values() if fact.phase == UPDATE]
    weights = made.residents[HANDOFF]["arriving weights"] * made.engine.size
    return Rates(
        slots=settings.slots,
        prefill=usual.prompts * math.ceil(groups / made.engines) / _of_a_step(prefilling),
        decode=alone,
        slot=max(0.0, together - alone) / full.slots,
        update=groups * usual.packed / _of_a_step(learning) / made.engines,
        handoff=4 * parameters.count(made.policy) / made.engine.size / chip.ici_bytes,
        publish=weights / UP,
        adopt=weights / DOWN,
        switch=weights / HOST,
    )


def _alone(made: PlannedRun, chip: Chip) -> float:
    """Seconds of a launch that decodes in one slot: weights are read, and little else."""
    name = name_of(shapes.decode_shape(made.settings, (1,)))
    return _seconds(arithmetic.estimated(made, chip, [_program(made, name)])[0])


def _program(made: PlannedRun, name: str) -> Program:
    (program,) = (one for one in made.programs if one.name == name)
    return program


def _of_a_step(facts: Sequence[Facts]) -> float:
    return sum(_seconds(fact) * fact.launches for fact in facts)


def _seconds(fact: Facts) -> float:
    """Of a launch, at the efficiencies that are assumed; links run beside."""
    return max(fact.compute_seconds / COMPUTE + fact.memory_seconds / HBM, fact.link_seconds)
