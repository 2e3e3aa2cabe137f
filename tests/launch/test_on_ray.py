"""A fleet on Ray, for real: whatever is killed, through Ray or not, the weights are the same."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import LAUNCH, ROOT
from tests.runs import SMALL, run
from tests.support import same_run

ray = pytest.importorskip("ray")
on_ray = importlib.import_module("launch.on_ray")  # it needs Ray

SAME = ("--config.rollout.max_rounds=1", "--config.validation.every=0")
SCRIPT = LAUNCH / "on_ray.py"


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """What Ray, launchers and programs find: nothing is sent, and nothing written at home."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
        "NOTEPAD_JAX_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cluster(environment, monkeypatch):
    """A Ray of this machine, of which launchers are told."""
    before = signal.getsignal(signal.SIGTERM)  # ray puts one of its own in its place
    ray.init(num_cpus=2, include_dashboard=False, namespace="notepad", log_to_driver=False)
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


def launcher(folder, *words):
    with (folder / "said").open("wb") as said:
        return subprocess.Popen([sys.executable, str(SCRIPT), *words], cwd=folder,
                                stdout=said, stderr=said)  # fmt: skip


def until(seen, process, folder):
    """Waits until it is so, while the launcher runs; returns what was seen."""
    while not (found := seen()):
        assert process.poll() is None, (folder / "said").read_text()
        time.sleep(0.02)
    return found


def program(folder, *words):
    """The process that has all these words on its command line, and runs in the folder."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (each / "cmdline").read_bytes().decode(errors="replace").split("\0")
            inside = (each / "cwd").readlink() == folder
            if inside and "notepad_jax" in said and set(words) <= set(said):
                return int(each.name)
    return None


def steps(folder):
    """How many steps have their line."""
    file = folder / "runs" / "x" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainer_and_readers_are_killed_once_each_and_learn_the_same(cluster, tmp_path):
    words = ("--config", "quickstart", "--name", "x", *SMALL, *SAME, "--config.fleet.lead=0")
    process = launcher(tmp_path, "--readers", "2", "--", "train", *words)
    try:
        for done, name, told in (
            (0, "reader-0", ("reader-0",)),
            (1, "trainer", ("train",)),
            (2, "reader-1", None),
        ):
            until(lambda done=done: steps(tmp_path) >= done, process, tmp_path)
            wanted = told or ("reader-1",)
            there = until(lambda w=wanted: program(tmp_path, *w), process, tmp_path)
            if told:  # its actor goes, and the program with it
                ray.kill(ray.get_actor(f"x-{name}"), no_restart=False)
            else:  # the program goes, and its actor begins it again
                os.kill(there, signal.SIGKILL)
            until(lambda p=there, w=wanted: program(tmp_path, *w) != p, process, tmp_path)
        process.wait(timeout=400)
    finally:
        process.kill()
    said = (tmp_path / "said").read_text()
    assert process.returncode == 0, said
    for name in ("trainer", "reader-0", "reader-1"):  # all well, though each was killed
        assert f"{name} has ended\n" in said
    run(tmp_path / "alone", *SAME)
    assert same_run.differences(tmp_path / "alone", tmp_path / "runs" / "x") == []
    lines = [json.loads(line) for line in (tmp_path / "runs" / "x" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say what to train behind --"),
        (("--", "eval", "--name", "x"), "say what to train behind --"),
        (("--", "train"), "say what to train behind --"),
        (("--readers", "0", "--", "train", "--name", "x"), "--readers is a whole number from 1"),
        (("--reader", "TPU", "--", "train", "--name", "x"), "argument --reader: invalid"),
    ],
)
def test_a_command_line_that_cannot_be_says_so(words, said, capsys):
    with pytest.raises(SystemExit) as refusal:
        on_ray.parsed(words)
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_what_a_trainer_goes_on_with_is_its_folder_or_its_steps_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "shared"
    words = ["train", f"--config.checkpoint.folder={there}", "--config.steps=4", "--name=x"]
    assert on_ray.run_of(words) == ("x", str(there))
    assert not on_ray.begun("x", "") and not on_ray.begun("x", str(there))
    (there / "x" / "checkpoints" / ".1.writing").mkdir(parents=True)
    assert not on_ray.begun("x", str(there))
    (there / "x" / "checkpoints" / "1").mkdir()
    assert on_ray.begun("x", str(there)) and not on_ray.begun("x", "")
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell does not expand it behind `=`
    assert on_ray.begun("x", "~/shared") and on_ray.place("x", "~/shared") == str(there / "x")
    assert on_ray.place("x", "") == str(tmp_path / "runs" / "x")
    assert on_ray.place("x", "gs://bucket/runs") == "gs://bucket/runs/x"
    (tmp_path / "runs" / "x").mkdir(parents=True)
    assert on_ray.begun("x", "")


def test_resources_are_those_of_ray():
    assert on_ray.resources("TPU=4,GPU=.5") == {"TPU": 4, "GPU": 0.5}
    assert on_ray.resources("") == {}
