import numpy as np
import pytest

from notepad_jax.grpo import advantages


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
    np.testing.assert_allclose(advantages.dr_grpo(np.array(rewards)), expected, atol=1e-15)


def test_grpo_divides_by_the_bessel_corrected_std():
    # [1, 0]: mean .5, std sqrt(.5)
    np.testing.assert_allclose(advantages.grpo(np.array([1, 0])), [2**-0.5, -(2**-0.5)], atol=2e-6)


def test_rloo_is_reward_minus_the_mean_of_the_others():
    np.testing.assert_allclose(advantages.rloo(np.array([1, 0, 0, 0])), [1, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name):
    # 0.1 * 3 does not sum to 0.3 in floating point: the mean is not the reward
    got = getattr(advantages, name)(np.full(3, 0.1))
    assert (got == 0).all()


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_advantages_sum_to_zero_and_keep_order(name):
    rewards = np.random.default_rng(0).random(16)
    got = getattr(advantages, name)(rewards)
    assert abs(got.sum()) < 1e-12
    assert (np.argsort(got) == np.argsort(rewards)).all()


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_a_group_of_one_is_an_error(name):
    with pytest.raises(ValueError, match="1 trajectory"):
        getattr(advantages, name)(np.array([1.0]))


def test_a_reward_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="finite"):
        advantages.dr_grpo(np.array([1.0, np.nan]))


def test_by_trajectory_never_by_turn(make):
    short, long = [make["turn"]([1], [2], [3])], [make["turn"]([1], [2], [3])] * 9
    group = make["group"]([short, long], [1.0, 0.0])
    np.testing.assert_array_equal(advantages.of_groups("dr_grpo", [group]), [[0.5, -0.5]])


def test_a_misspelt_name_is_told_its_neighbour(make):
    with pytest.raises(ValueError, match="did you mean 'dr_grpo'"):
        advantages.of_groups("drgrpo", [])
