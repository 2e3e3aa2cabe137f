"""Weights and denominators, by hand; and who notices that a completion was split."""

import dataclasses

import numpy as np
import pytest

from notepad_jax.grpo import normalisers
from notepad_jax.grpo.batch import pack
from notepad_jax.types import Finish

# Prompt 0: trajectory 0 of turns with 3 and 1 tokens, trajectory 1 of one with 2; prompt 1: 2.
TURN = np.array([0, 0, 0, 1, 2, 2, 3, 3])
TRAJECTORY = np.array([0, 0, 0, 0, 1, 1, 2, 2])
PROMPT = np.array([0, 0, 0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "weights", "denominator"),
    [
        ("token_mean", [1] * 8, 8),
        ("turn_mean", [1 / 3] * 3 + [1] + [1 / 2] * 4, 4),
        ("trajectory_mean", [1 / 4] * 4 + [1 / 2] * 4, 3),
        ("prompt_mean", [1 / 6] * 6 + [1 / 2] * 2, 2),
        ("constant", [1] * 8, 3 * 10),
    ],
)
def test_by_hand(name, weights, denominator):
    found, by = normalisers.named(name)(TURN, TRAJECTORY, PROMPT, 10.0)
    np.testing.assert_allclose(found, weights)
    assert by == denominator


@pytest.mark.parametrize("name", normalisers.NORMALISERS)
def test_a_loss_of_one_everywhere_is_a_mean_of_one(name):
    """But for `constant`, which says how much there was."""
    weights, denominator = normalisers.named(name)(TURN, TRAJECTORY, PROMPT, 10.0)
    assert weights.sum() / denominator == pytest.approx(8 / 30 if name == "constant" else 1)


@pytest.mark.parametrize("name", normalisers.NORMALISERS)
def test_all_but_turn_mean_look_past_where_turns_are_cut(name):
    cut = np.array([0, 0, 1, 2, 3, 4, 5, 5])
    one = normalisers.named(name)(TURN, TRAJECTORY, PROMPT, 10.0)
    two = normalisers.named(name)(cut, TRAJECTORY, PROMPT, 10.0)
    same = one[1] == two[1] and np.array_equal(one[0], two[0])
    assert same == (name != "turn_mean")


@pytest.mark.parametrize("name", normalisers.NORMALISERS)
def test_packed_however_every_token_keeps_its_weight(make, name):
    """By what a token is, not by where it lies."""
    groups = make["random_groups"](3)
    values = [np.ones(len(group.trajectories)) for group in groups]
    one, two = (
        pack(groups, values, length, normaliser=normalisers.named(name), constant=7.0).batch
        for length in (64, 384)
    )
    assert one.tokens.shape != two.tokens.shape and one.denominator == two.denominator

    def by_turn(batch):
        return sorted(
            zip(batch.turn[batch.weights > 0], batch.weights[batch.weights > 0], strict=True)
        )

    assert by_turn(one) == by_turn(two)


def test_truncated_turns_can_be_left_out(make):
    (group,) = make["random_groups"](3, groups=1)
    first = group.trajectories[0]
    cut = dataclasses.replace(
        first.turns[0],
        completion=dataclasses.replace(first.turns[0].completion, finish=Finish.LENGTH),
    )
    reading = dataclasses.replace(first.reading, turns=(cut, *first.turns[1:]))
    changed = dataclasses.replace(
        group, trajectories=(dataclasses.replace(first, reading=reading), *group.trajectories[1:])
    )
    values = [np.ones(4)]
    whole, less = pack([changed], values, 384), pack([changed], values, 384, mask_truncated=True)
    assert whole.stats.loss_tokens - less.stats.loss_tokens == len(cut.completion.tokens)
    assert less.batch.denominator == less.stats.loss_tokens
    assert (whole.stats.empty_turns, less.stats.empty_turns) == (0, 1)


def test_a_misspelt_name_is_told_its_neighbour():
    with pytest.raises(ValueError, match="did you mean 'token_mean'"):
        normalisers.named("tokenmean")
