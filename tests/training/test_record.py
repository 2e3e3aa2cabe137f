"""What a run was asked to do stands in a file that is only appended to."""

import contextlib
import json
import shutil

import pytest

from notepad_jax import keys
from notepad_jax.setup import configuration
from notepad_jax.telemetry import lines
from notepad_jax.telemetry.identity import write_sealed
from notepad_jax.training import record
from notepad_jax.training.record import Change

CONFIG = configuration.load("quickstart")


def test_changes_are_added_to_what_it_began_with(tmp_path):
    folder = tmp_path / "run"
    record.begin(folder, CONFIG)
    begun = (folder / record.FILE).read_bytes()
    record.begin(folder, configuration.load("quickstart", ["--config.steps=9"]))  # it has begun
    record.change(folder, 0, CONFIG, {})
    assert (folder / record.FILE).read_bytes() == begun
    other = configuration.changed(CONFIG, ["--config.steps=9", "--config.sinks=mlflow"])
    record.change(folder, 3, other, {"steps": 1000})  # by an editor: it goes on with 9
    record.change(folder, 5, CONFIG, keys.plain(other))
    assert (folder / record.FILE).read_bytes().startswith(begun)
    history = record.read(folder)
    first, second = history.changes
    assert (first.step, second.step) == (3, 5) and first.date.endswith("UTC") and first.commit
    assert first.changed == {"sinks": ([], ["mlflow"]), "steps": (CONFIG.steps, 9)}
    assert second.changed == {"sinks": (["mlflow"], []), "steps": (9, CONFIG.steps)}
    assert history.now == history.begun == json.loads(json.dumps(keys.flat(keys.plain(CONFIG))))


def test_a_run_of_an_earlier_version_has_no_beginning(tmp_path):
    said = keys.plain(configuration.changed(CONFIG, ["--config.steps=9"]))
    record.change(tmp_path, 3, CONFIG, said)
    history = record.read(tmp_path)
    assert history.begun is None and history.now is None
    assert [one.changed for one in history.changes] == [{"steps": (9, CONFIG.steps)}]
    assert record.read(tmp_path / "nowhere") == record.History(None, (), {})


def test_a_setting_is_that_of_the_time_when_a_version_read_also_after_going_back(tmp_path):
    record.begin(tmp_path, CONFIG)
    other = configuration.changed(CONFIG, ["--config.rollout.temperature=0.7"])
    was = CONFIG.rollout.temperature
    at = lambda version: record.read(tmp_path).at(version, "rollout.temperature", None)  # noqa: E731
    record.change(tmp_path, 10, other, {})
    assert [at(version) for version in (0, 9, 10, 20)] == [was, was, 0.7, 0.7]
    record.change(tmp_path, 5, other, {})
    assert [at(version) for version in (0, 4, 5, 7, 20)] == [was, was, 0.7, 0.7, 0.7]
    record.change(tmp_path, 8, CONFIG, {})
    assert [at(version) for version in (4, 7, 8, 20)] == [was, 0.7, was, was]
    assert len(record.shown(tmp_path)) == 2  # going back changed nothing


def test_steps_that_are_gone_are_missed(tmp_path):
    record.begin(tmp_path, CONFIG)
    where, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    write_sealed(tmp_path / "config.json", keys.plain(CONFIG))
    for done, there, missed in ((0, [], ""), (5, [], "has no steps"), (5, [0, 3], ""),
                                (5, [0, 2], "step 2: bring the later .* --step 2")):  # fmt: skip
        shutil.rmtree(where, ignore_errors=True)
        for step in there:
            (where / str(step)).mkdir(parents=True)
        metrics.write_bytes(b"".join(lines.sealed({"step": k + 1}) for k in range(done)))
        with pytest.raises(ValueError, match=missed) if missed else contextlib.nullcontext():
            record.check_steps(tmp_path, where)


def test_a_line_that_a_kill_cut_is_written_over_and_a_damaged_one_is_named(tmp_path):
    record.begin(tmp_path, CONFIG)
    path = tmp_path / record.FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "at')
    other = configuration.changed(CONFIG, ["--config.steps=9"])
    record.change(tmp_path, 3, other, {})
    (change,) = record.read(tmp_path).changes
    assert isinstance(change, Change) and change.changed["steps"][1] == 9
    path.write_bytes(path.read_bytes().replace(b'"steps": [', b'"stops": ['))
    with pytest.raises(ValueError, match="line 2 of .*history.jsonl is damaged, .* take it out"):
        record.read(tmp_path)
