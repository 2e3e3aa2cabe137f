"""AEPO's gate: whose entropy it looks at, when it shuts and opens, and who is left out."""

import dataclasses

import numpy as np
import pytest

from notepad_jax.grpo import algorithm, batch, entropy_gate, normalisers
from notepad_jax.grpo.algorithm import Algorithm
from notepad_jax.types import TurnKind

UPDATES, ANSWERS = frozenset({"update"}), frozenset({"answer"})
HOW = Algorithm(
    advantage="dr_grpo", normaliser="token_mean", constant=0.0, mask_truncated=False, kl_weight=0.0,
    kl_in="loss", minibatches=1, epochs=1, row_length=64, full_rate_at=0.0, ess_at=0.0,
    entropy_high=2.0, entropy_low=1.0, max_skipped=3, local_weight=0.5, scale_memory=0.0,
    memory_weight=1.0,
)  # fmt: skip


@pytest.fixture
def packed(make):
    """Two trajectories, A = 1/2 and -1/2: updates of 1 and 3 tokens, answers of 2 and 2."""
    turn = make["turn"]
    members = [
        [turn([5], [6], range(10, 11)), turn([], [7], range(20, 22), kind=TurnKind.ANSWER)],
        [turn([5], [6], range(30, 33)), turn([], [7], range(40, 42), kind=TurnKind.ANSWER)],
    ]
    group = make["group"](members, [1.0, 0.0])
    return lambda name="token_mean": (
        batch.pack(
            [group], [np.array([0.5, -0.5])], 64, normaliser=normalisers.named(name), constant=9.0
        ).batch
    )


def by_token(one, values):
    """[B, T] of values by token id; 0 elsewhere."""
    out_BT = np.zeros(one.tokens.shape, np.float32)
    for token, value in values.items():
        out_BT[(one.tokens == token) & (one.weights > 0)] = value
    return out_BT


def test_turns_count_and_not_tokens_and_kinds_are_apart(packed):
    """Updates: means 4 and (1 + 2 + 3) / 3 = 2, so 3 (tokens would say 2.5); answers 1 and 0."""
    one = packed()
    entropy = by_token(one, {10: 4, 30: 1, 31: 2, 32: 3, 20: 0.5, 21: 1.5})
    assert entropy_gate.mean_entropies([one], [entropy]) == {"update": 3.0, "answer": 0.5}
    half = dataclasses.replace(one, weights=one.weights * (one.update_turn == 0))
    assert entropy_gate.mean_entropies([half], [entropy]) == {"answer": 0.5}
    both = entropy_gate.mean_entropies([one, half], [entropy, 3 * entropy])
    assert both == {"update": 3.0, "answer": (2 * 0.5 + 2 * 1.5) / 4}


def test_it_shuts_above_one_bound_and_opens_below_the_other():
    seen = [1.5, 2.0, 2.1, 1.5, 1.0, 0.9, 1.5]
    shut, gate = [], entropy_gate.OPEN
    for value in seen:
        gate = entropy_gate.after(gate, {"update": value, "answer": 0.1}, low=1.0, high=2.0)
        shut.append(gate == UPDATES)
        assert gate <= UPDATES
    assert shut == [False, False, True, True, True, False, False]
    assert entropy_gate.after(UPDATES, {"answer": 3.0}, 1.0, 2.0) == UPDATES | ANSWERS


@pytest.mark.parametrize(
    ("normaliser", "weights", "denominator"),
    [
        ("token_mean", {10: 1, 20: 1, 40: 1}, 5),
        ("turn_mean", {10: 1, 20: 1 / 2, 40: 1 / 2}, 3),
        ("trajectory_mean", {10: 1 / 3, 20: 1 / 3, 40: 1 / 2}, 2),
        ("prompt_mean", {10: 1 / 5, 20: 1 / 5, 40: 1 / 5}, 1),
        ("constant", {10: 1, 20: 1, 40: 1}, 18),
    ],
)
def test_who_is_left_out_counts_nowhere(packed, normaliser, weights, denominator):
    """Updates are shut: of the second trajectory (A < 0) the answer stays, the update does not."""
    one = packed(normaliser)
    out = entropy_gate.left_out(one, UPDATES)
    assert set(one.tokens[out]) == {30, 31, 32}
    left = batch.without(one, out, normalisers.named(normaliser), 9.0)
    assert left.denominator == denominator
    for token, weight in weights.items():
        assert left.weights[left.tokens == token] == pytest.approx(weight)
    assert not left.weights[out].any() and (left.weights > 0).sum() == 5
    np.testing.assert_array_equal(left.tokens, one.tokens)  # still what others see


def test_the_gate_acts_on_the_rollout_that_shut_it(packed):
    one = packed()
    how = dataclasses.replace(HOW, minibatches=1)
    loud = by_token(one, {10: 9, 20: 0.5})
    (left,), gate, told = algorithm.gated(how, entropy_gate.OPEN, [one], [loud])
    assert gate == UPDATES and left.denominator == 5
    assert told == {
        "entropy_gate/update": 4.5, "entropy_gate/answer": 0.125, "entropy_gate/update_shut": 1.0,
        "entropy_gate/answer_shut": 0.0, "entropy_gate/left_out": 3 / 8,
    }  # fmt: skip
    quiet = np.zeros_like(loud)
    (same,), gate, told = algorithm.gated(how, gate, [one], [quiet])
    assert gate == entropy_gate.OPEN and told["entropy_gate/left_out"] == 0
    np.testing.assert_array_equal(same.weights, one.weights)
    assert same.denominator == one.denominator


def test_a_part_of_which_nothing_is_left_is_gone(packed):
    one = packed()
    failed = dataclasses.replace(one, weights=one.weights * (one.advantages < 0))
    loud = 9 * one.weights
    kept, _, _ = algorithm.gated(HOW, entropy_gate.OPEN, [one, failed], [loud, loud])
    assert kept[1] is None and (kept[0].weights > 0).sum() == 3
