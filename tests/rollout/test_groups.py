"""What a rollout sampled, in numbers; the archive of it."""

import dataclasses

import fakes
import numpy as np
import pytest

from notepad_jax.reading.loop import Reader
from notepad_jax.reading.trace import TraceFile
from notepad_jax.rollout import archive
from notepad_jax.rollout.groups import MOST, GroupStats, ages, by_task, measure, mixture
from notepad_jax.rollout.rewards import score
from notepad_jax.types import Reading, Status
from tests.rollout.made import group, task

READER = Reader(None, fakes.tokenizer(), fakes.template(), fakes.rules(), None, None)


def test_what_was_sampled_is_counted():
    groups = [group(1, 1), group(0, 1), group(0, 0), group(0.5, 0.5)]
    stats = measure(groups, failed=1)
    assert (stats.groups_sampled, stats.groups_informative, stats.groups_failed) == (5, 1, 1)
    assert (stats.dropped_all_right, stats.dropped_all_wrong, stats.dropped_all_equal) == (1, 1, 1)
    assert stats.trajectories == 8 and stats.informative_share == 1 / 5
    metrics = stats.metrics()
    assert metrics["reward"] == pytest.approx((2 + 1 + 0 + 1) / 8)
    assert metrics["groups/informative_share"] == 1 / 5
    assert metrics["rollout/memory_tokens"] == 3  # "the code" and the stop token
    assert metrics["rollout/answer_tokens"] == 2


def test_sums_add_up_and_divide_once():
    parts = [measure([group(1, 0)]), measure([group(1, 1, 1)])]
    both = measure([group(1, 0), group(1, 1, 1)])
    assert parts[0] + parts[1] == both
    assert both.metrics()["accuracy"] == pytest.approx(4 / 5)
    assert GroupStats().metrics()["reward"] == 0.0


def of(source, *rewards, **more):
    made = group(*rewards, **more)
    return dataclasses.replace(made, task=dataclasses.replace(made.task, source=source))


def test_kinds_of_task_are_told_apart():
    """Of a: rewards 1, 0, 1, 1, a mean of 3/4 and a variance of 3/16, half of the groups."""
    metrics = measure([of("a", 1, 0), of("b/c", 0, 0), of("a", 1, 1)], failed=1).metrics()
    told = {name: value for name, value in metrics.items() if name.startswith("task/")}
    assert told == {
        "task/a/groups": 2,
        "task/a/informative_share": 0.5,
        "task/a/reward": 0.75,
        "task/a/reward_std": pytest.approx((3 / 16) ** 0.5),
        "task/b/c/groups": 1,
        "task/b/c/informative_share": 0,
        "task/b/c/reward": 0,
        "task/b/c/reward_std": 0,
    }
    assert metrics["reward_std"] == pytest.approx(0.5)
    assert GroupStats().metrics()["reward_std"] == 0


def test_kinds_of_task_do_not_depend_on_the_order_or_on_who_read_what():
    groups = [of("ab"[k % 2], k % 3, 1) for k in range(9)]
    whole = measure(groups).metrics()
    assert (measure(groups[:4]) + measure(groups[4:])).metrics() == pytest.approx(whole)
    assert measure(groups[::-1]).metrics() == pytest.approx(whole)


def test_many_kinds_of_task_are_the_largest_and_the_others():
    groups = [of(f"kind {k:02}", 1, 0) for k in range(30)] + [of("kind 29", 1, 1)]
    stats = measure(groups)
    named = by_task(stats.tasks, [of("waited", 1, 0), groups[0]])
    assert len(set(named.values())) == MOST + 1 and named["kind 29"] == "kind_29"
    assert named["kind 18"] == "kind_18" and named["kind 19"] == named["waited"] == "others"
    metrics = stats.metrics()
    assert sum(name.startswith("task/") for name in metrics) == 4 * (MOST + 1)
    assert metrics["task/others/groups"] == 10 and metrics["task/others/reward"] == 0.5
    assert metrics["task/kind_29/reward"] == 0.75
    assert by_task({}, [of("waited", 1, 0)]) == {"waited": "waited"}


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("synthetic/two_hop", "synthetic/two_hop"),
        ("../a b\n\x1b[31m", "a_b_31m"),
        ("數學", "others"),
        ("", "others"),
        ("x" * 200, "x" * 60),
    ],
)
def test_a_source_becomes_a_name_that_every_sink_takes(source, called):
    assert by_task(measure([of(source, 1, 0)]).tasks) == {source: called}


def test_ages_are_counted_from_the_oldest_turn():
    batch = [group(1, 0, versions=(3, 5)), group(1, 0, versions=(5, 5))]
    assert ages(batch, 5) == {"rollout/age_mean": 1.0, "rollout/age_max": 2}
    assert ages([], 5) == {}


def test_a_reading_counts_its_versions_and_each_turn_its_age():
    batch = [group(1, 0, versions=(3, 5)), group(1, 0, versions=(5, 5))]
    assert mixture(batch, 6) == {"rollout/versions": 1.5, "rollout/turn_age_mean": 1.5}
    assert mixture([], 5) == {}


@pytest.mark.parametrize("status", Status)
def test_truncated_answers_count(status):
    scored = score(Reading("t", 0, (), "ann", status), task())
    assert scored.reward == 1.0 == scored.reward_parts["em"]
    assert scored.reward_parts["answered"] == (status is Status.ANSWERED)
    assert scored.reward_parts["truncated"] == (status is Status.TRUNCATED)


def test_the_archive_shows_a_reading(tmp_path):
    path = tmp_path / "new" / archive.FILE
    with TraceFile(path) as file:
        made = group(1, 0, place=(7, 2), versions=(3, 4))
        first, second = made.trajectories
        made = dataclasses.replace(
            made, trajectories=(dataclasses.replace(first, memory_rewards=(0.5,)), second)
        )
        archive.append(file, [made], READER, 3, [], 0)
        (_, first), (_, second) = file.readings()
        assert first["memory_rewards"] == [0.5] and "memory_rewards" not in second
        assert (first["step"], first["ordinal"], first["question"]) == (3, 7, "who ?")
        assert (first["gold"], first["answer"], first["reward"]) == (["ann"], "ann", 1)
        assert (second["answer"], second["reward"], second["sample"]) == ("bob", 0, 1)
        assert first["policy_versions"] == [3, 4] and first["turns"] == 2
        (change,) = file.memories(0)
        assert (change.chunk, change.memory, change.tokens) == (0, "the code", 2)


def test_a_sample_is_markdown_in_which_no_text_is_markdown():
    shown = archive.sample(group(1, 0), READER)
    assert shown.startswith("**question**\n\n    who ?\n\n**last memory**\n\n    the code\n\n")
    assert shown.endswith("**gold**\n\n    ann\n\n**reward**\n\n    1")


def test_a_run_that_goes_on_takes_its_last_readings_back(tmp_path):
    with TraceFile(tmp_path / archive.FILE) as file:
        for step in (1, 2, 3):
            archive.append(file, [group(1, 0)], READER, step, [], 0)
        archive.take_back(file, 2)
        assert [reading["step"] for _, reading in file.readings()] == [1, 1]
        archive.append(file, [], READER, 2, [], 0)
        assert len(file) == 2


def test_turns_are_kept_token_by_token_and_what_a_group_shares_once(tmp_path):
    both = [group(1, 0, versions=(1, 2)), group(0, 1)]
    with TraceFile(tmp_path / archive.FILE) as file:
        archive.append(file, both, READER, 3, [np.array([0.5, -0.5]), np.array([-1.0, 1.0])], 1)
        first, second, third, _ = (file.whole(number) for number in range(4))
    assert [one.reading["advantage"] for one in (first, second, third)] == [0.5, -0.5, -1]
    assert first.reading["staleness"] == 1  # step 3 learns as version 2, and 1 was there
    assert not third.turns and not third.pieces
    turns = both[0].trajectories[1].turns
    for kept, shared, turn in zip(second.turns, first.turns, turns, strict=True):
        assert (kept.shared, kept.shared_of, shared.shared) == ([], 0, [300])
        assert (kept.tail, kept.tokens) == ([5], turn.completion.tokens.tolist())
        assert kept.logprobs == [-1.0] * len(kept.tokens)
        assert (kept.version, kept.finish) == (turn.completion.policy_version, "stop")
    said = "".join(second.pieces[token] for token in second.turns[1].tokens[:-1])
    assert said.strip() == "bob"


def test_the_trainers_logprobs_stand_beside_the_samplers_as_far_as_they_are_known(tmp_path):
    one = group(1, 0)
    turns = [turn for trajectory in one.trajectories for turn in trajectory.turns]
    known = [np.full(len(turn.completion.tokens), -k - 0.5) for k, turn in enumerate(turns[:3])]
    with TraceFile(tmp_path / archive.FILE) as file:
        archive.append(file, [one], READER, 1, [], 1, known)
        kept = [turn for number in (0, 1) for turn in file.whole(number).turns]
    assert [turn.proximal for turn in kept] == [list(one) for one in known] + [[]]


def test_a_turn_that_begins_with_a_memory_keeps_its_own_prompt_and_the_others_share(tmp_path):
    """As the contexts of an answer do where it may take several, and the second took two."""
    one = group(1, 0)
    second = one.trajectories[1]
    update, answer = second.turns
    ours = dataclasses.replace(
        answer, prompt=dataclasses.replace(answer.prompt, shared=np.array([300, 7], np.int32))
    )
    longer = dataclasses.replace(second.reading, turns=(update, ours, ours))
    members = one.trajectories[0], dataclasses.replace(second, reading=longer)
    with TraceFile(tmp_path / archive.FILE) as file:
        archive.append(file, [dataclasses.replace(one, trajectories=members)], READER, 1, [], 1)
        turns = file.whole(1).turns
    assert [turn.shared_of for turn in turns] == [0, None, None]
    assert [turn.shared for turn in turns] == [[], [300, 7], [300, 7]]
