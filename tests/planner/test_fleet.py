"""The model of a fleet: what no sharing of chips may change, by hand, and the design's table."""

import dataclasses
import math
import random

import pytest

from notepad_jax.planner import fleet
from notepad_jax.planner.fleet import DRAINING, PINNED, RESIDENT, Mode
from notepad_jax.planner.fleet_engine import Engine, Lot, PlayedDocument, Rates

RATES = Rates(
    slots=8, prefill=100.0, decode=0.5, slot=0.25, update=50.0, handoff=3.0, publish=5.0,
    adopt=2.0, switch=1.0,
)  # fmt: skip
MODES = (
    Mode("as it is", 3, by_length=False),
    Mode("shares", 3),
    Mode("windows", 3, window=2),
    Mode("carried over", 3, lead=1),
    Mode("carried over, late", 3, lead=1, slack=1),
    Mode("ahead by two", 3, lead=2, slack=2),
    Mode("pinned", 2, 1.0, lead=1, adoption=PINNED),
    Mode("draining", 2, 1.5, lead=1, slack=1, adoption=DRAINING),
    *(Mode(f"resident {s}", 2, 1.0, lead=1, slack=s, adoption=RESIDENT) for s in (0, 1, 2)),
)
BATCH, STEPS = 6, 8
any_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def drawn(seed, count=BATCH * (STEPS + 5), most=12, shared=40):
    """Documents of uneven lengths, with groups of four."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        turns = rng.randint(1, most)
        lots = tuple(
            Lot(2, (5,) * turns, tuple(rng.randint(1, 9) for _ in range(turns))) for _ in range(2)
        )
        found.append(PlayedDocument((shared,) * turns, lots, packed=turns * 60))
    return found


def played(mode, rates=RATES, seed=0, first=0, **how):
    documents = drawn(seed, **how)[: fleet.needed(mode, BATCH, STEPS)]
    return fleet.simulate(documents, mode, rates, BATCH, STEPS, first)


# ---------------------------------------------------------------- what holds of every mode


@any_mode
def test_the_same_documents_give_the_same_outcome(mode):
    assert played(mode) == played(mode)
    assert played(mode, seed=1) != played(mode)


@any_mode
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_older_than_lead_and_slack_and_all_is_learnt_once(mode, seed):
    outcome = played(mode, seed=seed)
    assert sum(outcome.ages.values()) == BATCH * STEPS
    assert 0 <= min(outcome.ages) and max(outcome.ages) <= mode.lead + mode.slack


@pytest.mark.parametrize("seed", range(3))
def test_work_is_conserved(seed):
    """Without a fixed cost of a step and shared prefixes no schedule can save a second."""
    rates = dataclasses.replace(RATES, decode=0.0)
    how = dict(seed=seed, shared=0)
    whole = drawn(**how)
    reference = played(MODES[0], rates, **how)
    assert reference.busy == pytest.approx(reference.least)
    for mode in MODES:
        outcome = played(mode, rates, **how)
        learnt = outcome.packed / rates.update
        begun = sum(map(rates.least, whole[: fleet.needed(mode, BATCH, STEPS)]))
        # What was learnt from was read, and no more than was drawn.
        assert outcome.least <= outcome.busy + 1e-6 <= begun + learnt + 2e-6, mode.name
        if not mode.slack:
            assert (outcome.turns, outcome.packed) == (reference.turns, reference.packed)
            assert outcome.least == pytest.approx(reference.least)
        if not mode.lead:
            assert outcome.busy == pytest.approx(reference.busy)


@any_mode
@pytest.mark.parametrize("seed", range(3))
def test_no_mode_is_faster_than_chips_that_are_never_idle(mode, seed):
    reference, outcome = played(MODES[0], seed=seed), played(mode, seed=seed)
    assert outcome.least <= outcome.whole * mode.engines
    idle = 1 - reference.least / (reference.whole * MODES[0].engines)
    speed = reference.whole * MODES[0].engines / (outcome.whole * mode.engines)
    assert speed * outcome.least / reference.least <= 1 / (1 - idle) + 1e-9


def test_a_stream_is_dealt_within_its_windows():
    documents = drawn(0, count=24)
    as_it_is, shares, windows = (fleet.arranged(documents, mode, 4) for mode in MODES[:3])
    assert as_it_is == documents
    for first in range(0, 24, 4):
        lengths = [one.length for one in shares[first : first + 4]]
        assert lengths == sorted(lengths, reverse=True)
        assert sorted(map(id, shares[first : first + 4])) == sorted(
            map(id, documents[first : first + 4])
        )
    for first in range(0, 24, 8):
        window = windows[first : first + 8]
        assert sorted(map(id, window)) == sorted(map(id, documents[first : first + 8]))
        assert max(one.length for one in window[:4]) <= min(one.length for one in window[4:])


def test_a_short_stream_is_refused():
    with pytest.raises(ValueError, match="5 documents are fewer than the 48"):
        fleet.simulate(drawn(0, count=5), MODES[0], RATES, BATCH, STEPS)


# ---------------------------------------------------------------- by hand


def one(readings):
    """Two chunks of 100 tokens and an answer."""
    return PlayedDocument((100, 100, 0), (Lot(readings, (10, 20, 30), (8, 4, 2)),), packed=500)


@pytest.mark.parametrize("readings", [1, 4])
def test_one_document_on_one_engine_takes_the_sum_of_its_turns(readings):
    read = (200 + 60 * readings) / 100 + (8 + 4 + 2) * (0.5 + 0.25 * readings)
    learnt, steps = 500 / 50, 3
    outcome = fleet.simulate([one(readings)] * steps, Mode("as it is", 1), RATES, 1, steps, 1)
    assert outcome.seconds == pytest.approx(read + learnt + 3.0)  # and the hand-off
    assert outcome.whole == pytest.approx(steps * (read + learnt) + (steps - 1) * 3.0)
    assert outcome.learning == pytest.approx(learnt)
    assert outcome.busy == pytest.approx(steps * (read + learnt))


def test_readings_wait_for_slots():
    """Eight slots for sixteen readings: two rounds of each turn, and the prefix once."""
    document = PlayedDocument((100,), (Lot(8, (10,), (4,)),) * 2, packed=500)
    outcome = fleet.simulate([document] * 2, Mode("as it is", 1), RATES, 1, 2, 0)
    read = (100 + 160) / 100 + 2 * 4 * (0.5 + 0.25 * 8)
    assert outcome.whole == pytest.approx(2 * (read + 10.0) + 3.0)


@pytest.mark.parametrize("newer", [False, True])
def test_a_prefix_is_prefilled_once_by_each_version(newer):
    """Two readings after one another in the one slot, 4 steps of 0.75 s each."""
    document = PlayedDocument((100,), (Lot(1, (10,), (4,)),) * 2, packed=500)
    rates = dataclasses.replace(RATES, slots=1)
    engine = Engine(rates, [document], draining=False)
    engine.take([0])
    engine.go_on(0.0)
    assert engine.ends == pytest.approx(1.1 + 3.0) and engine.load == 2
    assert engine.end_turn() == (0, 0, True)
    engine.coming = 1 if newer else None
    engine.go_on(engine.clock)
    again = 1.1 if newer else 0.1
    assert engine.ends == pytest.approx(4.1 + again + 3.0)
    assert engine.end_turn() == (0, int(newer), True)
    assert engine.busy == engine.clock and engine.load == 0


def test_an_engine_that_drains_begins_nothing_and_stands_still_for_its_weights():
    document = PlayedDocument((100, 0), (Lot(1, (10, 10), (4, 4)),), packed=500)
    engine = Engine(RATES, [document], draining=True)
    engine.take([0])
    engine.go_on(0.0)
    engine.coming = 1
    engine.go_on(2.0)
    assert (engine.version, engine.taken) == (0, 1)
    assert engine.end_turn() == (0, 0, False)
    engine.go_on(engine.clock)
    assert (engine.version, engine.coming) == (1, None)
    assert engine.ends == pytest.approx(4.1 + 2.0 + 0.1 + 3.0)


def test_apart_the_slower_side_decides():
    """Reading takes 13.1 s; learning 40 s on a quarter of the chips, or 2.5 s on four times."""
    read = 2.6 + 14 * 0.75
    for adoption, stall in ((PINNED, 1.0), (RESIDENT, 0.0), (DRAINING, 2.0)):
        documents = [one(1)] * 20
        slow = Mode("slow trainer", 1, 0.25, lead=1, adoption=adoption)
        assert fleet.simulate(documents, slow, RATES, 1, 12, 4).seconds == pytest.approx(40.0)
        quick = Mode("quick trainer", 1, 4.0, lead=1, adoption=adoption)
        took = fleet.simulate(documents, quick, RATES, 1, 12, 4).seconds
        assert read <= took <= read + stall + 1.2  # a prefix again, by a newer version


def test_without_lead_readers_wait_for_the_newest_version():
    mode = Mode("in turn", 1, 1.0, adoption=PINNED)
    outcome = fleet.simulate([one(1)] * 4, mode, RATES, 1, 4, 1)
    assert outcome.seconds == pytest.approx(2.6 + 14 * 0.75 + 10.0 + 5.0 + 1.0)
    assert outcome.ages == {0: 4}


# ---------------------------------------------------------------- the design's table


HARDWARE = {  # prefill tokens/s, decoding step, slot, update tokens/s: of a host of four chips
    "v5p": (60_000, 0.0023, 13e-6, 9_000),
    "v6e": (80_000, 0.0039, 22e-6, 14_000),
    "light": (80_000, 0.0039, 22e-6, 56_000),
}
AS_IT_IS = Mode("as it is", 8, by_length=False)
APART = {chips: Mode(f"4:{chips:g}", 4, chips, lead=1) for chips in (8.0, 4.0, 2.0)}
live = lambda chips, slack: dataclasses.replace(APART[chips], slack=slack)  # noqa: E731
TABLE = {  # seconds as it is, then speeds per chip
    "v6e mixed": (145, {
        Mode("shares", 8): 1.03, Mode("4", 8, window=4): 1.24, Mode("carried", 8, lead=1): 1.20,
        dataclasses.replace(APART[8.0], adoption=PINNED): 1.10, live(8.0, 2): 1.12,
        live(4.0, 1): 0.97,
    }),
    "light mixed": (89, {
        Mode("4", 8, window=4): 1.46, live(8.0, 1): 0.96, live(4.0, 1): 1.33, live(2.0, 2): 1.37,
    }),
    "v5p equal": (151, {Mode("4", 8, window=4): 1.00, live(8.0, 1): 0.84}),
    "v5p heavy": (271, {Mode("4", 8, window=4): 1.43, live(4.0, 2): 1.11}),
    "light heavy": (242, {Mode("2", 8, window=2): 1.43, live(4.0, 0): 1.66, live(4.0, 2): 2.62}),
}  # fmt: skip


def as_designed(kind, ordinal):
    """A document of the design's simulation: chunks of 5,200, memories of 400 on average."""
    rng = random.Random(f"{kind}{ordinal}0")
    if kind == "equal":
        chunks = 7
    elif kind == "mixed":
        chunks = math.ceil(math.exp(rng.uniform(math.log(2_000), math.log(128_000))) / 5000)
    else:
        chunks = max(1, min(200, round(1.9 * rng.paretovariate(1.3))))
    rng, lots, packed = random.Random(f"t{kind}{ordinal}0"), [], chunks * 5200
    for _ in range(16):
        drawn = [rng.lognormvariate(math.log(400) - 0.7**2 / 2, 0.7) for _ in range(chunks)]
        memories = [max(8, min(1024, round(memory))) for memory in drawn]
        private = (60, *(60 + memory for memory in memories))
        lots.append(Lot(1, private, (*memories, 60)))
        packed += 2 * sum(memories) + 60 * (chunks + 1) + 60 + 300
    return PlayedDocument((5200,) * chunks + (0,), tuple(lots), packed)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row == "v6e mixed" else pytest.mark.slow) for row in TABLE],
)
def test_the_table_of_the_design(row):
    """Within 2%, seconds and speeds, over the same documents.

    Its rows with draining are not here: there a whole cohort went to the engine that drained first,
    which is what no fleet would do (v6e mixed at 1:2: .89 there, 1.07 here).
    """
    chip, kind = row.split()
    prefill, decode, slot, update = HARDWARE[chip]
    rates = Rates(256, prefill, decode, slot, update, 3.0, 12.0, 6.0, 1.0)
    documents = [as_designed(kind, ordinal) for ordinal in range(64 * 16)]
    seconds, speeds = TABLE[row]
    base = fleet.simulate(documents, AS_IT_IS, rates, 64)
    assert base.seconds == pytest.approx(seconds, rel=0.02)
    for mode, speed in speeds.items():
        took = fleet.simulate(documents, mode, rates, 64)
        found = base.seconds * 8 / (took.seconds * mode.engines)
        assert found == pytest.approx(speed, rel=0.02), mode.name
