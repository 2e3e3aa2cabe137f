"""What turns near their limit cost: the formula by hand, and where it goes."""

import dataclasses

import numpy as np
import pytest

from notepad_jax.grpo import advantages
from notepad_jax.rollout import groups, overlong
from notepad_jax.rollout.overlong import Overlong
from notepad_jax.setup import configuration
from notepad_jax.training import rollout_settings
from notepad_jax.types import Finish, Reading, Status, Trajectory, TurnKind
from tests.rollout import made
from tests.runs import SMALL

HOW = Overlong(window=4, weight=0.5, max_memory=10, max_answer=6)


def turn(kind, tokens, finish=Finish.STOP):
    """A turn of so many completion tokens, the stop token among them."""
    said = made.turn(kind, "x", finish=finish)
    ids = said.completion.tokens[:1].repeat(tokens)
    return dataclasses.replace(said, completion=dataclasses.replace(said.completion, tokens=ids))


@pytest.mark.parametrize(
    ("kind", "tokens", "cost"),
    [
        (TurnKind.UPDATE, 1, 0.0),
        (TurnKind.UPDATE, 6, 0.0),
        (TurnKind.UPDATE, 7, -0.25),
        (TurnKind.UPDATE, 9, -0.75),
        (TurnKind.UPDATE, 10, -1.0),
        (TurnKind.ANSWER, 2, 0.0),
        (TurnKind.ANSWER, 4, -0.5),
        (TurnKind.ANSWER, 6, -1.0),
    ],
)
def test_a_turn_by_hand(kind, tokens, cost):
    assert HOW.penalties([turn(kind, tokens)]) == [cost]
    assert HOW.penalties([turn(kind, tokens, Finish.LENGTH)]) == [-1.0]


def test_an_answer_in_contexts_is_as_long_as_all_of_them():
    how = dataclasses.replace(HOW, max_answer=14)
    begun, end = turn(TurnKind.ANSWER, 6, Finish.LENGTH), turn(TurnKind.ANSWER, 5)
    assert how.penalties([turn(TurnKind.UPDATE, 9), begun, end]) == [-0.75, -0.25]
    assert how.penalties([begun, begun]) == [-1.0]


def test_a_reading_costs_the_mean_of_its_turns_however_many_they_are():
    right = lambda reading, task, said: Trajectory(reading, 1.0, {"em": 1.0})  # noqa: E731
    score = overlong.shaped(right, HOW)

    def of(*turns):
        return score(Reading("t", 0, turns, "ann", Status.ANSWERED), made.task())

    long, short = turn(TurnKind.UPDATE, 9), turn(TurnKind.UPDATE, 2)
    found = of(long, short, turn(TurnKind.ANSWER, 4))
    assert found.reward == 1 - 0.5 * (0.75 + 0 + 0.5) / 3
    assert found.reward_parts == {"em": 1.0, "overlong": -0.5 * 1.25 / 3}
    assert of(long).reward == of(*[long] * 7).reward == 1 - 0.375
    assert of(short).reward == 1.0 and of().reward == 1.0
    group = dataclasses.replace(made.group(1, 1), trajectories=(of(long), of(short)))
    assert groups.measure([group]).overlong == -0.375 / 2


def test_groups_are_filtered_by_what_was_judged_and_not_by_lengths():
    """Eight right answers, one of them cut: its advantage would be -2.475, all that is learnt.

    Rewards 1 seven times and 0: mean .875, spread .353553.
    """
    one_cut = made.group(*[1] * 8)
    *fine, cut = one_cut.trajectories
    one_cut = dataclasses.replace(
        one_cut, trajectories=(*fine, dataclasses.replace(cut, shaping=-1.0))
    )
    (by_length,) = advantages.grpo([one_cut])
    np.testing.assert_allclose(by_length, [0.353552] * 7 + [-2.474867], rtol=1e-5)
    assert one_cut.rewards.tolist() == [1] * 7 + [0] and not one_cut.informative
    counted = groups.measure([one_cut])
    assert (counted.dropped_all_right, counted.groups_informative) == (1, 0)
    wrong = dataclasses.replace(one_cut.trajectories[0], judged=0.0)
    mixed = dataclasses.replace(one_cut, trajectories=(*one_cut.trajectories, wrong))
    assert mixed.informative and mixed.rewards.tolist() == [1] * 7 + [0, 0]


def config(*words):
    return configuration.load("quickstart", [*SMALL, *words])


def test_off_it_is_the_score_itself_and_on_it_is_of_the_limits_of_a_run():
    assert rollout_settings.scoring(config()).score is rollout_settings.rewards.score
    score = rollout_settings.scoring(
        config("--config.grpo.overlong_window=4")
    ).score  # memory 8, answer 4
    turns = (turn(TurnKind.UPDATE, 6), turn(TurnKind.ANSWER, 2))
    found = score(Reading("t", 0, turns, "ann", Status.ANSWERED), made.task())
    assert (found.reward, found.reward_parts["em"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("overlong_window=5",), "overlong_window is 5 and reading.max_answer 4; the window"),
        (("overlong_window=4", "mask_truncated=true"), "does not learn from them; use one"),
    ],
)
def test_what_does_not_go_together_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        rollout_settings.scoring(config(*(f"--config.grpo.{word}" for word in words)))


def test_a_weight_of_nothing_is_said():
    words = ("--config.grpo.overlong_window=4", "--config.grpo.overlong_weight=0.0")
    assert "overlong_weight is 0" in "".join(rollout_settings.idle(config(*words)))
    assert list(rollout_settings.idle(config())) == []
