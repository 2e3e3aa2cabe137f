"""`notepad-jax plan --fleet`: the fastest sharing of chips between rollout and training.

What is compared: a config as it is, the same chips with what length alone allows, documents carried
over on the same chips, and trainer and readers apart, at one split or several. All read the same
documents, and what counts is speed per chip. Above: `plan`'s command and `plan_table`; below:
`fleet` plays a mode, `fleet_rates` says what chips do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from notepad_jax.planner import cost_analysis, fleet, fleet_lengths, fleet_rates
from notepad_jax.planner.fleet import DRAINING, PINNED, Mode, ModeResult
from notepad_jax.planner.fleet_engine import PlayedDocument, Rates
from notepad_jax.setup.config.whole import Training

ALL = "all"
USUAL_SPLITS = ((1, 4), (1, 2), (1, 1), (2, 1))  # of chips, readers to trainer
STEPS, FIRST = 20, 4  # played; the first ones begin with nothing read and are not in the mean
SEED = 0
TIE = 0.02  # of a speed, as other draws would move it: the simpler one wins
MOST_EVENTS = 2_000_000  # turns of lots in a mode, a minute of a core

Split = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class PlayedMode:
    """A mode and its simulated result."""

    mode: Mode
    outcome: ModeResult
    chips: float
    speed: float  # per chip, in that of documents dealt by turns


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of all modes of one config on one slice, by speed per chip."""

    lengths: str  # of the documents, in words
    turns: float  # of a reading, in the mean
    batch: int  # documents a step
    engine_chips: float
    rates: Rates
    rows: tuple[PlayedMode, ...]  # the first: by turns
    full: float  # speed per chip, were every chip busy and every slot taken (over all steps)
    fastest: PlayedMode
    verdict: str

    @property
    def told(self) -> Mapping[str, object]:
        """The values that `--json` prints."""
        return dataclasses.asdict(self) | {"second_slice_pays": self.fastest.mode.apart}


def splits(text: str) -> tuple[Split, ...]:
    """Returns the splits that `--fleet` names. Raises ValueError for what is none."""
    if text == ALL:
        return USUAL_SPLITS
    if not re.fullmatch(r"[1-9]\d{0,3}:[1-9]\d{0,3}", text):
        raise ValueError(
            f"--fleet {text!r} is no split: write chips of readers to chips of the trainer in "
            f"whole numbers from 1 to 9999, as 1:2, or {ALL}"
        )
    readers, trainer = text.split(":")
    return ((int(readers), int(trainer)),)


def modes(engines: int, parts: Sequence[Split]) -> Iterator[Mode]:
    """Yields the modes to compare; the second is what `train` does, the first is the baseline.

    Apart, readers are half of the slice's engines, and the trainer has chips in proportion.
    """
    yield Mode("by turns", engines, by_length=False)
    yield Mode("as it is, by length", engines)
    yield Mode("windows of 2 steps", engines, window=2)
    yield Mode("windows of 4 steps", engines, window=4)
    yield Mode("carried over, S=0", engines, lead=1)
    yield Mode("carried over, S=1", engines, lead=1, slack=1)
    half = max(1, engines // 2)
    for readers, trainer in parts:
        split, chips = f"{readers}:{trainer}", half * trainer / readers
        yield Mode(f"{split} pinned, S=0", half, chips, lead=1, adoption=PINNED)
        yield Mode(f"{split} draining, S=1", half, chips, lead=1, slack=1, adoption=DRAINING)
        for slack in (0, 1, 2):
            yield Mode(f"{split} resident, S={slack}", half, chips, lead=1, slack=slack)


@dataclasses.dataclass(frozen=True)
class Unplayed:
    """The input of a comparison, drawn and counted; not yet simulated."""

    lengths: str  # of the documents, in words
    stream: Sequence[PlayedDocument]
    modes: tuple[Mode, ...]
    rates: Rates
    batch: int  # documents a step
    engine_chips: float


def asked(config: Training, slice_name: str, parts: Sequence[Split], form: str | None) -> Unplayed:
    """Returns the input of `compare` for `config` on a slice as "v5p:2x4x4", by arithmetic alone.

    `form` says how long documents are (`fleet_lengths.lengths`). Raises ValueError for a form that
    is none, documents that are too many turns to play, and readings that are not serial.
    """
    source = cost_analysis.ProgramSource(config, slice_name)
    made = source.sketch()
    reader, batch = fleet_rates.reader(made), made.reading.groups
    every = tuple(modes(made.engines, parts))
    most = max(fleet.needed(mode, batch, STEPS) for mode in every)
    return Unplayed(
        lengths=fleet_lengths.words(form, reader.usual),
        stream=_stream(reader, fleet_lengths.lengths(form, reader.usual), most),
        modes=every,
        rates=fleet_rates.rates(made, source.chip, reader.document(reader.usual)),
        batch=batch,
        engine_chips=made.devices / made.engines,
    )


def compare(what: Unplayed) -> Comparison:
    """Simulates every mode over the same documents."""
    base, *others = (_played(what, mode) for mode in what.modes)
    first = what.modes[0]
    rows = tuple(
        PlayedMode(
            mode=mode,
            outcome=outcome,
            chips=what.engine_chips * mode.engines,
            speed=base.seconds * first.engines / (outcome.seconds * mode.engines),
        )
        for mode, outcome in zip(what.modes, (base, *others), strict=True)
    )
    return Comparison(
        lengths=what.lengths,
        turns=float(np.mean([len(one.shared) for one in what.stream])),
        batch=what.batch,
        engine_chips=what.engine_chips,
        rates=what.rates,
        rows=rows,
        full=base.whole * first.engines / base.least,
        fastest=_first_of_fastest(rows),
        verdict=verdict(rows),
    )


def _stream(
    reader: fleet_rates.GroupTurns, draw: fleet_lengths.Draw, count: int
) -> Sequence[PlayedDocument]:
    tokens = [int(one) for one in draw(np.random.default_rng(SEED), count)]
    events = sum(map(reader.turns, tokens)) * reader.members // reader.together
    if events > MOST_EVENTS:
        raise ValueError(
            f"{count} documents have {events:,} turns to play, and {MOST_EVENTS:,} are possible; "
            "lower --lengths or rollout.documents, or raise reading.chunk_size"
        )
    documents = {one: reader.document(one) for one in set(tokens)}
    return [documents[one] for one in tokens]


def _played(what: Unplayed, mode: Mode) -> ModeResult:
    return fleet.simulate(what.stream, mode, what.rates, what.batch, STEPS, FIRST)


def _first_of_fastest(rows: Sequence[PlayedMode]) -> PlayedMode:
    most = max(row.speed for row in rows)
    return next(row for row in rows if row.speed >= most * (1 - TIE))


def verdict(rows: Sequence[PlayedMode]) -> str:
    """Returns which mode is fastest per chip, and whether a second slice pays, in a sentence.

    Modes are told apart where they are by more than `TIE`.
    """
    together = _first_of_fastest([row for row in rows if not row.mode.apart])
    apart = _first_of_fastest([row for row in rows if row.mode.apart])
    pays = _first_of_fastest(rows).mode.apart
    fastest = f"fastest per chip: {_said(apart if pays else together)}"
    if pays:
        return f"{fastest}; a second slice pays: on one alone it is {_said(together)}"
    return (
        f"{fastest}; a second slice does not pay: it would have to beat that, and the best split "
        f"is {_said(apart)}"
    )


def _said(row: PlayedMode) -> str:
    return f"{row.mode.name}, x{row.speed:.2f}"
