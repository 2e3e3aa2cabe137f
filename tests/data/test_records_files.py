"""Samples out of task files: balanced by weight, exact to resume, disjoint and complete."""

import collections
import hashlib
import itertools
import json

import pytest

from notepad_jax.data import files
from notepad_jax.data.records import Records, of_files
from notepad_jax.data.task_sources import TaskFile, TaskSources, by_source
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import Task, TextDocument


def pairs(source: str, count: int) -> list[tuple[Task, int]]:
    document = TextDocument("text")
    return [(Task(f"{source}{k}", "q?", document, ("x",), source, "em"), 1) for k in range(count)]


def stored(tasks: dict[str, list[tuple[Task, int]]]) -> TaskSources:
    """These tasks as if each source stood in a file of its own."""
    digests = {name: hashlib.sha256(repr(own).encode()).hexdigest() for name, own in tasks.items()}
    return TaskSources(tasks, {name: (TaskFile(f"{name}.jsonl", digests[name]),) for name in tasks})


def mix(**counts: int) -> TaskSources:
    return stored({name: pairs(name, count) for name, count in counts.items()})


def draw(records: Records, count: int, first: int = 0) -> list[str]:
    return [records.at(ordinal)[0].id for ordinal in range(first, first + count)]


# ---------------------------------------------------------------- balance


def test_sources_take_turns_whatever_their_size():
    drawn = draw(of_files(mix(a=3, b=400, c=40), 0), 300)
    assert collections.Counter(name[0] for name in drawn) == {"a": 100, "b": 100, "c": 100}
    for start in range(0, 300, 30):  # and not only in the end
        part = collections.Counter(name[0] for name in drawn[start : start + 30])
        assert part == {"a": 10, "b": 10, "c": 10}


def test_weights_are_shares():
    records = of_files(mix(a=40, b=40, c=40, d=40), 0, {"a": 2, "b": 0.5, "d": 0})
    drawn = collections.Counter(name[0] for name in draw(records, 350))
    assert drawn == {"a": 200, "b": 50, "c": 100}  # 2 : 0.5 : 1 of 3.5


def test_every_task_of_a_source_comes_once_before_one_comes_twice_and_anew_shuffled():
    drawn = draw(of_files(mix(a=12, b=5), 7), 120)
    for name, count in (("a", 12), ("b", 5)):
        own = [task for task in drawn if task[0] == name]
        rounds = [own[k : k + count] for k in range(0, 60, count)]
        assert all(sorted(one) == sorted(rounds[0]) for one in rounds)
        assert len(set(map(tuple, rounds))) > 1


def test_sources_of_one_size_are_not_shuffled_alike():
    drawn = draw(of_files(mix(a=30, b=30), 1), 60)
    assert [name[1:] for name in drawn[::2]] != [name[1:] for name in drawn[1::2]]


def test_seeds_differ_and_are_all_there_is_to_it():
    first, again, other = (of_files(mix(a=50, b=50), seed) for seed in (1, 1, 2))
    drawn = draw(first, 100)
    assert drawn == draw(again, 100)
    assert sum(x == y for x, y in zip(drawn, draw(other, 100), strict=True)) < 20  # expected: 2


# ---------------------------------------------------------------- other streams


def test_a_foreign_state_is_refused_by_name():
    saved = json.loads(json.dumps(of_files(mix(a=4, b=4), 5).identity))
    of_files(mix(a=4, b=4), 5).check(saved)
    for other, name in (
        (of_files(mix(a=4, b=4), 6), "seed = 5 and the run has 6"),
        (of_files(mix(a=4, b=4), 5, {"a": 2}), "weights"),
    ):
        with pytest.raises(ValueError, match=f"saved with {name}"):
            other.check(saved)


# ---------------------------------------------------------------- settings and files


@pytest.mark.parametrize(
    "sources, weights, message",
    [
        (mix(a=2), {"z": 1}, "no source 'z' to weigh; there are a"),
        (mix(a=2), {"a": -1}, "the weight of 'a' is -1"),
        (mix(a=2), {"a": float("nan")}, "the weight of 'a' is nan"),
        (mix(a=2), {"a": 0}, "no source to draw from"),
        (stored({}), {}, "no source to draw from"),
    ],
)
def test_settings_are_checked(sources, weights, message):
    with pytest.raises(ValueError, match=message):
        of_files(sources, 0, weights)
    with pytest.raises(ValueError, match="the data seed is -1"):
        of_files(mix(a=2), -1)


def test_files_are_sorted_by_source_and_read_lazily(tmp_path):
    mixed = [task for both in zip(pairs("a", 3), pairs("b", 3), strict=True) for task, _ in both]
    files.write(tmp_path / "mixed.jsonl", mixed, itertools.repeat(1))
    files.write(tmp_path / "c.array_record", [task for task, _ in pairs("c", 4)], [1] * 4)
    paths = [tmp_path / "mixed.jsonl", tmp_path / "c.array_record"]
    sources = by_source(paths, SilentScreen())
    assert {name: len(tasks) for name, tasks in sources.tasks.items()} == {"a": 3, "b": 3, "c": 4}
    records = of_files(sources, 0)
    samples = [records.at(ordinal) for ordinal in range(12)]
    assert {sample[0].source for sample in samples} == {"a", "b", "c"}
    assert all("".join(sample[0].document.pieces()) == "text" for sample in samples)


def test_a_task_in_two_files_is_named(tmp_path):
    for name in ("1", "2"):
        files.write(tmp_path / f"{name}.jsonl", [pairs("a", 1)[0][0]], [1])
    with pytest.raises(ValueError, match="2.jsonl has task 'a0', and so has .*1.jsonl"):
        by_source([tmp_path / "1.jsonl", tmp_path / "2.jsonl"], SilentScreen())
    with pytest.raises(ValueError, match="1.jsonl"):
        by_source([tmp_path / "1.jsonl", tmp_path / "1.jsonl"], SilentScreen())
