"""The latency of one document on an engine of a slice, read serially and in parallel rounds.

By arithmetic alone, at the limits: every turn writes all it may, and every chunk of a round a note,
so what is merged is the most there can be (`reading.rounds`). A serial turn has a launch to itself,
in which every weight is read for one token; turns of a round fill the engine's rows and slots. A
further round computes no chunk again where the cache holds the keys and values of all of them, and
everything where it does not. Above: plan; below: arithmetic and workload.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from notepad_jax.engine import executor, shapes
from notepad_jax.planner import arithmetic
from notepad_jax.planner.chips import Chip
from notepad_jax.planner.lowering import PlannedRun, name_of

LENGTHS = (2**17, 2**20, 3_500_000)  # tokens


@dataclasses.dataclass(frozen=True)
class DocumentTime:
    """The latency of one document on one engine. Seconds are at least, of turns at their limits."""

    tokens: int
    chunks: int
    keys: int  # bytes of a device that its keys and values take
    kept: bool  # whether the cache has room for them
    serial: float  # seconds
    parallel: float  # seconds of the first round
    again: float  # seconds of each further round
    chain: int  # turns after one another in a round; serially, as many as there are chunks


def documents(made: PlannedRun, chip: Chip) -> tuple[DocumentTime, ...]:
    """Returns the figures of documents of `LENGTHS`, read in the chunks of training."""
    costs = _costs(made, chip)
    return tuple(_document(tokens, made, costs) for tokens in LENGTHS)


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Seconds of one turn."""

    chunk: float  # of reading its chunk, alone or beside others
    alone: float  # of the rest of it, in launches of its own
    together: float  # of the rest of it, in launches that are full


def _costs(made: PlannedRun, chip: Chip) -> _Costs:
    settings, turn = made.settings, made.reading.update
    width = shapes.prefix_widths(settings)[-1]
    fit = max(1, width // (settings.pages_for(turn.shared) * settings.page_size))
    tails = shapes.tail_widths(settings)
    narrow = min((w for w in tails if w >= turn.private), default=tails[-1])
    abreast = max(1, tails[-1] // turn.private)
    one = shapes.decode_shape(settings, (1,))
    many = shapes.decode_shape(settings, (1,) * settings.slots)
    launches = turn.completion / settings.steps_per_launch

    def seconds(shape: shapes.Shape) -> float:
        (program,) = (p for p in made.programs if p.name == name_of(shape))
        return arithmetic.estimated(made, chip, [program])[0].seconds

    return _Costs(
        chunk=seconds(shapes.PrefixRow(width)) / fit,
        alone=seconds(shapes.TailRow(narrow)) + launches * seconds(one),
        together=seconds(shapes.TailRow(tails[-1])) / abreast
        + launches * seconds(many) / settings.slots,
    )


def _document(tokens: int, made: PlannedRun, costs: _Costs) -> DocumentTime:
    settings = made.settings
    chunks = math.ceil(tokens / made.rules.chunk_size)
    pages = chunks * settings.pages_for(made.reading.update.shared)
    page = executor.cache_bytes(made.policy, settings, made.engine) // settings.pages
    kept = pages <= settings.pages
    merging = list(_levels(chunks, max(2, made.rules.chunk_size // made.rules.max_memory)))
    merged = sum(merging) * (costs.chunk + costs.together)
    return DocumentTime(
        tokens=tokens,
        chunks=chunks,
        keys=pages * page,
        kept=kept,
        serial=chunks * (costs.chunk + costs.alone),
        parallel=chunks * (costs.chunk + costs.together) + merged,
        again=chunks * (costs.together + (0 if kept else costs.chunk)) + merged,
        chain=1 + len(merging),
    )


def _levels(notes: int, fan: int) -> Iterator[int]:
    """Yields the turns of each level that merges, `fan` notes a turn."""
    while notes > 1:
        notes = math.ceil(notes / fan)
        yield notes
