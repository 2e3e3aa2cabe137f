"""Draws that are passed over: kinds of which a batch wants no more, and tasks that are retired."""

import asyncio
import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.rollout import task_sampler
from notepad_jax.rollout.dynamic_sampling import Wanted, collect_informative, without_update
from notepad_jax.rollout.ledger import Ledger, Outcome
from notepad_jax.rollout.task_sampler import ANY, EVERY, Stream
from tests.rollout.test_dynamic_sampling import DULL, GOOD, places, sampler


def stream(kinds="ab", retired=()):
    """Ordinal o is of kind `kinds[o % len(kinds)]`."""
    return Stream(lambda o: kinds[o % len(kinds)], lambda o: o in retired)


def roll(ledger, becomes, wanted, of, now=0):
    return asyncio.run(collect_informative(ledger, sampler(becomes, version=now), wanted, now, of))


def test_where_nothing_is_passed_over_ordinals_are_read_in_order():
    found = task_sampler.draw(7, {ANY: 3}, EVERY, 2)
    assert (found.read, found.passed, found.next) == ([7, 8, 9], {}, 10)
    found = task_sampler.draw(7, {ANY: 3}, EVERY, 2, [2, 5])
    assert (found.read, found.next, found.out) == ([2, 5, 7], 8, ())
    found = task_sampler.draw(7, {ANY: 1}, EVERY, 2, [2, 5])
    assert (found.read, found.next, found.out) == ([2], 7, (5,))


def test_draws_by_hand():
    """a b a b ...; one more of a and two of b, and the first b is retired."""
    found = task_sampler.draw(4, {"a": 1, "b": 2}, stream(retired={5}), 1)
    assert found.read == [4, 7, 9] and found.next == 10
    assert found.passed == {Outcome.RETIRED: [(5, 0)], Outcome.NO_ROOM: [(6, 0), (8, 0)]}


def test_a_kind_whose_groups_teach_nothing_leaves_no_room_to_others():
    """Dynamic sampling alone fills the batch with what is informative: four of a."""
    becomes = lambda o, q: GOOD if o % 2 == 0 or o in (5, 7, 9) else DULL  # noqa: E731
    free = roll(Ledger(), becomes, Wanted(4, 1, 3, 0), stream())
    assert collections.Counter(o % 2 for o, _ in places(free.batch)) == {0: 3, 1: 1}
    even = roll(Ledger(), becomes, Wanted(4, 1, 3, 0, ("a", "b")), stream())
    # 0, 2 of a; 1 and 3 of b are dull: two more of b are 5 and 7, and 4 and 6 are passed over.
    assert places(even.batch) == [(0, 0), (2, 0), (5, 0), (7, 0)]
    assert even.settled[Outcome.NO_ROOM] == [(4, 0), (6, 0)] and even.ledger.next == 8
    assert even.share == pytest.approx(4 / (2 / 1 + 2 / 0.5))


def test_a_kind_of_which_too_little_is_found_leaves_its_room_empty():
    becomes = lambda o, q: GOOD if o % 2 == 0 else DULL  # noqa: E731
    found = roll(Ledger(), becomes, Wanted(4, 1, 2, 0, ("a", "b")), stream())
    assert places(found.batch) == [(0, 0), (2, 0)]
    assert found.settled[Outcome.UNINFORMATIVE] == [(o, 0) for o in (1, 3, 5, 7)]


def test_what_waited_of_a_kind_takes_its_kind_s_room():
    wanted = Wanted(2, 1, 2, 1, ("a", "b"))
    first = roll(Ledger(), lambda o, q: GOOD if o != 1 else DULL, wanted, stream("abb"), now=3)
    # 0 is of a, 1 of b and dull, 2 of b: nothing is left over
    assert places(first.batch) == [(0, 0), (2, 0)] and not first.ledger.waiting
    late = roll(first.ledger, lambda o, q: GOOD, wanted, stream("abb"), now=4)
    assert places(late.batch) == [(3, 0), (4, 0)] and late.ledger.next == 5


def test_documents_that_cannot_be_equal_parts_are_refused():
    with pytest.raises(ValueError, match=r"4 documents .* be 3 equal parts, one for each of a, b"):
        Wanted(4, 1, 1, 0, ("a", "b", "c"))


@settings(max_examples=60, deadline=None)
@given(
    pattern=st.lists(st.sampled_from("abc"), min_size=3, max_size=7).filter(
        lambda found: set(found) == set("abc")
    ),
    dull=st.sets(st.integers(0, 60)),
    retired=st.sets(st.integers(0, 60)),
    each=st.integers(1, 3),
    rounds=st.integers(1, 3),
    staleness=st.integers(0, 2),
    balanced=st.booleans(),
    skips=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_every_ordinal_is_settled_once_and_no_kind_has_more_than_its_part(
    pattern, dull, retired, each, rounds, staleness, balanced, skips
):
    of = stream("".join(pattern), retired)
    wanted = Wanted(3 * each, 1, rounds, staleness, tuple("abc") if balanced else ())
    ledger, became = Ledger(), {}
    for now, skip in enumerate(skips):
        rollout = roll(ledger, lambda o, q: DULL if o in dull else GOOD, wanted, of, now)
        if skip:
            rollout = without_update(rollout, ledger)
        for outcome, some in rollout.settled.items():
            for place in some:
                assert place not in became
                became[place] = outcome
        if balanced:
            kinds = collections.Counter(of.kind(o) for o, _ in places(rollout.batch))
            assert not kinds or max(kinds.values()) <= each
        ledger = rollout.ledger
        waiting = {one.group.place for one in ledger.waiting}
        assert set(became) | waiting == {(o, 0) for o in range(ledger.next)}
        assert not set(became) & waiting
    read = {o for (o, _), outcome in became.items() if outcome not in (Outcome.RETIRED,)}
    assert not read & retired
