"""Readings on disk: nothing lost, nothing twice. (The file itself: tests/reading/test_trace.py.)"""

import dataclasses
import json

import pytest

from notepad_jax.eval.readings import READINGS, Readings
from notepad_jax.reading.trace import Trace
from notepad_jax.reading.turns import Turns
from notepad_jax.text.pieces import Pieces
from tests import fakes
from tests.eval.reading import items, read, task
from tests.eval.test_measure import Failing

PLANNED = items(task("a", "red is blue of"), task("b", "blue is red of"), task("c", "ann is"))


def read_into(folder, planned, completer):
    with Readings(folder, {"policy": "fake"}) as readings:
        left = readings.missing(planned)
        read(left, completer, trace_of=readings.trace_of, on_result=readings.add)
        return left, readings.of(planned), [list(readings.trace(r)) for r in readings.of(planned)]


def test_readings_and_traces_come_back(tmp_path):
    _, results, traces = read_into(tmp_path, PLANNED, fakes.first_of_chunk())
    assert [[c.memory for c in trace] for trace in traces] == [
        ["red", "blue"],
        ["blue", "red"],
        ["ann"],
    ]
    left, again, same = read_into(tmp_path, PLANNED, fakes.empty())
    assert left == [] and again == results and same == traces


def test_turns_are_kept_of_those_that_are_asked_for(tmp_path):
    with Readings(tmp_path, {"policy": "fake"}) as readings:
        pieces = Pieces(fakes.tokenizer())
        readings.keep_turns(PLANNED[1:2], lambda: Turns(pieces, fakes.rules(), fakes.template()))
        read(PLANNED, fakes.first_of_chunk(), trace_of=readings.trace_of, on_result=readings.add)
        (result,) = readings.of(PLANNED[1:2])
    with Trace(tmp_path / READINGS) as trace:
        found = {whole.reading["task_id"]: whole for whole in map(trace.whole, range(len(trace)))}
    assert {name for name, whole in found.items() if whole.turns} == {"b"}
    turns, pieces = found["b"].turns, found["b"].pieces
    assert [(turn.chunk, turn.kind) for turn in turns] == [
        (0, "update"), (1, "update"), (2, "answer"),
    ]  # fmt: skip
    assert "".join(pieces[token] for token in turns[0].shared).split()[-2:] == ["blue", "is"]
    assert "".join(pieces[token] for token in turns[2].tokens[:-1]).strip() == result.answer
    # They are no part of what the folder goes on from.
    left, again, _ = read_into(tmp_path, PLANNED, fakes.empty())
    assert left == [] and again[1] == result


def test_after_a_kill_only_what_is_missing_is_read_again(tmp_path):
    _, results, traces = read_into(tmp_path, PLANNED, fakes.first_of_chunk())
    lines = (tmp_path / READINGS).read_bytes().splitlines(keepends=True)
    first = json.loads(lines[0])["reading"]["task_id"]  # the one that ended first
    for cut in (0, 1, 17, len(lines[1]) - 1):
        (tmp_path / READINGS).write_bytes(lines[0] + lines[1][:cut])
        left, again, same = read_into(tmp_path, PLANNED, fakes.first_of_chunk())
        assert [item.task.id for item in left] == [n for n in "abc" if n != first]
        timeless = lambda r: r.__class__(**{**vars(r), "began": 0, "seconds": 0})  # noqa: E731
        assert list(map(timeless, again)) == list(map(timeless, results))
        assert [[c.memory for c in t] for t in same] == [[c.memory for c in t] for t in traces]


def test_what_failed_is_read_again(tmp_path):
    _, results, _ = read_into(tmp_path, PLANNED, Failing("ann"))
    assert [r.failed for r in results] == [False, False, True]
    left, results, _ = read_into(tmp_path, PLANNED, fakes.first_of_chunk())
    assert [item.task.id for item in left] == ["c"] and not any(r.failed for r in results)


def test_readings_of_changed_gold_answers_are_refused(tmp_path):
    read_into(tmp_path, PLANNED, fakes.first_of_chunk())
    changed = items(task("a", "red is blue of", "blue"))
    says = " was read in .* with another question, other gold answers or another metric"
    with pytest.raises(ValueError, match=f"'a'{says}"):
        read_into(tmp_path, changed, fakes.first_of_chunk())
    first = PLANNED[0]
    other = dataclasses.replace(first, task=dataclasses.replace(first.task, metric="token_f1"))
    with pytest.raises(ValueError, match=f"{first.task.id!r}{says}"):
        read_into(tmp_path, [other], fakes.first_of_chunk())


def test_a_line_that_is_no_reading_is_named(tmp_path):
    (tmp_path / READINGS).write_text(
        json.dumps({"reading": {"answer": "red"}, "memories": []}) + "\n"
    )
    with pytest.raises(ValueError, match="line 1 of .*readings.jsonl is no reading"):
        Readings(tmp_path, {})


def test_readings_of_another_kind_are_not_mixed_in(tmp_path):
    read_into(tmp_path, PLANNED, fakes.first_of_chunk())
    with pytest.raises(ValueError, match="made with policy = 'fake', and now it is 'other'; begin"):
        Readings(tmp_path, {"policy": "other"})


def test_a_folder_older_than_a_name_has_the_value_that_it_had_then(tmp_path):
    read_into(tmp_path, PLANNED, fakes.first_of_chunk())
    known = json.loads((tmp_path / "identity.json").read_text())
    with Readings(tmp_path, {**known, "reading.heads": 1}) as readings:
        assert not readings.missing(PLANNED)
    with pytest.raises(ValueError, match="made with reading.heads = 1, and now it is 2"):
        Readings(tmp_path, {**known, "reading.heads": 2})
