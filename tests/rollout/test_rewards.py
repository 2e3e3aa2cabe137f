"""The reward is the task's metric of the answer that its contract finds; the rest is counted."""

import asyncio
import dataclasses

import fakes
import pytest

import notepad_jax as nj
from notepad_jax import functions
from notepad_jax.rollout import rewards
from notepad_jax.rollout.rewards import score
from notepad_jax.scoring.reading_record import MemoryRecord, ReadingRecord, Recorder
from notepad_jax.types import Evidence, Finish, Reading, Status, Task, TextDocument, TurnKind
from tests.rollout import made


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


def test_labels_of_the_question_do_not_count_where_the_metric_looks_at_it():
    said = "Before the kitchen it was in the office"
    for question, reward in (("Where before the kitchen?", 1.0), ("Where?", 0.0)):
        task = Task("t", question, TextDocument("x"), ("office",), "test", "babilong_places")
        assert score(Reading("t", 0, (), said, Status.ANSWERED), task).reward == reward


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


class Shown:
    """A reading of three chunks, without its turns."""

    memories = ("nobody", "it was ann", "ann")

    def texts(self, reading):
        return list(self.memories)

    def record(self, reading, task):
        recorder = Recorder(task, lambda memory: str(memory[0]))
        for text in self.memories:
            recorder.turn(made.turn(TurnKind.UPDATE, "bob"), [text, 0])
        return recorder.record(reading.sample, reading.answer, reading.status.value, (4, 4, 2))


def of_group(scoring, task, *answers):
    readings = [Reading("t", k, (), said, Status.ANSWERED) for k, said in enumerate(answers)]
    return asyncio.run(scoring.of_group(readings, task))


def test_memories_are_judged_as_answers_that_say_them():
    """By a metric of its own, by a function, or by both; the answer's own reward stays."""
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "test", "em", "boxed")

    def short(reading):
        assert reading.row["answers"] == ["ann"] and reading.document_tokens == 10
        return [1 / len(memory.text.split()) for memory in reading.memories]

    plain = rewards.Scoring(score, shown=Shown())
    with functions.lending([short]) as (name,):
        for said, worth in (
            ("sub_em", (0.0, 1.0, 1.0)),
            ("em", (0.0, 0.0, 1.0)),
            (name, (1.0, 1 / 3, 1.0)),
            (f"{name}=3,em=1", (0.75, 0.25, 1.0)),
        ):
            (found,) = of_group(rewards.with_memories(plain, said), task, r"\boxed{bob}")
            assert found.memory_rewards == pytest.approx(worth)
            assert found.reward_parts["memories"] == pytest.approx(sum(worth) / 3)
            assert (found.judged, found.reward) == (0.0, 0.0)
    assert rewards.with_memories(plain, "") is plain
    with pytest.raises(ValueError, match="tasks.memory_reward has 'em=0'; write NAME=WEIGHT"):
        rewards.with_memories(plain, "em=0")


def test_a_reward_may_say_a_number_for_each_turn_and_weights_are_of_those():
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "test", "em")

    def each(reading):
        return [0.25, 0.5, 1.0, 0.75]

    with functions.lending([each]) as (name,):
        for said, answer, worth in (
            (name, 0.75, (0.25, 0.5, 1.0)),
            (f"{name}=3,em=1", (3 * 0.75 + 1) / 4, (0.1875, 0.375, 0.75)),
        ):
            scoring = rewards.of(said, shown=Shown())
            (found,) = of_group(scoring, task, "ann")
            assert found.judged == answer and found.memory_rewards == pytest.approx(worth)
            (both,) = of_group(rewards.with_memories(scoring, "em"), task, "ann")
            assert both.memory_rewards == pytest.approx([*worth[:2], worth[2] + 1])


def test_a_batch_is_the_readings_of_one_question_and_the_metric_stays_beside():
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "test", "em")
    seen = []

    @nj.reward(batch=True)
    def ranked(readings):
        seen.append([(reading.sample, reading.answer) for reading in readings])
        return [k / 10 for k in range(len(readings))]

    with functions.lending([ranked]) as (name,):
        found = of_group(rewards.of(name, shown=Shown()), task, "ann", "bob", "ann")
    assert seen == [[(0, "ann"), (1, "bob"), (2, "ann")]]
    assert [one.judged for one in found] == [0.0, 0.1, 0.2]
    assert [one.reward_parts["em"] for one in found] == [1.0, 0.0, 1.0]


def test_what_is_shown_is_played_again_memory_by_memory_with_the_facts_it_held():
    evidence = (Evidence("red", 0.1), Evidence("blue", 0.5))
    task = Task("t", "who ?", TextDocument("."), ("ann",), "test", "em", evidence=evidence)
    task = dataclasses.replace(task, extra={"level": 3})
    cut = made.turn(TurnKind.UPDATE, "blue says red", finish=Finish.LENGTH)
    turns = (made.turn(TurnKind.UPDATE, "code red"), cut, made.turn(TurnKind.ANSWER, "ann"))
    reading = Reading("t", 2, turns, "ann", Status.TRUNCATED, (4, 3))
    shown = rewards.Shown(fakes.tokenizer(), fakes.template(), fakes.rules())
    assert shown.texts(reading) == ["code red", "blue says red"]
    assert shown.record(reading, task) == ReadingRecord(
        "ann",
        {"id": "t", "question": "who ?", "answers": ["ann"], "source": "test", "metric": "em",
         "level": 3},
        (
            MemoryRecord("code red", 2, 3, False, 4, (True, False)),
            MemoryRecord("blue says red", 3, 3, True, 3, (True, True)),
        ),
        2, "truncated", ("red", "blue"), 2,
    )  # fmt: skip


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


def by_length(reading):
    return min(1.0, len(reading.answer) / reading.row["longest"])


def test_functions_and_metrics_by_weight():
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "test", "em", extra={"longest": 6})
    with functions.lending([by_length]) as (name,):
        (alone,) = of_group(rewards.of(name, shown=Shown()), task, "ann")
        (both,) = of_group(rewards.of(f"{name}=3, em=1", shown=Shown()), task, "ann")
    assert alone.reward == 0.5 and both.reward == (3 * 0.5 + 1) / 4
    assert both.reward_parts["reward/em"] == both.reward_parts["em"] == 1.0
    assert both.reward_parts[f"reward/{name}"] == 0.5


@pytest.mark.parametrize("said", ["em=0", "em=much,sub_em=1", "em=1,sub_em", "=1", "em=nan,em=1"])
def test_weights_that_cannot_be_are_named(said):
    with pytest.raises(ValueError, match="tasks.reward has .*; write NAME=WEIGHT"):
        rewards.of(said)
    with pytest.raises(ValueError, match="tasks.reward has 'em' twice; say it once"):
        rewards.of("em=0.2,sub_em=0.6, em=0.2")
