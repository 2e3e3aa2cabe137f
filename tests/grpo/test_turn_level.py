"""Turn-level advantages in the batch: what they pull, and what is told of them."""

import dataclasses

import jax
import numpy as np
import pytest

from notepad_jax.grpo import advantages, algorithm, shares, update
from notepad_jax.types import TurnKind
from tests.grpo.test_algorithm import having, never
from tests.grpo.test_local import alone


def merged(make, gains, behaviour=(None, None)):
    """Two readings that were right, whose only update turns merged the same notes differently."""
    notes, said = [5, 6, 7], ([10, 11, 2], [12, 13, 2])
    ends = [make["turn"]([5], [9], [20, 2], kind=TurnKind.ANSWER) for _ in said]
    turns = [
        dataclasses.replace(make["turn"](notes, [8], ids, told), level=1)
        for ids, told in zip(said, behaviour, strict=True)
    ]
    group = make["group"]([list(pair) for pair in zip(turns, ends, strict=True)], [1.0, 1.0])
    members = (
        dataclasses.replace(one, memory_rewards=(gain,))
        for one, gain in zip(group.trajectories, gains, strict=True)
    )
    return dataclasses.replace(group, trajectories=tuple(members))


@pytest.mark.slow
def test_a_note_that_lost_evidence_is_pushed_down_although_the_reading_was_right(
    make, config, params
):
    turns = [one.turns[0] for one in merged(make, (0.0, 0.0)).trajectories]
    before = np.asarray(alone(config, params, turns)()[0]).reshape(2, 3)
    group, (how, settings) = merged(make, (-0.5, 0.0), before), having()
    assert group.informative and not group.rewards.std()
    (one,), _ = algorithm.batches(how, settings, [group], never, never)
    _, gradient = update.loss_and_gradient(config, settings, params, {}, one)
    stepped = jax.tree.map(lambda x, pull: x - 0.01 * pull, params, gradient)
    after = np.asarray(alone(config, stepped, turns)()[0]).reshape(2, 3)
    lost, kept = (after - before).sum(1)
    assert lost < -1e-4 and kept > 1e-4


def test_memories_that_earn_nothing_and_any_weight_are_the_same_batch(make):
    groups = make["random_groups"](3)
    first, second = (
        algorithm.batches(*having(memory_weight=weight), groups, never, never)[0][0]
        for weight in (1.0, 0.25)
    )
    for field in dataclasses.fields(first):
        a, b = (np.asarray(getattr(one, field.name)).tobytes() for one in (first, second))
        assert a == b, field.name


def test_the_weight_reaches_the_batch(make):
    for weight, expected in ((1.0, 0.25), (0.5, 0.125)):
        (one,), _ = algorithm.batches(
            *having(memory_weight=weight), [merged(make, (-0.5, 0.0))], never, never
        )
        assert set(one.advantages[one.update_turn > 0].tolist()) == {-expected, expected}
        assert not one.advantages[one.update_turn == 0].any()


def test_what_is_told_by_hand(make):
    """Turns have 1/4 each at half the weight, readings 3/8 and 5/8: a third is the turns'."""
    group, outcome = merged(make, (-1.0, 0.0)), [np.array([0.375, -0.625])]
    told = shares.turn_level([group], outcome, "dr_grpo", 0.5)
    assert told == {"turn_advantage": 0.25, "turn_advantage_share": pytest.approx(0.5 / 1.5)}
    plain = make["random_groups"](3)
    assert shares.turn_level(plain, advantages.dr_grpo(plain), "dr_grpo", 1.0) == {}
