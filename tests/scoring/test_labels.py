"""BABILong's comparison: labels of the answer, less the question's, exactly the gold ones."""

from __future__ import annotations

import pytest

from notepad_jax.scoring import long_context, metrics

WHERE = "Where was the apple before the kitchen?"


@pytest.mark.parametrize(
    ("metric", "said", "gold", "question", "worth"),
    [
        ("places", "The most recent location of Mary is OFFICE.", "office", "", 1),
        ("places", "office or garden", "office", "", 0),
        ("places", "", "office", "", 0),
        ("places", "the office. Not the garden.", "office", "", 1),  # the first sentence counts
        ("places", "Well. The office", "office", "", 0),
        ("places", "office<context>garden", "office", "", 1),
        ("places", "office <example> garden", "office", "", 1),
        ("places", "Before the kitchen the apple was in the office", "office", WHERE, 1),
        ("places", "Before the kitchen the apple was in the office", "office", "", 0),
        ("places", "kitchen", "kitchen", WHERE, 0),  # labels of the question are never right
        ("gifts", "Fred gave the milk", "Fred", "Who gave the milk to Jeff?", 1),
        ("gifts", "Jeff gave the milk", "Fred", "Who gave the milk to Jeff?", 0),
        ("yes_no", "Yes, he is", "yes", "Is John in the kitchen? Answer yes or no.", 1),
        ("yes_no", "yes and no", "yes", "", 0),
        ("yes_no", "I know: yes", "yes", "", 0),  # letters anywhere, as published
        ("yes_no", "maybe no", "no", "", 1),
        ("maybe", "maybe no", "no", "", 0),
        ("numbers", "none", "none", "", 1),  # not as published: there "none" says one, too
        ("numbers", "one", "one", "", 1),
        ("numbers", "none, or one", "none", "", 0),
        ("things", "milk and apple", "apple,milk", "", 1),
        ("things", "milk", "apple,milk", "", 0),
        ("things", "apple, milk, football", "apple,milk", "", 0),
        ("things", "apple, milk", "milk", "", 0),
        ("things", "nothing", "nothing", "", 1),
    ],
)
def test_an_answer_is_right_by_its_labels(metric, said, gold, question, worth):
    found = metrics.score(said, [gold], f"babilong_{metric}", "plain", question)
    assert found == metrics.Score(worth, "")


def test_thinking_does_not_count():
    thought = "<think>It was the garden. Or not.</think>The office"
    assert metrics.score(thought, ["office"], "babilong_places", "plain").value == 1


@pytest.mark.parametrize("name", long_context.LABELS)
def test_every_label_is_worth_1_alone_and_nothing_beside_another(name):
    for label in long_context.LABELS[name]:
        metrics.check_gold([label], name)
        for other in {*long_context.LABELS[name]} - {label}:
            assert metrics.METRICS[name](f"{label} {other}", [label]) == 0
