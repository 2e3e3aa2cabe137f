"""Sinks get a copy of every number; whatever goes wrong there, the run and its files go on."""

import sys
import types

import pytest

from notepad_jax.telemetry import sinks
from notepad_jax.telemetry.metrics import RunLog, read_metrics

SETTINGS = {"steps": 3, "policy": "p" * 600}


class FakeWandB(types.ModuleType):
    """Remembers what it was told; as the real one, it makes an id where none is given."""

    def __init__(self, broken=False):
        super().__init__("wandb")
        self.begun, self.logged, self.finished, self.broken = [], [], 0, broken
        self.Settings = dict

    def init(self, **how):
        self.begun.append(how)
        self.id = how["id"] or f"made-{len(self.begun)}"
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, numbers):
        if self.broken:
            raise ConnectionError("their server\nis down")
        self.logged.append(numbers)

    def finish(self):
        self.finished += 1


class FakeMLflow(types.ModuleType):
    def __init__(self):
        super().__init__("mlflow")
        self.begun, self.params, self.logged, self.ended = [], [], [], 0

    def set_experiment(self, name):
        self.experiment = name

    def start_run(self, **how):
        self.begun.append(how)
        run_id = how.get("run_id", f"page-{len(self.begun)}")
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_params(self, params):
        self.params.append(params)

    def log_metrics(self, numbers, step):
        self.logged.append((step, numbers))

    def end_run(self):
        self.ended += 1


@pytest.fixture
def fakes(monkeypatch):
    found = FakeWandB(), FakeMLflow()
    for fake in found:
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return found


def logged(folder, steps, names, resume=None):
    said = []
    opened = sinks.Sinks(names, folder, SETTINGS, said.append)
    with RunLog(folder, opened, resume) as log:
        for step in steps:
            log.write(step, {"reward": step / 2}, {"seconds": 1})
    return said


def test_every_number_goes_to_both_and_a_resumed_run_to_the_same_page(tmp_path, fakes):
    wandb, mlflow = fakes
    folder = tmp_path / "mine"
    folder.mkdir()
    assert logged(folder, (1, 2), sinks.NAMES) == []
    assert logged(folder, (2, 3), sinks.NAMES, resume=2) == []
    assert [line["step"] for line in wandb.logged] == [1, 2, 2, 3]
    assert wandb.logged[0] == {"reward": 0.5, "seconds": 1.0, "step": 1}
    assert [how["id"] for how in wandb.begun] == [None, "made-1"]
    assert (wandb.begun[0]["name"], wandb.begun[0]["config"]) == ("mine", SETTINGS)
    assert mlflow.logged == [(s, {"reward": s / 2, "seconds": 1.0}) for s in (1, 2, 2, 3)]
    assert mlflow.begun == [{"run_name": "mine"}, {"run_id": "page-1"}]
    assert mlflow.params == [{"steps": "3", "policy": "p" * sinks.LONGEST}]
    assert (wandb.finished, mlflow.ended) == (2, 2)


def test_a_sink_that_fails_is_told_of_once_and_costs_nothing_else(tmp_path, fakes):
    wandb, mlflow = fakes
    wandb.broken = True
    said = logged(tmp_path, (1, 2, 3), sinks.NAMES)
    expected = "sink wandb failed and is left out from here on (ConnectionError: their server is"
    assert len(said) == 1 and said[0].startswith(expected)
    assert len(read_metrics(tmp_path)) == len(mlflow.logged) == 3


def test_a_sink_that_cannot_begin_costs_nothing_else(tmp_path, fakes, monkeypatch):
    monkeypatch.setattr(fakes[0], "Settings", None)
    said = logged(tmp_path, (1,), ("wandb",))
    assert len(said) == 1 and "sink wandb failed" in said[0]
    assert len(read_metrics(tmp_path)) == 1 and not (tmp_path / sinks.FILE).exists()


def test_what_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match="'wandb', which cannot be imported.*pip install wandb"):
        sinks.check(["wandb"])
    with pytest.raises(ValueError, match="sinks has 'comet'; there are wandb and mlflow"):
        sinks.check(["comet"])
    sinks.check([])


def test_nobody_who_does_not_ask_waits_for_an_import(tmp_path, monkeypatch):
    for name in sinks.NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    assert logged(tmp_path, (1,), ()) == [] and not (tmp_path / sinks.FILE).exists()
