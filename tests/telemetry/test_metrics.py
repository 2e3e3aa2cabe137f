"""A run's numbers survive a kill, and a resumed run's file equals the uninterrupted one."""

import math
from pathlib import Path

import pytest

from notepad_jax.telemetry import metrics
from notepad_jax.telemetry.metrics import RunLog, read_metrics
from notepad_jax.telemetry.sinks import Sinks
from tests import limits

NOWHERE = Sinks((), Path(), {}, print)


def write_steps(log, steps):
    for step in steps:
        log.write(step, {"reward": step / 3, "kept": step}, {"seconds": 0.1})


def test_a_resumed_run_writes_the_same_file(tmp_path):
    with RunLog(tmp_path / "whole", NOWHERE) as log:
        write_steps(log, range(6))
    with RunLog(tmp_path / "killed", NOWHERE) as log:
        write_steps(log, range(4))
    file = tmp_path / "killed" / metrics.METRICS
    file.write_text(file.read_text() + '{"step": 4, "rew')  # killed in the middle of a line
    assert [line["step"] for line in read_metrics(tmp_path / "killed")] == [0, 1, 2, 3]
    with RunLog(tmp_path / "killed", NOWHERE, 2) as log:
        write_steps(log, range(2, 6))
    for name in (metrics.METRICS, metrics.TIMINGS):
        whole = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "killed" / name).read_bytes() == whole
    assert len(read_metrics(tmp_path / "killed", metrics.TIMINGS)) == 6


def test_two_runs_are_not_mixed(tmp_path):
    with RunLog(tmp_path, NOWHERE) as log:
        write_steps(log, [7])
    with pytest.raises(ValueError, match="1 lines of metrics, the last of step 7; resume"):
        RunLog(tmp_path, NOWHERE)


def test_lines_are_there_before_the_run_ends(tmp_path):
    log = RunLog(tmp_path, NOWHERE)
    log.write(0, {"reward": 0.5})
    assert read_metrics(tmp_path) == [{"step": 0, "reward": 0.5}]
    assert not (tmp_path / metrics.TIMINGS).read_text()
    log.close()


def test_numbers_that_json_does_not_know(tmp_path):
    with RunLog(tmp_path, NOWHERE) as log:
        log.write(0, {"loss": math.nan, "ratio": math.inf})
        with pytest.raises(ValueError, match="metric 'loss' is 'high'"):
            log.write(1, {"loss": "high"})
    assert "NaN" not in (tmp_path / metrics.METRICS).read_text()
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["loss"]) and line["ratio"] == math.inf


def test_tensorboard_events_are_written(tmp_path):
    with RunLog(tmp_path, NOWHERE) as log:
        log.write(0, {"groups/kept": 3}, {"rollout_s": 1.5}, texts={"reading": "**gold** red"})
    (events,) = (tmp_path / metrics.EVENTS).iterdir()
    for told in (b"groups/kept", b"rollout_s", b"reading/text_summary", b"**gold** red"):
        assert told in events.read_bytes()


@pytest.mark.parametrize("torn", [b'{"step": 1, "rew', b'{"reward": 1.0}', b"[]", b"\xff\xfe", b""])
def test_a_damaged_line_that_is_not_the_last_is_named(tmp_path, torn):
    with RunLog(tmp_path, NOWHERE) as log:
        write_steps(log, range(3))
    lines = (tmp_path / metrics.METRICS).read_bytes().splitlines()
    whole = b"\n".join([lines[0], torn, lines[2], b""])
    (tmp_path / metrics.METRICS).write_bytes(whole)
    for use in (read_metrics, lambda folder: RunLog(folder, NOWHERE, 1)):
        with pytest.raises(ValueError, match="^line 2 of .*/metrics.jsonl is damaged; take it out"):
            use(tmp_path)
    assert (tmp_path / metrics.METRICS).read_bytes() == whole


def test_a_disk_that_is_full_ends_the_run_and_harms_no_line(tmp_path):
    """At every size that the first step's files pass through, TensorBoard's among them."""
    with RunLog(tmp_path / "whole", NOWHERE) as log:
        write_steps(log, range(4))
    whole = (tmp_path / "whole" / metrics.METRICS).read_bytes()
    for size in range(0, 400, 20):
        folder = tmp_path / str(size)
        with limits.largest_file(size), pytest.raises(OSError, match="File too large"):
            with RunLog(folder, NOWHERE) as log:
                write_steps(log, range(100))
        done = len(read_metrics(folder))
        with RunLog(folder, NOWHERE, done) as log:
            write_steps(log, range(done, 4))
        assert (folder / metrics.METRICS).read_bytes() == whole
    with limits.largest_file(100), pytest.raises(OSError, match="File too large"):
        RunLog(folder, NOWHERE, 3)
    assert (folder / metrics.METRICS).read_bytes() == whole
