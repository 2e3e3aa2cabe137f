"""Advantages: the numbers of their papers, then what holds for all of them."""

import dataclasses

import numpy as np
import pytest

from notepad_jax import types
from notepad_jax.grpo import advantages

ANSWER = types.TurnKind.ANSWER


def group(rewards, metric="em", source="test") -> types.Group:
    task = types.Task("t", "?", types.TextDocument(""), ("a",), source, metric)
    readings = [types.Reading("t", k, (), "", types.Status.ANSWERED) for k in range(len(rewards))]
    return types.Group(
        task,
        tuple(types.Trajectory(r, float(x), {}) for r, x in zip(readings, rewards, strict=True)),
    )


def of(name, *groups):
    return advantages.of_groups(
        name, [g if isinstance(g, types.Group) else group(g) for g in groups]
    )


# GoLongRL's worked example: two prompts of either reward type.
MIXED = (
    group([1, 0, 0, 0], "em"), group([1, 1, 0, 0], "em"),
    group([0.30, 0.34, 0.28, 0.36], "rouge_l"), group([0.10, 0.10, 0.50, 0.10], "rouge_l"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ([1] + [0] * 15, [0.9375] + [-0.0625] * 15),
        ([1, 1, 1], [0, 0, 0]),
    ],
)
def test_dr_grpo_numbers_of_the_spec(rewards, expected):
    np.testing.assert_allclose(of("dr_grpo", rewards)[0], expected, atol=1e-15)


def test_grpo_divides_by_the_bessel_corrected_std():
    # [1, 0]: mean .5, std sqrt(.5)
    np.testing.assert_allclose(of("grpo", [1, 0])[0], [2**-0.5, -(2**-0.5)], atol=2e-6)


def test_rloo_is_reward_minus_the_mean_of_the_others():
    np.testing.assert_allclose(of("rloo", [1, 0, 0, 0])[0], [1, -1 / 3, -1 / 3, -1 / 3])


def test_imitation_learns_what_was_right_by_its_reward_and_unlearns_nothing():
    found = of("imitation", [1], [0.25], [0, 1, 1])
    assert [each.tolist() for each in found] == [[1.0], [0.25], [0.0, 1.0, 1.0]]


def test_a_batch_s_scale_is_of_what_is_left_of_the_rewards():
    """[.5, -.5, 1, -1]: variance 2.5 / 3. The middle group has no say."""
    found = of("batch_std", [1, 0], [3, 3], [2, 0])
    expected = np.array([0.5, 1.0]) / np.sqrt(2.5 / 3)
    np.testing.assert_allclose([found[0][0], found[2][0]], expected, rtol=1e-5)


def test_a_task_s_scale_is_of_all_its_rewards():
    """Of [1, 0, 1, 1, 0, 0, 0, 0] the Bessel-corrected variance is 15/56; one source each."""
    a, b = group([1, 0, 1, 1], source="a"), group([0, 0, 0, 0], source="a")
    c = group([4, 0], source="c")
    np.testing.assert_allclose(of("task_std", a, c)[0][0], 0.25 / 0.5, rtol=1e-5)
    np.testing.assert_allclose(of("task_std", a, c)[1][0], 2 / np.sqrt(8), rtol=1e-5)
    # Who has no signal is in no scale.
    np.testing.assert_allclose(of("task_std", a, b)[0], of("task_std", a)[0])


def test_tmn_scales_each_reward_type_by_its_own_spread():
    found = of("tmn", *MIXED)
    np.testing.assert_allclose(found[0][0], 0.75 / 0.540062, rtol=1e-5)
    np.testing.assert_allclose(found[3][2], 0.30 / 0.143759, rtol=1e-5)


def test_tmn_reweight_numbers_of_the_paper():
    found = of("tmn_reweight", *MIXED)
    expected = [
        [1.7832, -0.3605, -0.3605, -0.3605],
        [0.9258, 0.9258, -0.9258, -0.9258],
        [-0.1391, 0.1391, -0.2782, 0.2782],
        [-0.5417, -0.5417, 2.6795, -0.5417],
    ]
    np.testing.assert_allclose(found, expected, atol=6e-5)


# ---------------------------------------------------------------- scales over rollouts


def test_a_remembered_scale_by_hand():
    """Variances within groups: [1, 0] .5, [2, 0] 2, [3, 0] 4.5; a kind that is away stays."""
    first = advantages.remembered("tmn", [group([1, 0]), group([2, 0]), group([4, 4])], {}, 0.5)
    assert first == {"em": (2.5, 2.0)}
    other = advantages.remembered("tmn", [group([2, 0], "f1")], first, 0.5)
    assert other == {"em": (2.5, 2.0), "f1": (2.0, 1.0)}
    then = advantages.remembered("tmn", [group([3, 0])], other, 0.5)
    assert then == {"em": (0.5 * 2.5 + 4.5, 0.5 * 2 + 1), "f1": (2.0, 1.0)}
    (found,) = advantages.of_groups("tmn", [group([3, 0])], then)
    np.testing.assert_allclose(found, np.array([1.5, -1.5]) / np.sqrt(5.75 / 2), rtol=1e-5)


@pytest.mark.parametrize("name", list(advantages.SCALES))
def test_without_a_memory_a_scale_is_the_batch_s_own(name):
    rng = np.random.default_rng(0)
    batches = [
        [group(rng.random(4), rng.choice(["em", "f1"]), rng.choice(["a", "b"])) for _ in range(5)]
        for _ in range(3)
    ]
    for before, now in zip(batches, batches[1:], strict=False):
        known = advantages.remembered(name, before, {}, 0.9)
        for scales in (
            advantages.remembered(name, now, {}, 0.9),
            advantages.remembered(name, now, known, 0.0),
        ):
            np.testing.assert_array_equal(advantages.of_groups(name, now, scales), of(name, *now))
        steadier = advantages.remembered(name, now, known, 0.9)
        assert not np.array_equal(advantages.of_groups(name, now, steadier), of(name, *now))


@pytest.mark.parametrize("name", list(advantages.SCALES))
def test_a_memory_of_one_batch_again_and_again_is_that_batch(name):
    scales = {}
    for _ in range(7):
        scales = advantages.remembered(name, MIXED, scales, 0.9)
    np.testing.assert_allclose(
        advantages.of_groups(name, MIXED, scales), of(name, *MIXED), rtol=1e-12
    )


# ---------------------------------------------------------------- all of them


# What holds for all that compare the readings of a group; imitation compares nothing.
NAMES = [name for name in advantages.ADVANTAGES if name != "imitation"]


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_zero_also_in_company(name):
    # 0.1 * 3 does not sum to 0.3 in floating point: the mean is not the reward
    found = of(name, np.full(3, 0.1), [1, 0, 0])
    assert (found[0] == 0).all() and found[1][0] > 0
    assert (of(name, np.full(3, 0.1))[0] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_they_keep_order_and_all_but_the_reweighted_sum_to_zero(name):
    rng = np.random.default_rng(0)
    groups = [group(rng.random(16), rng.choice(["em", "sub_em"])) for _ in range(6)]
    for one, found in zip(groups, of(name, *groups), strict=True):
        assert (np.argsort(found) == np.argsort(one.rewards)).all()
        assert name == "tmn_reweight" or abs(found.sum()) < 1e-9


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dr_grpo", "rloo")])
def test_what_has_a_scale_does_not_look_at_the_unit_of_rewards(name):
    """A type whose rewards are a tenth of another's weighs as much."""
    whole, tenth = [1, 0, 0.5, 0.2], np.array([1, 0, 0.5, 0.2]) / 10
    np.testing.assert_allclose(of(name, whole), of(name, tenth), rtol=1e-3)


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo"])
def test_a_group_s_own_do_not_look_at_others(name):
    np.testing.assert_array_equal(of(name, [1, 0, 0])[0], of(name, [1, 0, 0], [5, 1, 2])[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_is_an_error(name):
    with pytest.raises(ValueError, match="1 trajectory"):
        of(name, [1.0])


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_not_a_number_is_an_error(name):
    with pytest.raises(ValueError, match="finite"):
        of(name, [1.0, np.nan])


def test_by_trajectory_never_by_turn(make):
    short, long = [make["turn"]([1], [2], [3])], [make["turn"]([1], [2], [3])] * 9
    made = make["group"]([short, long], [1.0, 0.0])
    np.testing.assert_array_equal(advantages.of_groups("dr_grpo", [made]), [[0.5, -0.5]])


def remembering(make, worth, rewards, answers=1):
    """Members of two memories each and one or more contexts of an answer."""
    turn, end = make["turn"]([1], [2], [3]), make["turn"]([1], [2], [3], kind=ANSWER)
    updates = [dataclasses.replace(turn, unit=k) for k in range(2)]
    made = make["group"]([updates + [end] * answers for _ in rewards], rewards)
    members = (
        dataclasses.replace(one, memory_rewards=tuple(own))
        for one, own in zip(made.trajectories, worth, strict=True)
    )
    return dataclasses.replace(made, trajectories=tuple(members))


def test_a_turn_learns_from_what_its_memory_was_worth_by_hand(make):
    """Memories worth 1, 0 and 0 after the first chunk, and 1, 1 and 0.4 after the second."""
    one = remembering(make, [(1, 1), (0, 1), (0, 0.4)], [1.0, 1.0, 1.0], answers=2)
    assert one.informative, "the answers are all right, and the memories are not"
    (own,) = of("dr_grpo", one)
    found = advantages.of_turns(one, own + [0.5, 0, -0.5])
    expected = [[7 / 6, 0.7, 0.5, 0.5], [-1 / 3, 0.2, 0, 0], [-5 / 6, -0.9, -0.5, -0.5]]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_without_a_reward_of_memories_all_turns_have_their_trajectory_s(make):
    plain, equal = (
        remembering(make, worth, [1.0, 0.0]) for worth in ([(), ()], [(0.1, 0.7), (0.1, 0.7)])
    )
    for one in (plain, equal):
        found = advantages.of_turns(one, np.array([0.5, -0.5]))
        assert np.array_equal(found, [[0.5] * 3, [-0.5] * 3])
    assert not remembering(make, [(0.1, 0.7)] * 2, [1.0, 1.0]).informative


def test_memories_are_compared_after_the_same_chunk(make):
    """What all members earn alike at a chunk, however much, and their order move nothing."""
    rng = np.random.default_rng(2)
    worth = rng.random((4, 2))
    values = lambda worth: advantages.of_turns(  # noqa: E731
        remembering(make, worth, [0.0] * 4), np.zeros(4)
    )
    np.testing.assert_allclose(values(worth), values(worth + [0.3, 5.0]), atol=1e-12)
    np.testing.assert_allclose(values(worth[::-1]), values(worth)[::-1])
    np.testing.assert_allclose(np.sum(values(worth), 0), 0, atol=1e-12)
    with pytest.raises(ValueError, match="1 rewards of memories for 2 update turns"):
        advantages.of_turns(remembering(make, [(1,), (1, 0)], [1.0, 0.0]), np.zeros(2))


def in_rounds(make, places, worth, rewards=None):
    """Members whose update turns were made at `places`: (round, level, unit) of each."""
    turn, end = make["turn"]([1], [2], [3]), make["turn"]([1], [2], [3], kind=ANSWER)
    put = lambda at: dataclasses.replace(turn, round=at[0], level=at[1], unit=at[2])  # noqa: E731
    turns = [[*(put(at) for at in its), end] for its in places]
    made = make["group"](turns, [0.0] * len(places) if rewards is None else rewards)
    members = (
        dataclasses.replace(one, memory_rewards=tuple(own))
        for one, own in zip(made.trajectories, worth, strict=True)
    )
    return dataclasses.replace(made, trajectories=tuple(members))


FOUR = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))


def test_turns_of_rounds_are_compared_at_their_place_by_hand(make):
    """One merged and read again, one merged, and one noted nothing: each has other turns."""
    one = in_rounds(make, [FOUR, FOUR[:3], FOUR[:2]], [(1, 0, -0.5, 1), (0, 0, 0), (0.5, 1)])
    found = advantages.of_turns(one, np.array([2.0, 0.0, 4.0]), weight=0.5)
    assert [a.tolist() for a in found] == [
        pytest.approx([2 + 0.25, 2 - 1 / 6, 2 - 0.125, 2, 2]),
        pytest.approx([-0.25, -1 / 6, 0.125, 0]),
        pytest.approx([4, 4 + 1 / 3, 4]),
    ]


def test_members_that_made_other_turns_are_informative_where_one_place_differs(make):
    places = [FOUR, FOUR[:3]]
    assert not in_rounds(make, places, [(0, 1, 0, 0.5), (0, 1, 0)]).informative
    assert in_rounds(make, places, [(0, 1, 0, 0.5), (0, 1, 0.5)]).informative
    assert not in_rounds(make, places, [(), ()]).informative


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo", "tmn"])
def test_turn_level_advantages_sum_to_zero_at_a_place_in_any_order_of_members(make, name):
    rng = np.random.default_rng(4)
    places = [FOUR[: rng.integers(1, 5)] for _ in range(6)]
    worth = [rng.normal(size=len(its)) for its in places]
    alone = lambda order: advantages.of_turns(  # noqa: E731
        in_rounds(make, [places[k] for k in order], [worth[k] for k in order]),
        np.zeros(6), name, 0.7,
    )  # fmt: skip
    found, order = alone(range(6)), rng.permutation(6)
    for at in range(4):
        its = [own[at] for own, one in zip(found, places, strict=True) if len(one) > at]
        assert sum(its) == pytest.approx(0, abs=1e-12)
        assert len(its) < 2 or max(its) > 0.01, "they were compared"
    for own, k in zip(alone(order), order, strict=True):
        np.testing.assert_allclose(own, found[k], atol=1e-12)


def test_a_turn_is_normalised_as_its_reading_is(make):
    """Gains of 0 and 0.1 weigh what rewards of 0 and 1 do where a group's spread divides."""
    one = in_rounds(make, [FOUR[:1]] * 2, [(0.1,), (0.0,)], [1.0, 0.0])
    for name, expected in (("dr_grpo", 0.05), ("rloo", 0.1), ("grpo", 0.5**0.5)):
        first, _ = advantages.of_turns(one, np.zeros(2), name)
        assert first == pytest.approx([expected, 0], rel=1e-4)


def test_a_weight_of_one_is_what_was_added_before_in_every_bit(make):
    """And memories that earn alike, or nothing, leave readings' advantages to the bit."""
    rng = np.random.default_rng(5)
    for members in (2, 8, 33):
        places, worth = [FOUR] * members, rng.normal(size=(members, 4))
        of_readings = rng.normal(size=members)
        found = advantages.of_turns(in_rounds(make, places, worth), of_readings)
        before = np.stack([advantages.centred(at_G) for at_G in worth.T], 1)
        assert np.array_equal(np.stack(found)[:, :4], of_readings[:, None] + before)
        for none in (np.ones((members, 4)), [()] * members):
            found = advantages.of_turns(in_rounds(make, places, none), of_readings, weight=0.3)
            assert np.array_equal(found, np.repeat(of_readings[:, None], 5, 1))


def test_a_misspelt_name_is_told_its_neighbour():
    with pytest.raises(ValueError, match="did you mean 'dr_grpo'"):
        advantages.of_groups("drgrpo", [])
