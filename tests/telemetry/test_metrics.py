"""A run's numbers survive a kill, and a resumed run's file equals the uninterrupted one."""

import math

import pytest

from notepad_jax.telemetry import metrics
from notepad_jax.telemetry.metrics import RunLog, read_metrics


def write_steps(log, steps):
    for step in steps:
        log.write(step, {"reward": step / 3, "kept": step}, {"seconds": 0.1})


def test_a_resumed_run_writes_the_same_file(tmp_path):
    with RunLog(tmp_path / "whole", tensorboard=False) as log:
        write_steps(log, range(6))
    with RunLog(tmp_path / "killed", tensorboard=False) as log:
        write_steps(log, range(4))
    file = tmp_path / "killed" / metrics.METRICS
    file.write_text(file.read_text() + '{"step": 4, "rew')  # killed in the middle of a line
    assert [line["step"] for line in read_metrics(tmp_path / "killed")] == [0, 1, 2, 3]
    with RunLog(tmp_path / "killed", resume_step=2, tensorboard=False) as log:
        write_steps(log, range(2, 6))
    for name in (metrics.METRICS, metrics.TIMINGS):
        whole = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "killed" / name).read_bytes() == whole
    assert len(read_metrics(tmp_path / "killed", metrics.TIMINGS)) == 6


def test_two_runs_are_not_mixed(tmp_path):
    with RunLog(tmp_path, tensorboard=False) as log:
        write_steps(log, [7])
    with pytest.raises(ValueError, match="1 lines of metrics, the last of step 7; resume"):
        RunLog(tmp_path, tensorboard=False)


def test_lines_are_there_before_the_run_ends(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.write(0, {"reward": 0.5})
    assert read_metrics(tmp_path) == [{"step": 0, "reward": 0.5}]
    assert not (tmp_path / metrics.TIMINGS).read_text()
    log.close()


def test_numbers_that_json_does_not_know(tmp_path):
    with RunLog(tmp_path, tensorboard=False) as log:
        log.write(0, {"loss": math.nan, "ratio": math.inf})
        with pytest.raises(ValueError, match="metric 'loss' is 'high'"):
            log.write(1, {"loss": "high"})
    assert "NaN" not in (tmp_path / metrics.METRICS).read_text()
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["loss"]) and line["ratio"] == math.inf


def test_tensorboard_events_are_written(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(0, {"groups/kept": 3}, {"rollout_s": 1.5})
    (events,) = (tmp_path / metrics.EVENTS).iterdir()
    assert b"groups/kept" in events.read_bytes() and b"rollout_s" in events.read_bytes()
