"""Whose the learning is: shares of the advantage, of batches as they are learnt from."""

import dataclasses

import numpy as np
import pytest

from notepad_jax.grpo import advantages, algorithm, normalisers, shares
from notepad_jax.grpo.batch import pack
from notepad_jax.types import TurnKind


def of(source, made):
    return dataclasses.replace(made, task=dataclasses.replace(made.task, source=source))


def batches(groups, parts=1, normaliser="token_mean", values=None):
    cut = algorithm.parts_of(len(groups), parts)
    values = advantages.dr_grpo(groups) if values is None else values
    how = dict(row_length=256, normaliser=normalisers.named(normaliser))
    packed = [pack(groups[p], values[p], **how).batch for p in cut]
    return packed, [groups[p] for p in cut]


def told(groups, **how):
    named = {group.task.source: group.task.source for group in groups}
    return shares.metrics(*batches(groups, **how), named)


@pytest.fixture
def by_hand(make):
    """Of a: 3 tokens with an advantage of 1/2 and 1 with -1/2; of b: 2 and 2, of answers."""

    def one(kind, *sizes):
        turns = [[make["turn"]([5, 6], [7], [8] * n, kind=kind)] for n in sizes]
        return make["group"](turns, [1.0, 0.0])

    return [of("a", one(TurnKind.UPDATE, 3, 1)), of("b", one(TurnKind.ANSWER, 2, 2))]


def test_shares_by_hand(by_hand):
    assert told(by_hand) == {
        "advantage_share_update": 0.5,
        "task/a/advantage_share": 0.5,
        "task/b/advantage_share": 0.5,
    }
    scaled = [np.array([1.5, -1.5]), np.array([0.5, -0.5])]
    assert told(by_hand, values=scaled)["task/a/advantage_share"] == 0.75


def test_a_normaliser_weighs_as_it_does_in_the_loss(by_hand):
    """Of a, the trajectory of 3 tokens has 3 times the advantage of the one of 1 token: of tokens
    it has 9 tenths of a's mass of 10, of trajectories 3 quarters of 4; b has 4 tokens of 1."""
    values = [np.array([3.0, 1.0]), np.array([1.0, -1.0])]
    assert told(by_hand, values=values)["task/a/advantage_share"] == pytest.approx(10 / 14)
    got = told(by_hand, values=values, normaliser="trajectory_mean")
    assert got["task/a/advantage_share"] == pytest.approx(4 / 6)
    steps = told(by_hand, values=values, parts=2)  # each step is divided by its own 4 tokens
    assert steps["task/a/advantage_share"] == pytest.approx(10 / 14)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shares_add_up_and_do_not_depend_on_names(make, parts):
    groups = make["random_groups"](3, groups=5)
    groups = [of("abcab"[k], one) for k, one in enumerate(groups)]
    got = told(groups, parts=parts)
    assert sum(v for name, v in got.items() if name.startswith("task/")) == pytest.approx(1)
    one = shares.metrics(*batches(groups, parts), dict.fromkeys("abc", "others"))
    assert one["task/others/advantage_share"] == pytest.approx(1)
    assert one["advantage_share_update"] == got["advantage_share_update"] > 0


def test_the_order_of_groups_moves_no_share(make):
    groups = [of("ab"[k % 2], one) for k, one in enumerate(make["random_groups"](4, groups=4))]
    assert told(groups[::-1]) == pytest.approx(told(groups))


def test_where_nothing_has_an_advantage_nothing_is_told(by_hand):
    assert told(by_hand, values=[np.zeros(2), np.zeros(2)]) == {}
