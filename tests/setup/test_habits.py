"""What is exported of a run reads as the run did, also for those who have the export alone."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from notepad_jax import cli
from notepad_jax.checkpoint.hf.adapters import export_adapters
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.model import lora
from notepad_jax.programs import convert, export
from notepad_jax.setup import habits, policies, settings
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text import prompts
from tests import tiny
from tests.programs.test_adapted_policies import CHOSEN, CONFIG, some
from tests.runs import policy_folder

SCREEN = SilentScreen()
SAID = {
    "dtype": "float32",
    "reading": {"template": "chunk_first", "chunk_size": 96, "max_memory": 24},
    "engine": {"slots": 5, "tensor": 4, "replicas": 8, "per_cpu": 3},
    "evaluate": {"chunk_size": 80, "temperature": 0.5},
}
READS = SAID | {"engine": {"slots": 5}, "evaluate": {"chunk_size": 80}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A published policy and a run from it, with adapters; the working folder."""
    monkeypatch.chdir(tmp_path)
    policy_folder(CONFIG, tmp_path / "base")
    frozen, adapters = lora.partition(CONFIG, tiny.params(1, CONFIG), CHOSEN, jax.random.key(0))
    checkpoints = Checkpoints(tmp_path / "runs" / "mine" / "checkpoints")
    checkpoints.keep_base(frozen)
    meta = {"policy": dataclasses.asdict(CONFIG)}
    checkpoints.save(3, adapters, {"moment": np.zeros(1)}, {}, meta)
    told(tmp_path / "runs" / "mine")
    return tmp_path


def told(run, **reading):
    chosen = {"rank": CHOSEN.rank, "alpha": CHOSEN.alpha, "targets": CHOSEN.targets}
    text = SAID | {"policy": "base", "grpo": {"lora": chosen}}
    text["reading"] = SAID["reading"] | reading
    (run / "config.json").write_text(json.dumps(text))


def test_both_exports_an_import_and_their_exports_read_as_the_run(here):
    export.export_hf("runs/mine", "whole", SCREEN)
    export.export_adapters("runs/mine", "adapters", SCREEN)
    convert.import_hf("whole", "imported", SCREEN)
    export.export_hf("imported", "again", SCREEN)
    export.export_hf("adapters", "added", SCREEN)
    export.export_adapters("adapters", "more", SCREEN)
    for name in ("whole", "adapters", "imported", "again", "added", "more"):
        assert policies.reads_as(name) == READS, name
        assert policies.folder_of(policies.resolved(name)) in ("base", name)
    assert policies.reads_as("base") == {}
    assert policies.reads_as("runs/mine")["engine"] == {"slots": 5, "per_cpu": 3}
    config = settings.to_read("adapters", None, "", {})
    assert (config.reading.template, config.reading.chunk_size) == ("chunk_first", 96)
    assert (config.engine.slots, config.engine.tensor, config.evaluate.chunk_size) == (5, 1, 80)
    # Adapters on a policy that says how it reads, and say nothing, read as it does.
    export_adapters(CONFIG, CHOSEN, some(), "whole", here / "silent")
    assert policies.reads_as("silent") == READS


def test_the_command_line_reads_with_them(here, monkeypatch):
    export.export_adapters("runs/mine", "adapters", SCREEN)
    seen = []

    def nobody(config, screen, suite=""):
        seen.append(config)
        raise ValueError("nobody reads")

    monkeypatch.setattr("notepad_jax.programs.subjects.named", nobody)
    words = ["eval", "--json", "--policy", "adapters", "--config.reading.max_answer=3"]
    assert cli.main(words) == cli.main([*words, "--config", "quickstart"]) == 1
    as_trained, as_said = seen
    assert (as_trained.reading.chunk_size, as_trained.reading.max_answer) == (96, 3)
    assert as_said.reading.chunk_size == 256


def test_a_template_of_ones_own_goes_along(here):
    (here / "mine").mkdir()
    text = prompts.find("question_last").read_text().replace("[update]", "[update]\nRead.")
    (here / "mine" / "template.txt").write_text(text)
    told(here / "runs" / "mine", template="mine/template.txt")
    export.export_adapters("runs/mine", "adapters", SCREEN)
    export.export_hf("runs/mine", "whole", SCREEN)
    shutil.rmtree("mine")
    shutil.move("adapters", "elsewhere")
    for name in ("whole", "elsewhere"):
        path = policies.reads_as(name)["reading"]["template"]
        assert path == f"{name}/{habits.TEMPLATE}" and prompts.find(path).read_text() == text
    convert.import_hf("whole", "imported", SCREEN)
    export.export_hf("imported", "again", SCREEN)
    assert (here / "again" / habits.TEMPLATE).read_text() == text
    assert sorted(path.name for path in (here / "elsewhere").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", habits.NAME, habits.TEMPLATE
    ]  # fmt: skip


def test_what_cannot_go_along_is_said(here):
    warned = []
    for reading, says in (
        ({"template": "gone.txt"}, "without reading.template 'gone.txt', which is not here; who"),
        ({"memory_update": "mine:rule"}, "reading.memory_update 'mine:rule', which is code; who"),
    ):
        said = SAID | {"reading": SAID["reading"] | reading}
        found = habits.files(said, here / "runs" / "mine", warned.append)
        assert list(found) == [habits.NAME] and says in warned.pop()
        left = json.loads(found[habits.NAME])["reading"]
        assert left == {k: v for k, v in SAID["reading"].items() if k not in reading}
    assert habits.files({}, here, warned.append) == {} and warned == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"reading": ', "notepad.json is not JSON"),
        ("[]", "notepad.json is not a JSON object"),
        ('{"policy": "base"}', "has the key 'policy'; it has dtype, reading, engine, evaluate"),
        ('{"reading": 3}', "reading is 3; export the policy again"),
        ('{"dtype": {}}', "dtype is {}; export"),
        ('{"reading": {"memory_update": "os:getcwd"}}', "'os:getcwd', which is code; a folder"),
        ('{"reading": {"template": "../secret.txt"}}', "template: '../secret.txt'; it names a"),
        ('{"reading": {"template": "notepad_template.txt"}}', "_template.txt, which lies beside"),
        ('{"reading": {"chunk_size": "x"}}', "reading.chunk_size"),
        ('{"reading": {"chunk_size": -1}}', "reading: chunk_size is -1; it must"),
    ],
)
def test_a_folder_that_asks_for_more_is_refused_in_one_line(here, text, says):
    (here / "base" / habits.NAME).write_text(text)
    with pytest.raises(ValueError, match=says) as raised:
        settings.to_read("base", None, "", {})
    assert "\n" not in str(raised.value)
