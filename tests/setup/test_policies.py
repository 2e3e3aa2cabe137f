"""What a user names as a policy is found, and what is not there is one line that says the mend."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from notepad_jax import cli
from notepad_jax.checkpoint import best
from notepad_jax.checkpoint.checksums import combine, leaf_checksums
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.steps import write
from notepad_jax.programs import convert
from notepad_jax.setup import builders, policies
from notepad_jax.telemetry.screen import SilentScreen
from tests import tiny
from tests.runs import ROOT, policy_folder

STARTER = ROOT / "data" / "starter"
SMALL = dataclasses.replace(
    tiny.CONFIG, vocab_size=608, valid_vocab=600, layers=1, qk_norm=False, tied_embeddings=True
)


def save(run, step):
    params = tiny.params(step, SMALL)
    leaves = leaf_checksums(params)
    meta = {"policy": dataclasses.asdict(SMALL), "checksum": combine(leaves)}
    meta["leaf_checksums"] = leaves
    write(run / "checkpoints", step, {"params": params, "meta": meta}, keep=2)
    return params


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A published folder; a run from it with steps 3, 9 and 12, of which the first was best; and
    a run that began with that one."""
    folder = tmp_path_factory.mktemp("built")
    policy_folder(SMALL, folder / "published")
    mine, other = folder / "runs" / "mine", folder / "runs" / "other"
    for run, origin in ((mine, "published"), (other, "runs/mine@best")):
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"policy": origin}))
    best.mark(mine / "checkpoints", best.Best(3, 0.5))
    for step in (3, 6, 9, 12):
        save(mine, step)
    save(other, 1)
    return folder


@pytest.fixture
def here(built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_name_gives_its_weights_and_the_folder_that_it_began_with(here):
    wanted = {
        "runs/mine": 12, "runs/mine@12": 12, "runs/mine@9": 9, "runs/mine@best": 3,
        "runs/mine/checkpoints": 12, "runs/../runs/mine@9": 9, f"{here}/runs/mine@best": 3,
    }  # fmt: skip
    for name, step in wanted.items():
        policy = builders.load_policy(name)
        jax.tree.map(np.testing.assert_array_equal, policy.params, tiny.params(step, SMALL))
        assert policy.folder.samefile("published") and policy.config.valid_vocab == 600
        assert policy.name == f"{name.partition('@')[0]}@{step}"
        assert policies.resolved(policy.name).step == step
    other = policies.resolved("runs/other")
    assert (other.name, policies.folder_of(other)) == ("runs/other@1", "published")
    for name in ("published", "runs/../published"):
        assert builders.load_policy(name).name == name
    convert.import_hf("published", "imported", SilentScreen())
    for name in ("imported", "runs/../imported"):
        assert policies.resolved(name) == policies.Named(name, name, Path(name, "checkpoints"), 0)


def test_a_run_whose_folder_of_steps_was_changed_is_its_newest_step(here):
    """What it left behind is older; what was brought here from there is all of it."""
    run, there = here / "runs" / "mine", here / "shared" / "mine" / "checkpoints"
    said = {"policy": "published", "checkpoint": {"folder": "shared"}}
    (run / "config.json").write_text(json.dumps(said))
    assert policies.resolved("runs/mine").step == 12  # there is nothing there
    there.parent.mkdir(parents=True)
    shutil.move(run / "checkpoints" / "12", there / "12")
    found = policies.resolved("runs/mine")
    assert (found.name, found.steps) == ("runs/mine@12", there)
    (run / "checkpoints" / "run.json").write_text("{}")
    assert policies.resolved("runs/mine").step == 9


def test_a_run_is_found_from_another_working_folder(here, monkeypatch):
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    found = policies.resolved("../runs/other")
    assert (here / "published").samefile(policies.folder_of(found))


def test_the_starter_and_the_home_folder_are_found_wherever_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = policies.resolved("data/starter")
    assert Path(found.home).is_absolute() and (Path(found.home) / "model.safetensors").is_file()
    (tmp_path / "mine").symlink_to(found.home)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert policies.resolved("~/mine").home == str(tmp_path / "mine")


def test_what_is_not_there_is_one_line(here):
    def refused(name, says, items=policies.READ):
        with pytest.raises(ValueError, match=says) as raised:
            policies.folder_of(policies.resolved(name, items=items))
        assert "\n" not in str(raised.value)

    refused("", "no policy is named; give a run")
    refused("mine", "there is no folder mine; did you mean runs/mine?")
    refused("mine@best", "no folder mine; did you mean runs/mine?")
    refused("runs/yours", "there is no folder runs/yours; give a run")
    refused("runs/mine@6", "has no step 6; there: 3, 9, 12")
    refused("runs/mine@last", r"behind @ stands a step \(runs/mine@40\) or best")
    refused("published@3", "published has no finished checkpoint")
    refused("runs/other@best", "no best step: it was trained without validation .*its steps: 1")
    shutil.rmtree("runs/mine/checkpoints/3")
    refused("runs/mine@best", "its best step, 3, is gone; there: 9, 12")
    (here / "runs" / "other" / "config.json").write_text('{"policy": "runs/other"}')
    refused("runs/other", "says that it began with itself")
    (here / "runs" / "other" / "config.json").write_text('{"policy": ')
    refused("runs/other", "other/config.json is cut off, or no JSON; mend it, or name")
    (here / "runs" / "read").mkdir()
    (here / "runs" / "read" / "config.json").write_text('{"policy": "published"}')
    refused("runs/read", "runs/read has no finished checkpoint; give a run")


def test_damage_is_said_and_passed_over_unless_the_step_was_asked_for(here):
    (here / "runs/mine/checkpoints/12/meta/data.json").write_text("{}")
    said = []
    assert policies.resolved("runs/mine", said.append).step == 9
    assert len(said) == 1 and "step 12 is damaged" in said[0] and "newest good step is 9" in said[0]
    with pytest.raises(ValueError, match="step 12 is damaged .*others there: 3, 9"):
        policies.resolved("runs/mine@12")


def test_a_run_is_read_as_it_was_trained(here, monkeypatch):
    """`eval` and `ask` take over how it reads, unless a config is named; devices are ours."""
    said = {
        "policy": "published", "dtype": "bfloat16", "steps": 7,
        "reading": {"chunk_size": 96, "max_memory": 24}, "engine": {"slots": 5, "tensor": 4},
        "evaluate": {"chunk_size": 80, "temperature": 0.5},
    }  # fmt: skip
    (here / "runs" / "mine" / "config.json").write_text(json.dumps(said))
    assert policies.reads_as("runs/mine@best") == {
        "dtype": "bfloat16", "reading": said["reading"], "engine": {"slots": 5},
        "evaluate": {"chunk_size": 80},
    }  # fmt: skip
    assert policies.reads_as("published") == {}
    seen = []

    def nobody(config, screen, suite=""):
        seen.append(config)
        raise ValueError("nobody reads")

    monkeypatch.setattr("notepad_jax.programs.subjects.named", nobody)
    words = ["eval", "--json", "--policy", "runs/mine@best", "--config.reading.max_answer=3"]
    assert cli.main(words) == cli.main([*words, "--config", "quickstart"]) == 1
    as_trained, as_said = seen
    assert (as_trained.reading.chunk_size, as_trained.evaluate.chunk_size) == (96, 80)
    assert (as_trained.reading.max_memory, as_trained.reading.max_answer) == (24, 3)
    assert (as_trained.engine.slots, as_trained.engine.tensor, as_trained.steps) == (5, 1, 36)
    assert as_trained.evaluate.temperature == 0.0
    assert as_said.reading.chunk_size == 256


def test_export_takes_the_same_names(here, capsys):
    assert cli.main(["export-hf", "runs/mine@best", "runs/../out", "--dtype", "float32"]) == 0
    assert "step 3 of runs/mine@best" in capsys.readouterr().out
    _, params = huggingface.import_policy("out")
    jax.tree.map(np.testing.assert_array_equal, params, tiny.params(3, SMALL))
    assert cli.main(["export-hf", "runs/mine", "runs/mine"]) == 1
    assert "runs/mine holds the source" in capsys.readouterr().err


def test_the_best_step_is_kept_and_its_mark_is_whole_or_not_there(tmp_path):
    best.mark(tmp_path, best.Best(4, 0.25))
    assert best.read(tmp_path) == best.Best(4, 0.25)
    (tmp_path / best.NAME).write_text('{"step": ')
    assert best.read(tmp_path) is None
    best.mark(tmp_path, None)
    assert not (tmp_path / best.NAME).exists()
