"""The workload of a training step: launches of each of its programs, from a config alone.

An upper bound, in the open: every document is `tasks.max_tokens` (or `data.tokens`) long, and no
longer than `tasks.curriculum` ever lets it be, every question, memory and answer is at its limit,
no draft is accepted, and no turn ends early; groups that a rollout replaces are not in it,
and local turns are as many as are expected. Rows of the update are packed by the packer that a
run uses, from these lengths; what different groups have in common (an instruction, a document
of several questions) is counted with each. Above: `lowering`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from notepad_jax import packing
from notepad_jax.engine import shapes
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.packing import RowPiece
from notepad_jax.setup import builders, curriculum, sizes
from notepad_jax.setup.config.whole import Training
from notepad_jax.setup.sizes import TurnSize
from notepad_jax.text.prompts import Template


@dataclasses.dataclass(frozen=True)
class RolloutWork:
    """The rollout of a step: its groups, readings, turns and tokens."""

    groups: int
    members: int  # readings of a group
    chunks: int  # of a document: as many update turns, then the answer's contexts
    update: TurnSize
    answers: tuple[TurnSize, ...]
    local_groups: int = 0  # of which an update turn is written again
    local_samples: int = 0  # times; each is answered from once

    @property
    def completion_tokens(self) -> int:
        """Tokens that one reading writes."""
        return self.chunks * self.update.completion + self.answer_tokens

    @property
    def answer_tokens(self) -> int:
        """Tokens of one reading's answer, all its contexts."""
        return sum(answer.completion for answer in self.answers)


@dataclasses.dataclass(frozen=True)
class RolloutLaunches:
    """Launches of one engine in a step, and what attention meets in one of them."""

    prefix_launches: float
    prefix_pairs: int  # visible (query, key) pairs of a row
    tail_launches: float
    tail_pairs: int
    decode_launches: float
    decode_shape: shapes.Decode
    shared: int  # cached tokens that the members of a decoding row read together
    private: float  # of a slot alone, on average


@dataclasses.dataclass(frozen=True)
class Update:
    """Launches of the trainer in a step."""

    optimizer_steps: int
    micro_batches: int  # of one optimizer step
    most: int  # trained tokens of the fullest device's rows
    pairs: int  # visible pairs of the fullest row
    rows: int  # of one optimizer step, without padding
    tokens: int  # in them
    computed: int  # tokens of one optimizer step's micro-batches, padding and all
    copies: float  # times that a shared prefix is written, in the mean over its tokens
    row_length: int
    rows_at_once: int  # of a micro-batch, on all devices

    @property
    def fill(self) -> float:
        """The share of computed tokens that are none of padding."""
        return self.tokens / self.computed


def readings(config: Training, template: Template) -> RolloutWork:
    """Returns the rollout of a step, every turn at its limits."""
    rules, local = builders.rules(config.reading), config.rollout.local
    turns = sizes.turns(template, rules)
    files = bool(config.tasks.files)
    document = (config.tasks.max_tokens if files else 0) or config.data.tokens
    groups = config.rollout.documents * (1 if files else config.data.questions)
    chunks = -(-document // config.reading.chunk_size)
    most = curriculum.parsed(config.tasks.curriculum).longest
    chunks = min(chunks, most or chunks)
    merged = 0 if rules.order == "serial" else chunks - 1  # each of two notes: there are no more
    return RolloutWork(
        groups=groups,
        members=config.rollout.group_size,
        chunks=rules.passes * (chunks + merged) + rules.again * (rules.passes - 1),
        update=turns.update,
        answers=turns.answers,
        local_groups=math.ceil(groups * local.share) if local.samples else 0,
        local_samples=local.samples,
    )


def rollout(
    reading: RolloutWork, settings: EngineSettings, engines: int, drafts: bool
) -> RolloutLaunches:
    """Returns the launches of one of `engines` engines that share the readings evenly."""
    groups = math.ceil(reading.groups / engines)
    slots = min(settings.slots, groups * reading.members)
    shape = shapes.decode_shape(settings, _groups_of(slots, reading.members))
    turn = reading.update
    width = shapes.prefix_widths(settings)[-1]
    fit = max(1, width // (settings.pages_for(turn.shared) * settings.page_size))
    tail = turn.private + (turn.completion if drafts else 0)
    tails = max(1, settings.row_tokens // tail)
    again, samples = math.ceil(reading.local_groups / engines), reading.local_samples

    def answered(readers: int) -> int:
        """Launches of the answers of so many that read together."""
        # Tails lie in a row behind one prefix: a reading that has its own is a launch of its own.
        return sum(readers if a.alone else math.ceil(readers / tails) for a in reading.answers)

    decoded = groups * reading.members * reading.completion_tokens
    decoded += again * samples * (turn.completion + reading.answer_tokens)
    return RolloutLaunches(
        prefix_launches=(groups * reading.chunks + again) / fit,
        prefix_pairs=fit * packing.triangle(turn.shared),
        tail_launches=groups * (reading.chunks * math.ceil(reading.members / tails))
        + groups * answered(reading.members)
        + again * (math.ceil(samples / tails) + answered(samples)),  # memories, and probes of them
        tail_pairs=tails * (tail * turn.shared + packing.triangle(tail)),
        decode_launches=decoded / slots / settings.steps_per_launch,
        decode_shape=shape,
        shared=turn.shared,
        private=turn.private + turn.completion / 2,
    )


def _groups_of(slots: int, members: int) -> tuple[int, ...]:
    whole, rest = divmod(slots, members)
    return (members,) * whole + ((rest,) if rest else ())


def update(
    reading: RolloutWork, row_length: int, rows: int, parts: int, minibatches: int, epochs: int
) -> Update:
    """Returns the optimizer steps of a rollout: `rows` a micro-batch, over `parts` of a mesh.

    Raises ValueError where a turn does not fit a row.
    """
    minibatches = min(minibatches, reading.groups)
    turns, prefixes, packed = _packed(reading, row_length, minibatches)
    written = sum(prefixes[piece.bundle] for row in packed for piece in row)
    micro_batches = math.ceil(len(packed) / rows)
    trained = [sum(turns[p.bundle].completion * (p.last - p.first) for p in row) for row in packed]
    return Update(
        optimizer_steps=minibatches * epochs,
        micro_batches=micro_batches,
        most=max(trained) * (rows // parts),
        pairs=max(sum(_pairs(turns[p.bundle], p) for p in row) for row in packed),
        rows=len(packed),
        tokens=sum(sum(_tokens(turns[p.bundle], p) for p in row) for row in packed),
        computed=micro_batches * rows * row_length,
        copies=written / max(1, sum(prefixes)),
        row_length=row_length,
        rows_at_once=rows,
    )


@functools.lru_cache(64)  # of a search: meshes and micro-batches ask for the same rows
def _packed(
    reading: RolloutWork, row_length: int, minibatches: int
) -> tuple[Sequence[TurnSize], Sequence[int], Sequence[Sequence[RowPiece]]]:
    """(the kind of turn of each bundle, its prefix's tokens, the pieces of each row)."""
    groups = math.ceil(reading.groups / minibatches)
    # What the contexts of one answer share is counted with each of them.
    answers = [TurnSize(0, a.prompt, a.completion) if a.alone else a for a in reading.answers]
    turns = [reading.update] * (groups * reading.chunks) + answers * groups
    prefixes = [turn.shared for turn in turns]
    # Turns that are written again lie behind the chunk that they are of, one of a group.
    again = math.ceil(reading.local_groups / minibatches)
    members = [reading.members + reading.local_samples * (k < again) for k in range(len(turns))]
    tails = [[t.private + t.completion] * n for t, n in zip(turns, members, strict=True)]
    common = [[t.common] * n for t, n in zip(turns, members, strict=True)]
    packed = packing.first_fit(prefixes, tails, row_length, common)
    return turns, prefixes, packed


def _tokens(turn: TurnSize, piece: RowPiece) -> int:
    tails, own = piece.last - piece.first, turn.private + turn.completion
    return turn.shared + tails * own - (tails - 1) * turn.common


def _pairs(turn: TurnSize, piece: RowPiece) -> int:
    def seen(tokens: int) -> int:
        return tokens * turn.shared + packing.triangle(tokens)

    tails, own = piece.last - piece.first, turn.private + turn.completion
    return packing.triangle(turn.shared) + tails * seen(own) - (tails - 1) * seen(turn.common)
