"""A profile of some steps: it is there, it says where, and it changes nothing else."""

import argparse
import gzip
import json

import pytest

from notepad_jax.commands.train import _steps
from notepad_jax.setup import configuration
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import profiling, train
from notepad_jax.training.profiling import Profiler
from tests.runs import SMALL


class Screen(SilentScreen):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


@pytest.mark.slow
def test_a_step_is_recorded_and_its_numbers_are_those_of_any_run(uninterrupted, tmp_path):
    screen = Screen()
    config = configuration.load("quickstart", [*SMALL, "--config.steps=2"])
    train.train(config, tmp_path / "run", screen, profiled=range(2, 3))
    assert read_metrics(tmp_path / "run") == read_metrics(uninterrupted)[:2]
    (trace,) = (tmp_path / "run" / profiling.FOLDER).glob(profiling.TRACES)
    (line,) = [text for text in screen.said if text.startswith("profile")]
    assert line.startswith(f"profile of step 2: open {trace} at https://ui.perfetto.dev")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "step"]
    assert steps == ["2"]
    assert any("generate" in event.get("name", "") for event in events)  # a launch of the engine


@pytest.fixture
def recorded(monkeypatch):
    """What jax is told, in order."""
    told = []
    monkeypatch.setattr(
        profiling.jax.profiler, "start_trace", lambda folder, profiler_options: told.append("on")
    )
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: told.append("off"))
    return told


def course(steps, done, folder, recorded):
    said = []
    with Profiler(steps, folder, said.append) as profiler:
        for number in done:
            with profiler.step(number):
                recorded.append(number)
    return said


def test_several_steps_are_one_profile_also_where_the_run_ends_within_them(tmp_path, recorded):
    (said,) = course(range(2, 4), range(1, 6), tmp_path, recorded)
    assert recorded == [1, "on", 2, 3, "off", 4, 5] and said.startswith("profile of steps 2 to 3")
    recorded.clear()
    (said,) = course(range(2, 9), range(4, 6), tmp_path, recorded)  # resumed at 4, ended at 5
    assert recorded == ["on", 4, 5, "off"] and said.startswith("profile of steps 4 to 5: ")


def test_a_step_that_fails_ends_its_profile(tmp_path, recorded):
    said = []
    with pytest.raises(KeyError), Profiler(range(1, 2), tmp_path, said.append) as profiler:
        with profiler.step(1):
            raise KeyError
    assert recorded == ["on", "off"] and len(said) == 1


def test_a_step_that_never_comes_is_said_and_nobody_who_did_not_ask_hears(tmp_path, recorded):
    assert course(range(7, 8), range(1, 4), tmp_path, recorded) == ["no profile: step 7 never came"]
    assert course(range(0), range(1, 4), tmp_path, recorded) == []
    assert recorded == [1, 2, 3, 1, 2, 3]


def test_steps_are_named_as_one_or_as_first_and_last():
    assert (_steps("3"), _steps("3..5")) == (range(3, 4), range(3, 6))
    with pytest.raises(argparse.ArgumentTypeError, match=r"'\.\.' names no step"):
        _steps("..")
