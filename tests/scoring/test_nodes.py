"""GraphWalks' F1 over the nodes of the last line."""

from __future__ import annotations

import pytest

from notepad_jax.scoring import long_context, metrics

AB = ["0a1b2c3d4e", "1111111111"]


@pytest.mark.parametrize(
    ("said", "gold", "worth"),
    [
        ("Final Answer: [0a1b2c3d4e, 1111111111]", AB, 1),
        ("It goes on.\nFinal Answer: [1111111111,0a1b2c3d4e]\n", AB, 1),
        ("Final Answer: [0a1b2c3d4e]", AB, 2 / 3),  # 1 of 1 and 1 of 2: 2 * 1 / (1 + 2)
        ("Final Answer: [0a1b2c3d4e, 2222222222, 3333333333]", AB, 2 / 5),
        ("Final Answer: [0a1b2c3d4e, 0a1b2c3d4e]", AB, 2 / 3),  # sets
        ("Final Answer: []", AB, 0),
        ("Final Answer: []", [long_context.EMPTY], 1),
        ("Final Answer: [ , ]", [long_context.EMPTY], 1),
        ("Final Answer: [0a1b2c3d4e]", [long_context.EMPTY], 0),
        ("Final Answer: ['0a1b2c3d4e']", AB[:1], 0),  # names as they are written
        ("so Final Answer:[0a1b2c3d4e].", AB[:1], 1),
    ],
)
def test_f1_of_two_sets(said, gold, worth):
    found = metrics.score(said, gold, "graphwalks", "plain")
    assert found.value == pytest.approx(worth) and not found.problem


@pytest.mark.parametrize(
    "said",
    [
        "",
        "0a1b2c3d4e",
        "final answer: [0a1b2c3d4e]",
        "Final Answer: 0a1b2c3d4e",
        "Final Answer: [0a1b2c3d4e",
        "Final Answer: [0a1b2c3d4e]\nThat is all.",
        "] Final Answer: [0a1b2c3d4e",
    ],
)
def test_no_list_in_the_last_line_is_malformed(said):
    worth = metrics.score(said, AB, "graphwalks", "plain")
    assert worth == metrics.Score(0.0, "no_final_answer")


def test_gold_answers_are_said_in_one_line():
    metrics.check_gold(AB, "graphwalks")
    metrics.check_gold([long_context.EMPTY], "graphwalks")
