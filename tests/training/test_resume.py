"""A run that was damaged or refused goes on as if nothing had happened, or not at all.

(`tests/benchmarks/test_kills.py` kills some.)
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from sentencepiece import sentencepiece_model_pb2

from notepad_jax import cli
from notepad_jax.checkpoint import steps
from notepad_jax.grpo import algorithm
from notepad_jax.setup import builders, configuration, learner, policies
from notepad_jax.telemetry.identity import read_sealed
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import outcome, record, train
from notepad_jax.training import run as runs
from tests import limits
from tests.runs import ROOT, SMALL, policy_folder, run
from tests.support import same_run


@pytest.mark.slow
def test_a_run_is_not_begun_over_another(uninterrupted):
    before = limits.content(uninterrupted)
    with pytest.raises(ValueError, match=r"run exists; choose another .* go on with it \(--resume"):
        run(uninterrupted)
    assert limits.content(uninterrupted) == before


@pytest.mark.parametrize("damage", ["no checkpoint is finished", "there are metrics alone"])
def test_a_run_is_not_begun_over_what_is_left_of_another(uninterrupted, tmp_path, damage):
    """What no checkpoint reader sees is somebody's nevertheless."""
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    if damage == "there are metrics alone":
        shutil.rmtree(folder / "checkpoints")
    else:
        for mark in folder.glob("checkpoints/*/_CHECKPOINT_METADATA"):
            mark.write_text("{}")
    before = limits.content(folder)
    with pytest.raises(ValueError, match="run exists"):
        run(folder)
    assert limits.content(folder) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config.seed=5",), "resume with the settings of the saved run"),
        (("--config.grpo.lora.rank=2", "--config.optimizer.kind=adamw"), "has a leaf 'embed'"),
        (("--config.policy={wider}",), r"\d"),
        (("--config.engine.pages=3",), "engine.pages"),
        (("--config.policy=/nowhere",), "/nowhere"),
    ],
)
def test_a_refused_resume_leaves_every_step_and_line(uninterrupted, tmp_path, words, message):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    starter = builders.load_policy(ROOT / "data" / "starter").config
    wider = dataclasses.replace(starter, layers=1, windows=())
    words = [word.format(wider=policy_folder(wider, tmp_path / "wider")) for word in words]
    before = limits.content(folder)
    with pytest.raises(ValueError, match=message):
        run(folder, *words, resume=True)
    assert limits.content(folder) == before


class Filling(SilentScreen):
    """A disk that is full after so many steps: no file grows beyond what it says then."""

    def __init__(self, steps, size):
        self._steps, self._size = steps, size

    def table(self, label, columns, total=None, done=0):
        return self

    def row(self, **values):
        self._steps -= 1
        if self._steps == 0:
            limits.limit_files(self._size())

    def finish(self):
        pass


FILLING = {
    "a checkpoint": lambda folder: 300_000,
    "a line of metrics": lambda folder: (folder / "metrics.jsonl").stat().st_size + 20,
    "the first of a line": lambda folder: (folder / "metrics.jsonl").stat().st_size,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FILLING)
def test_a_disk_that_fills_up_ends_a_run_in_one_line_and_it_goes_on(
    uninterrupted, tmp_path, capfd, monkeypatch, what
):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/mine")
    screen = Filling(2, lambda: FILLING[what](folder))
    monkeypatch.setattr(cli, "choose", lambda quiet, busy: screen)
    with limits.largest_file(-1):
        assert cli.main(["train", "--name", "mine", *SMALL]) == 1
    (told,) = capfd.readouterr().err.strip().splitlines()
    assert "the disk is full, make room; go on with: notepad-jax train --name mine --res" in told
    assert read_metrics(folder) == read_metrics(uninterrupted)[: len(read_metrics(folder))]
    assert len(read_metrics(folder)) >= 2
    assert steps.steps_in(folder / "checkpoints")[-1] == 2
    monkeypatch.setattr(cli, "choose", lambda quiet, busy: SilentScreen())
    assert cli.main(["train", "--name", "mine", "--resume"]) == 0
    name = "metrics.jsonl"
    assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_a_disk_that_is_full_from_the_start_leaves_no_run(
    uninterrupted, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for size in (2_000, 100_000):  # our words need some room: capfd keeps them in a file
        with limits.largest_file(size):
            assert cli.main(["train", "--json", "--name", "mine", *SMALL]) == 1
        (told,) = capfd.readouterr().err.strip().splitlines()
        assert told.startswith("notepad-jax: the disk is full, make room (")
        assert list(tmp_path.iterdir()) == []


def last_state(folder: Path) -> list[np.ndarray]:
    """Every array of the last step: weights and optimizer state."""
    with steps.context():
        found = ocp.load_checkpointables(
            folder / "checkpoints" / "4", {"params": None, "opt": None}
        )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.mark.slow
def test_what_is_changed_on_the_way_is_kept_and_stands_on_the_page(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    run(folder, resume=True)  # with what it has
    assert record.read(folder).changes == ()
    run(folder, "--config.steps=5", "--config.grpo.clip_low=0.1", resume=True)
    (change,) = record.read(folder).changes
    assert change.step == 4
    assert change.changed == {"grpo.clip_low": (0.2, 0.1), "steps": (4, 5)}
    config = configuration.load("quickstart", [*SMALL, "--config.steps=5"])
    page = outcome.outcome(config, folder).report.read_text(encoding="utf-8")
    assert "Changed on the way" in page and "grpo.clip_low" in page
    assert "Changed on the way" not in outcome.outcome(config, uninterrupted).report.read_text()


@pytest.mark.slow
def test_a_run_whose_steps_lie_elsewhere_is_known_by_them(
    uninterrupted, tmp_path, monkeypatch, capsys
):
    """A failure before the first line; a folder that is lost. Starting and going on say the same,
    and one of them works."""
    monkeypatch.chdir(tmp_path)
    folder, elsewhere = Path("runs/mine"), tmp_path / "elsewhere"
    place = f"--config.checkpoint.folder={elsewhere}"
    start, resume = ["train", "--name=mine", *SMALL, place], ["train", "--name=mine", "--resume"]

    def said(*words: str, code: int = 1) -> str:
        assert cli.main(list(words)) == code
        return capsys.readouterr().err

    def fails(*_):
        raise ValueError("the first update cannot be made")

    learn = learner.learn
    monkeypatch.setattr(learner, "learn", fails)
    assert "the first update cannot be made" in said(*start)
    monkeypatch.setattr(learner, "learn", learn)
    assert steps.steps_in(elsewhere / "mine" / "checkpoints") == [0]
    assert "runs/mine exists; choose another name (--name), or go on with it (--res" in said(*start)
    shutil.rmtree(folder)
    known = f"go on with it (--resume {place}), choose another name (--name), or remove"
    assert known in said(*start) and not folder.exists()
    assert "or say where its checkpoints lie, if that is elsewhere (--config.ch" in said(*resume)
    words = said(*resume, "--config.checkpoint.folder=nowhere")
    assert "nowhere/mine/checkpoints has no steps of it" in words and not folder.exists()
    said(*resume, place, code=0)
    assert (folder / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    settings = json.loads((elsewhere / "mine" / "checkpoints" / record.BESIDE).read_text())
    assert settings["config.json"] == read_sealed(folder / "config.json", "")
    shutil.rmtree(folder)
    said(*resume, place, "--json", code=0)  # with its machine's decisions, and nothing left to do
    assert json.loads((folder / "machine.json").read_text()) == settings["machine.json"]
    (elsewhere / "mine" / "checkpoints" / record.BESIDE).unlink()
    shutil.rmtree(folder)
    assert "has steps of one, but not its settings (run.json): bring back" in said(*resume, place)
    assert "has steps of an earlier run (4 is the last); choose another name" in said(*start)


def test_a_run_that_would_make_steps_again_elsewhere_is_refused(
    uninterrupted, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(uninterrupted, tmp_path / "runs" / "mine")
    ours, theirs = folder / "checkpoints", tmp_path / "elsewhere" / "mine" / "checkpoints"
    words = ["train", "--name=mine", "--resume", "--json"]
    there = [*words, f"--config.checkpoint.folder={tmp_path / 'elsewhere'}"]

    def refused(words: list[str], *says: str) -> None:
        before = limits.content(folder)
        assert cli.main(words) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert not [part for part in says if part not in line], line
        assert limits.content(folder) == before

    says = f"step 4 of the run lies in {ours}, and {theirs}"
    refused(there, f"{says} has no steps: go on there (--config.checkpoint.folder='')")
    shutil.copytree(ours, theirs, dirs_exist_ok=True)
    shutil.rmtree(theirs / "4")
    refused(there, f"{says} ends at step 3: go on there")
    shutil.copytree(ours / "4", theirs / "4")
    assert cli.main(there) == 0  # with nothing left to do
    shutil.rmtree(ours / "4")
    assert policies.resolved(folder).step == 4
    says = f"(--config.checkpoint.folder={tmp_path / 'elsewhere'}), or bring its steps along first"
    refused([*words, "--config.checkpoint.folder="], f"{ours} ends at step 3: go on there {says}")
    shutil.rmtree(theirs)
    refused(there, f"runs/mine/metrics.jsonl ends at step 4, and {theirs} has no steps to go on")


def test_a_damaged_newest_step_is_passed_over_and_done_again(uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    path = max((folder / "checkpoints/4/opt").rglob("d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-9])
    assert run(folder, resume=True) == read_metrics(uninterrupted)
    (said,) = capsys.readouterr().err.splitlines()  # also on a screen that is silent
    assert "step 4 is damaged (opt/" in said and said.endswith("; the newest good step is 3")
    jax.tree.map(np.testing.assert_array_equal, last_state(folder), last_state(uninterrupted))
    assert sorted(os.listdir(folder / "checkpoints")) == ["3", "4", "trainer"]


@pytest.mark.slow
def test_a_run_goes_on_from_the_step_that_is_asked_for(
    uninterrupted, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(uninterrupted, tmp_path / "runs" / "x")
    resume = ["train", "--name=x", "--resume", "--json"]
    assert cli.main([*resume, "--step=2"]) == 1
    assert "runs/x/checkpoints has no step 2; there: 3, 4" in capsys.readouterr().err
    assert cli.main(["train", "--name=y", "--step=2"]) == 1
    assert "say --resume as well" in capsys.readouterr().err and not Path("runs/y").exists()
    assert sorted(os.listdir("runs/x/checkpoints")) == ["3", "4", "trainer"]
    assert cli.main([*resume, "--step=3"]) == 0
    metrics = Path("runs/x/metrics.jsonl")
    assert metrics.read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    jax.tree.map(
        np.testing.assert_array_equal, last_state(tmp_path / "runs/x"), last_state(uninterrupted)
    )
    for step in (3, 4):
        Path(f"runs/x/checkpoints/{step}/meta/data.json").unlink()
    capsys.readouterr()
    before = metrics.read_bytes()
    assert cli.main(resume) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "4 is damaged (meta/data.json is missing), step 3 is damaged (meta" in said
    assert metrics.read_bytes() == before


def test_a_run_of_an_earlier_version_is_neither_resumed_nor_begun_over(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    for step in (3, 4):
        (folder / "checkpoints" / str(step) / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no step under .* has a manifest.json \(there: 3, 4\)"):
        run(folder, resume=True)
    with pytest.raises(ValueError, match="run exists; choose another name"):
        run(folder)
    assert sorted(os.listdir(folder / "checkpoints")) == ["3", "4", "trainer"]


def another_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1_000] ^= 1  # the lowest of some weight's mantissa
    path.write_bytes(content)


def another_score(folder: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    model.pieces[-1].score -= 1
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())


def another_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["grpo.lora.rank=2", "grpo.kl_weight=0.1"])
def test_a_run_is_resumed_with_the_policy_that_it_began_with(words, tmp_path):
    """By content: the folder may be another, what lies in it may not."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "data" / "starter", start)

    def prepared(policy: Path, resume: bool = True) -> runs.Run:
        words_ = [*SMALL, f"--config.{words}", f"--config.policy={policy}"]
        if "lora" in words:
            words_.append("--config.optimizer.kind=adamw")
        config = configuration.load("quickstart", words_)
        return train.prepare(config, tmp_path / "run", SilentScreen(), resume, None)

    prepared(start, resume=False)
    shutil.copytree(start, elsewhere)
    assert prepared(elsewhere).step == 0
    for change, what in (
        (another_bit, "weights"),
        (another_score, "weights, tokenizer"),
        (another_end, "weights, tokenizer, config"),
    ):
        change(elsewhere)
        says = f"run began with the policy in {start}; not the same in {elsewhere}: {what};"
        with pytest.raises(ValueError, match=says) as refused:
            prepared(elsewhere)
        assert "\n" not in str(refused.value)
    another_score(start)
    with pytest.raises(ValueError, match=f"in {start}; not the same in {start}: tokenizer;"):
        prepared(start)


@pytest.mark.slow
def test_a_gate_that_was_shut_is_shut_when_the_run_goes_on(tmp_path, monkeypatch):
    """Entropy is between the bounds from the third rollout on: only the checkpoint knows."""
    words = (
        "--config.grpo.entropy_high=2.0", "--config.grpo.entropy_low=1.0",
        "--config.grpo.ratio=gspo_trajectory", "--config.grpo.minibatches=2",
        "--config.steps=3", "--config.checkpoint.keep=5",
    )  # fmt: skip
    said = iter((1.5, 3.0, 1.5, 1.5))
    monkeypatch.setattr(
        algorithm.entropy_gate, "mean_entropies", lambda *batches: {"update": next(said)}
    )
    lines = run(tmp_path / "whole", *words)
    assert [line["entropy_gate/update_shut"] for line in lines] == [0, 1, 1]
    assert lines[2]["entropy_gate/left_out"] > 0.1
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    run(folder, *words, resume=True, step=2)
    assert same_run.differences(tmp_path / "whole", folder) == []
    assert next(said, None) is None
