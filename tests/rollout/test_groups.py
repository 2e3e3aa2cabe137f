"""Dynamic sampling, the staleness gate and the archive, on hand-made groups."""

import asyncio
import json

import fakes
import numpy as np
import pytest

from notepad_jax.rollout import archive
from notepad_jax.rollout.buffer import GroupBuffer, oldest_version
from notepad_jax.rollout.collector import Reader
from notepad_jax.rollout.groups import GroupStats, collect_informative, measure
from notepad_jax.rollout.rewards import score
from notepad_jax.types import (
    Completion,
    Finish,
    Group,
    Prompt,
    Reading,
    Status,
    Task,
    TextDocument,
    Trajectory,
    Turn,
    TurnKind,
    tokens,
)

READER = Reader(
    fakes.tokenizer(),
    fakes.template(),
    fakes.rules(),
    temperature=1.0,
    top_p=1.0,
    group_size=2,
    max_document=100,
)


def task(name: str = "t", answer: str = "ann") -> Task:
    return Task(name, "who ?", TextDocument("ann"), (answer,), "test", "em")


def turn(kind: TurnKind, text: str, version: int = 0, finish: Finish = Finish.STOP) -> Turn:
    ids = [*fakes.tokenizer().encode(text), *([2] if finish is Finish.STOP else [])]
    logprobs = np.full(len(ids), -1.0, np.float32)
    completion = Completion(tokens(ids), logprobs, finish, version)
    return Turn(kind, 0, Prompt(tokens([300]), tokens([5])), completion)


def trajectory(reward: float, name: str = "t", sample: int = 0, versions=(0, 0)) -> Trajectory:
    said = "ann" if reward else "bob"
    turns = (
        turn(TurnKind.UPDATE, "the code", versions[0]),
        turn(TurnKind.ANSWER, said, versions[1]),
    )
    reading = Reading(name, sample, turns, said, Status.ANSWERED)
    return Trajectory(reading, reward, score(reading, task(name)).reward_parts)


def group(*rewards: float, name: str = "t") -> Group:
    members = (trajectory(reward, name, k) for k, reward in enumerate(rewards))
    return Group(task(name), tuple(members))


def sample(script: list[list[Group]], wanted: int, rounds: int):
    """Runs dynamic sampling where each round's groups are given; returns the asks too."""
    asked: list[int] = []

    def next_tasks(missing: int):
        asked.append(missing)
        return [one.task for one in script[len(asked) - 1]] if len(asked) <= len(script) else []

    async def collect(tasks):
        return script[len(asked) - 1]

    kept, stats = asyncio.run(collect_informative(next_tasks, collect, wanted, rounds))
    return [one.task.id for one in kept], stats, asked


def test_uninformative_groups_are_replaced_and_counted():
    script = [
        [group(1, 1, name="a"), group(0, 1, name="b"), group(0, 0, name="c")],
        [group(1, 0, name="d"), group(0.5, 0.5, name="e")],
        [group(1, 0, name="f"), group(1, 0, name="g")],
    ]
    kept, stats, asked = sample(script, wanted=3, rounds=9)
    assert kept == ["b", "d", "f"]
    assert asked == [3, 2, 1]
    assert (stats.rounds, stats.groups_sampled, stats.groups_kept) == (3, 7, 3)
    assert (stats.groups_surplus, stats.trajectories) == (1, 14)
    assert (stats.dropped_all_right, stats.dropped_all_wrong, stats.dropped_all_equal) == (1, 1, 1)
    metrics = stats.metrics()
    assert metrics["reward"] == pytest.approx((2 + 1 + 0 + 1 + 1 + 1 + 1) / 14)
    assert metrics["groups/kept_share"] == pytest.approx(3 / 7)
    assert metrics["rollout/memory_tokens"] == 3  # "the code" and the stop token
    assert metrics["rollout/answer_tokens"] == 2


def test_rounds_are_bounded_and_data_may_end():
    script = [[group(1, 1)], [group(0, 0)], [group(0, 1)]]
    assert sample(script, wanted=1, rounds=2)[0] == []
    kept, stats, asked = sample(script[:1], wanted=2, rounds=5)
    assert kept == [] and stats.rounds == 1 and asked == [2, 2]
    kept, stats, _ = sample([[group(1, 0), group(1, 1)]], wanted=2, rounds=1)
    assert len(kept) == 1 and stats.rounds == 1
    with pytest.raises(ValueError, match="wanted_groups is 0"):
        sample([], wanted=0, rounds=1)


def test_sums_add_up_and_divide_once():
    parts = [measure([group(1, 0)]), measure([group(1, 1, 1)])]
    both = measure([group(1, 0), group(1, 1, 1)])
    assert parts[0] + parts[1] == both
    assert both.metrics()["accuracy"] == pytest.approx(4 / 5)
    assert GroupStats().metrics()["reward"] == 0.0


@pytest.mark.parametrize(
    ("status", "reward"),
    [(Status.ANSWERED, 1.0), (Status.TRUNCATED, 1.0), (Status.CANCELLED, 0.0)],
)
def test_truncated_answers_count_and_cancelled_ones_score_nothing(status, reward):
    scored = score(Reading("t", 0, (), "ann", status), task())
    assert scored.reward == reward == scored.reward_parts["em"]
    assert scored.reward_parts["answered"] == (status is Status.ANSWERED)
    assert scored.reward_parts["truncated"] == (status is Status.TRUNCATED)


def test_the_gate_goes_by_the_oldest_turn():
    mixed = Group(task(), (trajectory(1, versions=(5, 7)), trajectory(0, versions=(6, 7))))
    assert oldest_version(mixed) == 5
    buffer = GroupBuffer(max_staleness=2)
    buffer.add([mixed, group(1, 0)], now=7)
    assert (len(buffer), buffer.dropped_stale) == (1, 1)
    buffer.add([mixed], now=7)
    assert buffer.take(1, now=7) == [mixed]
    assert buffer.take(9, now=8) == []
    assert (len(buffer), buffer.dropped_stale) == (0, 2)
    with pytest.raises(ValueError, match="version 5, which is newer than the learner's 4"):
        buffer.add([mixed], now=4)
    with pytest.raises(ValueError, match="max_staleness is -1"):
        GroupBuffer(-1)


def test_the_archive_shows_a_reading(tmp_path):
    path = tmp_path / "new" / "readings.jsonl"
    assert archive.append(path, [group(1, 0)], READER, step=3) == 2
    first, second = archive.read(path)
    assert (first["step"], first["question"], first["answers"]) == (3, "who ?", ["ann"])
    assert (first["answer"], first["reward"], second["reward"]) == ("ann", 1, 0)
    assert [t["text"] for t in first["turns"]] == ["the code", "ann"]
    assert [t["memory"] for t in first["turns"]] == ["the code", "the code"]
    assert first["turns"][0]["kind"] == "update" and first["turns"][0]["tokens"] == 3


def test_the_archive_survives_a_cut_line(tmp_path):
    path = tmp_path / "readings.jsonl"
    archive.append(path, [group(1, 0)], READER, step=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(list(archive.read(path))) == 1
    archive.append(path, [group(1, 0)], READER, step=2)
    assert [entry["step"] for entry in archive.read(path)] == [1, 2, 2]
    assert archive.append(path, [], READER, step=3) == 0
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[-1])["step"] == 2
