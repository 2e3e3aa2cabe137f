"""The reward is the task's metric of the answer that its contract finds; the rest is counted."""

import pytest

from notepad_jax import functions
from notepad_jax.rollout import rewards
from notepad_jax.rollout.rewards import score
from notepad_jax.types import Reading, Status, Task, TextDocument


def scored(answer, metric="em", contract="plain", status=Status.ANSWERED, answers=("ann",)):
    task = Task("t", "who ?", TextDocument("ann"), answers, "test", metric, contract)
    return score(Reading("t", 0, (), answer, status), task)


@pytest.mark.parametrize(
    ("answer", "metric", "contract", "reward", "malformed"),
    [
        ("ann", "em", "plain", 1, 0),
        ("bob", "em", "plain", 0, 0),
        ("", "em", "plain", 0, 0),
        (r"\boxed{ann}", "em", "boxed", 1, 0),
        ("ann", "em", "boxed", 0, 1),
        ("<think>ann", "sub_em", "plain", 0, 1),
        ("ann", "numeric", "plain", 1, 0),  # the very words
        ("bob", "numeric", "plain", 0, 1),
    ],
)
def test_rewards_and_malformed_answers(answer, metric, contract, reward, malformed):
    trajectory = scored(answer, metric, contract)
    assert trajectory.reward == reward
    assert trajectory.reward_parts["malformed"] == malformed
    assert trajectory.reward_parts["empty"] == (answer == "")


def test_parts_are_of_the_answer_found():
    parts = scored("<think>bob</think> The ANN!").reward_parts
    assert (parts["em"], parts["normalised_em"]) == (0.0, 1.0)
    assert scored(r"it is \boxed{ann}", contract="boxed").reward_parts["em"] == 1.0


def test_a_truncated_answer_is_scored_as_it_is():
    truncated = scored("ann", status=Status.TRUNCATED)
    assert truncated.reward == truncated.reward_parts["truncated"] == 1.0


@pytest.mark.parametrize("status", Status)
def test_an_unknown_metric_or_contract_is_an_error_whatever_was_read(status):
    with pytest.raises(ValueError, match="no metric 'bleu'"):
        scored("ann", metric="bleu", status=status)
    with pytest.raises(ValueError, match="no contract 'json'"):
        scored("ann", contract="json", status=status)


def test_a_run_may_reward_all_tasks_by_one_metric():
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "test", "sub_em", "tag")
    reading = Reading("t", 0, (), r"it is \boxed{ann}", Status.ANSWERED)
    assert rewards.by("")(reading, task).reward == 0.0  # its own: no <answer>
    assert rewards.by("boxed")(reading, task).reward == 1.0
    with pytest.raises(ValueError, match="no metric 'blue'; use one of em, .*, or published$"):
        rewards.by("blue")


def test_memories_are_judged_as_answers_that_say_them():
    """By a metric of its own, by a function, or by both; the answer's own reward stays."""
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "test", "em", "boxed")
    reading = Reading("t", 0, (), r"\boxed{bob}", Status.ANSWERED)
    told = lambda reading: ["nobody", "it was ann", "ann"]  # noqa: E731

    def short(memory, row):
        assert row["answers"] == ["ann"]
        return 1 / len(memory.split())

    with functions.lending([short]) as (name,):
        for said, worth in (
            ("sub_em", (0.0, 1.0, 1.0)),
            ("em", (0.0, 0.0, 1.0)),
            (name, (1.0, 1 / 3, 1.0)),
            (f"{name}=3,em=1", (0.75, 0.25, 1.0)),
        ):
            judge = rewards.of(said, rewards.MEMORY_KEY)
            found = rewards.with_memories(score, judge, told)(reading, task)
            assert found.memory_rewards == pytest.approx(worth)
            assert found.reward_parts["memories"] == pytest.approx(sum(worth) / 3)
            assert (found.judged, found.reward) == (0.0, 0.0) == (score(reading, task).reward,) * 2
    assert rewards.with_memories(score, score, lambda _: [])(reading, task).memory_rewards == ()
    with pytest.raises(ValueError, match="tasks.memory_reward has 'em=0'; write NAME=WEIGHT"):
        rewards.of("em=0", rewards.MEMORY_KEY)


def test_a_task_that_wants_all_its_answers_keeps_its_metric():
    task = Task("t", "who ?", TextDocument("ann"), ("ann", "bob"), "test", "set_f1", "auto")
    reading = Reading("t", 0, (), r"\boxed{ann}", Status.ANSWERED)
    assert rewards.by("boxed")(reading, task).reward == pytest.approx(2 / 3)


def test_a_run_may_reward_by_what_was_published_under_each_name():
    def reward(metric, contract, answers, answer):
        task = Task("t", "who ?", TextDocument("ann"), answers, "test", metric, contract)
        reading = Reading("t", 0, (), answer, Status.ANSWERED)
        return rewards.by("")(reading, task).reward, rewards.by("published")(reading, task).reward

    four = ("a", "b", "c", "d")
    assert reward("pairwise", "auto", four, "a\nb") == (pytest.approx(1 / 6), 1.0)
    assert reward("boxed", "plain", ("90",), r"\boxed{90^\circ}") == (0.0, 1.0)
    assert reward("numeric", "auto", ("4",), r"\boxed{4.0}") == (1.0, 1.0)  # has no twin


def by_length(answer, row):
    return min(1.0, len(answer) / row["longest"])


def test_functions_and_metrics_by_weight():
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "test", "em", extra={"longest": 6})
    reading = Reading("t", 0, (), "ann", Status.ANSWERED)
    with functions.lending([by_length]) as (name,):
        assert rewards.of(name)(reading, task).reward == 0.5
        both = rewards.of(f"{name}=3, em=1")(reading, task)
    assert both.reward == (3 * 0.5 + 1) / 4
    assert both.reward_parts["reward/em"] == both.reward_parts["em"] == 1.0
    assert both.reward_parts[f"reward/{name}"] == 0.5


@pytest.mark.parametrize("said", ["em=0", "em=much,sub_em=1", "em=1,sub_em", "=1", "em=nan,em=1"])
def test_weights_that_cannot_be_are_named(said):
    with pytest.raises(ValueError, match="tasks.reward has .*; write NAME=WEIGHT"):
        rewards.of(said)
