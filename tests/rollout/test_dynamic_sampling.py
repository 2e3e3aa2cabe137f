"""Dynamic sampling and the ledger: what is drawn, what waits, and every draw settled once."""

import asyncio
import collections
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.rollout.collector import Failed
from notepad_jax.rollout.dynamic_sampling import Wanted, collect_informative, without_update
from notepad_jax.rollout.groups import GroupStats
from notepad_jax.rollout.ledger import Ledger, Outcome, Waiting
from notepad_jax.rollout.task_sampler import Drawn
from tests.rollout.made import group, task

DULL, GOOD, BROKEN = "dull", "good", "broken"


def sampler(kind_of, questions=1, version=0, asked=None):
    """Reads draws: question q of draw o becomes a group of `kind_of(o, q)`."""

    async def collect(ordinals):
        if asked is not None:
            asked.append(list(ordinals))
        places = [(o, q) for o in ordinals for q in range(questions)]
        kinds = [(place, kind_of(*place)) for place in places]
        rewards = {DULL: (1, 1), GOOD: (0, 1)}
        groups = [
            group(*rewards[kind], name=str(place), place=place, versions=(version, version))
            for place, kind in kinds
            if kind is not BROKEN
        ]
        failed = [Failed(task(), *p, 0, OSError("gone")) for p, k in kinds if k is BROKEN]
        return groups, failed

    return collect


def roll(ledger, kinds, wanted, now=0, questions=1, asked=None):
    """One step; `kinds` says of every (ordinal, question) what it becomes."""
    collect = sampler(lambda o, q: kinds[o % len(kinds)], questions, now, asked)
    return asyncio.run(collect_informative(ledger, collect, wanted, now))


def wanted(documents=4, questions=1, max_rounds=1, max_staleness=0):
    return Wanted(documents, questions, max_rounds, max_staleness)


def places(groups):
    return [one.place for one in groups]


def test_what_is_missing_is_drawn_and_not_a_whole_round():
    """19 of 20 were informative: another 20 were drawn for one, and the rate fell to half."""
    asked = []
    kinds = [DULL] + [GOOD] * 19
    rollout = roll(Ledger(), kinds, wanted(20, max_rounds=3), asked=asked)
    assert list(map(len, asked)) == [20, 2]  # ceil(1 * 20 / 19) = 2; ordinal 20 is dull again
    assert places(rollout.batch) == [(o, 0) for o in range(1, 20)] + [(21, 0)]
    assert rollout.share == pytest.approx(20 / 22) and rollout.ledger.next == 22
    assert rollout.stats.groups_informative == 20 and not rollout.ledger.waiting


def test_draws_follow_the_measured_share():
    half = GroupStats(groups_sampled=8, groups_informative=4)
    assert wanted(8).draws(4, GroupStats()) == 4 and wanted(8, 4).draws(5, GroupStats()) == 2
    assert wanted(8).draws(3, half) == 6 and wanted(8, 4).draws(3, half) == 2
    assert wanted(8).draws(5, half) == 8  # no round is larger than the first
    assert wanted(8).draws(1, GroupStats(groups_sampled=8)) == 8  # none was: nothing is known
    third = GroupStats(groups_sampled=9, groups_informative=3)
    assert wanted(99).draws(2, third) == 6


def test_one_round_replaces_nothing():
    rollout = roll(Ledger(), [GOOD, DULL, DULL, GOOD], wanted(4))
    assert places(rollout.batch) == [(0, 0), (3, 0)] and rollout.share == 0.5
    assert rollout.ledger.settled == {
        Outcome.TRAINED: 2, Outcome.UNINFORMATIVE: 2, Outcome.FAILED: 0, Outcome.STALE: 0
    }  # fmt: skip


def test_rounds_are_bounded_and_a_batch_may_be_empty():
    rollout = roll(Ledger(), [DULL], wanted(2, max_rounds=3))
    assert rollout.batch == [] and rollout.share == 0.0
    assert rollout.stats.rounds == 3 and rollout.ledger.next == 6


def test_surplus_waits_within_the_bound():
    """It was dropped and counted, and drawn documents were read for nothing."""
    kinds = [DULL, GOOD, GOOD, GOOD]  # 6 of 8 questions; two missing; one more document: 4
    loose = wanted(2, questions=4, max_rounds=2, max_staleness=1)
    first = roll(Ledger(), kinds, loose, now=5, questions=4)
    # ordinals 0 and 1: 0 is dull; 4 good; 4 missing at a share of 1/2: two documents, both good
    assert places(first.batch) == [(1, q) for q in range(4)] + [(2, q) for q in range(4)]
    assert places(one.group for one in first.ledger.waiting) == [(3, q) for q in range(4)]
    assert [one.share for one in first.ledger.waiting] == [3 / 4] * 4
    asked = []
    second = roll(first.ledger, kinds, loose, now=6, questions=4, asked=asked)
    # Four wait, so one document is missing; ordinal 4 is dull, and then 5 is good.
    assert asked[0] == [4] and places(second.batch)[:4] == [(3, q) for q in range(4)]
    # Each that waited stands for 4/3 groups sampled, the others for 2 each.
    tail = places(second.batch)[4:]
    assert second.share == pytest.approx((4 + len(tail)) / (4 * 4 / 3 + len(tail) * 12 / 8))
    strict = roll(Ledger(), kinds, dataclasses.replace(loose, max_staleness=0), 5, 4)
    assert not strict.ledger.waiting and strict.ledger.settled[Outcome.STALE] == 4
    assert strict.share == first.share == pytest.approx(12 / 16)


def test_a_group_is_as_old_as_its_oldest_turn():
    mixed = group(0, 1, place=(0, 0), versions=(5, 7))
    ledger = Ledger(1, 1, {}, (Waiting(mixed, 1.0),))
    assert places(roll(ledger, [DULL], wanted(1, max_staleness=2), now=7).batch) == [(0, 0)]
    late = roll(ledger, [DULL], wanted(1, max_staleness=2), now=8)
    assert late.batch == [] and late.settled[Outcome.STALE] == [(0, 0)]
    with pytest.raises(ValueError, match="version 5, which is newer than the learner's 4"):
        roll(ledger, [DULL], wanted(1), now=4)


def test_failed_groups_are_settled_by_name_and_replaced():
    rollout = roll(Ledger(), [BROKEN, GOOD, GOOD, BROKEN], wanted(2, max_rounds=2))
    assert places(rollout.batch) == [(1, 0), (2, 0)]
    assert rollout.settled[Outcome.FAILED] == [(0, 0), (3, 0)] == places(rollout.failed)


def test_a_step_that_learnt_nothing_settles_its_batch_as_skipped():
    before = Ledger()
    rollout = without_update(roll(before, [GOOD], wanted(2)), before)
    assert rollout.ledger.settled[Outcome.SKIPPED] == 2
    assert rollout.ledger.settled.get(Outcome.TRAINED, 0) == 0


def test_accounts_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="does not add up"):
        Ledger(1, 2, {Outcome.TRAINED: 1})
    ledger = Ledger(1, 1, {}, (Waiting(group(0, 1, place=(0, 0)), 1.0),))
    with pytest.raises(ValueError, match="settled twice, or one that waited was forgotten"):
        ledger.after(2, {Outcome.TRAINED: [(1, 0)]}, ())
    with pytest.raises(ValueError, match="settled twice"):
        ledger.after(1, {Outcome.TRAINED: [(0, 0)], Outcome.STALE: [(0, 0)]}, ())
    with pytest.raises(ValueError, match="the draws 1 to 2 are not those"):
        ledger.after(3, {Outcome.TRAINED: [(0, 0), (2, 0)]}, ())


def test_draws_that_end_in_any_order_are_settled_once_and_the_rest_is_named():
    """Two a step of 0, 1, 2, 3: chosen as readers ended, then by turns from what is left."""
    kinds = sampler(lambda o, q: [GOOD, DULL, BROKEN][o % 3])
    first = asyncio.run(
        collect_informative(Ledger(), kinds, wanted(2), 0, chosen=Drawn([1, 3], {}, 4, (0, 2)))
    )
    assert (first.ledger.next, first.ledger.out, first.ledger.groups) == (4, (0, 2), 2)
    assert [first.ledger.has(o) for o in range(5)] == [False, True, False, True, False]
    missed = without_update(first, Ledger()).ledger
    assert (missed.out, missed.settled[Outcome.SKIPPED]) == ((0, 2), 1)
    asked = []
    rest = roll(first.ledger, [GOOD, DULL, BROKEN], wanted(3), asked=asked)
    assert asked == [[0, 2, 4]]  # without readers apart: what they had not ended comes first
    assert (rest.ledger.next, rest.ledger.out, rest.ledger.groups) == (5, (), 5)
    with pytest.raises(ValueError, match="are not those that were settled"):
        first.ledger.after(4, {Outcome.TRAINED: [(0, 0)]}, (), ())  # and 2?
    with pytest.raises(ValueError, match="are not those that were settled"):
        first.ledger.after(4, {Outcome.TRAINED: [(0, 0), (2, 0)]}, (), (5,))


def test_nonsense_is_refused():
    for name in ("documents", "questions", "max_rounds"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            dataclasses.replace(wanted(), **{name: 0})
    with pytest.raises(ValueError, match="max_staleness is -1"):
        wanted(max_staleness=-1)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([GOOD, GOOD, DULL, BROKEN]), min_size=1, max_size=11),
    documents=st.integers(1, 5),
    questions=st.integers(1, 3),
    rounds=st.integers(1, 4),
    staleness=st.integers(0, 3),
    every=st.integers(1, 3),
    course=st.lists(st.sampled_from(["step", "step", "step", "skip", "kill"]), max_size=25),
)
def test_every_ordinal_is_settled_exactly_once(
    kinds, documents, questions, rounds, staleness, every, course
):
    """Over interruptions, epochs (`kinds` repeats) and shares of informative groups.

    A kill goes back to the last committed account, with what was settled up to there.
    """
    asks = wanted(documents, questions, rounds, staleness)
    now, ledger, became = 0, Ledger(), {}
    committed = (now, ledger, became)
    for event in course:
        if event == "kill":
            now, ledger, became = committed
            continue
        rollout = roll(ledger, kinds, asks, now, questions)
        if event == "skip":
            rollout = without_update(rollout, ledger)
        became = dict(became)
        for outcome, group_places in rollout.settled.items():
            for place in group_places:
                assert place not in became
                became[place] = outcome
        assert len(rollout.batch) <= asks.groups
        assert all(now - one.oldest_version <= staleness for one in rollout.batch)
        now, ledger = now + 1, rollout.ledger
        if now % every == 0:
            committed = (now, ledger, became)
        waiting = {one.group.place for one in ledger.waiting}
        everything = {(o, q) for o in range(ledger.next) for q in range(questions)}
        assert set(became) | waiting == everything and not set(became) & waiting
        assert collections.Counter(became.values()) == {
            k: n for k, n in ledger.settled.items() if n
        }
        assert ledger.groups == ledger.next * questions


@pytest.mark.parametrize(("imitates", "learnt"), [(False, [1]), (True, [0, 1])])
def test_what_is_imitated_needs_no_contrast(imitates, learnt):
    async def collect(ordinals):
        rewards = ((1.0, 1.0), (1.0, 0.0), (0.0, 0.0))
        return [group(*rewards[o], place=(o, 0)) for o in ordinals], []

    how = Wanted(3, 1, 1, 0, imitates=imitates)
    rollout = asyncio.run(collect_informative(Ledger(), collect, how, 0))
    assert [group.ordinal for group in rollout.batch] == learnt
    assert rollout.stats.groups_informative == len(learnt)
    assert rollout.stats.dropped_all_right == 2 - len(learnt)
