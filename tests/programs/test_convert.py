"""import-hf and export-hf: a policy goes in, comes out the same, and mistakes cost one line."""

import dataclasses
import io
import json
import os
import shutil
import types
from pathlib import Path

import jax
import limits
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from notepad_jax import cli, keys
from notepad_jax.checkpoint.hf import folder_swap, huggingface
from notepad_jax.checkpoint.hf.storage import StoreProblem
from notepad_jax.checkpoint.restore import load_params
from notepad_jax.checkpoint.steps import write
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.model import lora_merge, parameters
from notepad_jax.programs import convert, export
from notepad_jax.setup import configuration, learner
from notepad_jax.telemetry.line_screen import LineScreen
from notepad_jax.telemetry.screen import SilentScreen

SCREEN = SilentScreen()
STARTER = Path(__file__).parents[2] / "data" / "starter"


def contents(folder: Path):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_in_and_out_again_is_byte_identical(published, tmp_path):
    imported = convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    assert (imported.family, imported.dtype) == ("qwen3", "bfloat16")
    assert imported.parameters == parameters.count(tiny.CONFIG)
    exported = export.export_hf(
        tmp_path / "mine", str(tmp_path / "back"), SCREEN, part_bytes=10_000
    )
    assert contents(tmp_path / "back") == contents(published)
    assert sorted(exported.files) == sorted(os.listdir(published))
    assert (exported.step, exported.tensors) == (0, 2 + 3 * 11)
    json.dumps([dataclasses.asdict(imported), dataclasses.asdict(exported)])
    assert sorted(os.listdir(tmp_path)) == ["back", "mine", "published"]
    text = json.loads((tmp_path / "back" / "config.json").read_text())
    assert text["eos_token_id"] == 3 and "dtype" not in text and text["torch_dtype"] == "bfloat16"


def test_progress_ends_at_its_total(published, tmp_path):
    stream = io.StringIO()
    screen = LineScreen(stream, every=0.0)
    convert.import_hf(str(published), tmp_path / "mine", screen)
    export.export_hf(tmp_path / "mine", str(tmp_path / "back"), screen)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "1/1 MB" in line and line.startswith("import")]
    assert "export: 1/1 MB" in lines[-1]


def test_an_import_is_what_the_engine_adopts(published, tmp_path):
    convert.import_hf(str(published), tmp_path / "mine", SCREEN, dtype="float32")
    abstract = parameters.abstract_params(tiny.CONFIG)
    params, meta = load_params(tmp_path / "mine" / "checkpoints", 0, abstract)
    _, expected = huggingface.import_policy(published)
    jax.tree.map(
        lambda found, was: np.testing.assert_array_equal(found, was.astype(np.float32)),
        params, expected,
    )  # fmt: skip
    assert meta["policy"]["valid_vocab"] == 60


def test_a_runs_newest_step_is_exported_with_the_tokenizer_it_started_from(published, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"policy": str(published)}))
    meta = {"policy": dataclasses.asdict(tiny.CONFIG), "leaf_checksums": {}}
    for step in (3, 12):
        write(run / "checkpoints", step, {"params": tiny.params(step), "meta": meta}, keep=5)
    for source, step in ((run, None), (run / "checkpoints", 3)):
        found = export.export_hf(source, str(tmp_path / f"out{step}"), SCREEN, "float32", step=step)
        config, params = huggingface.import_policy(tmp_path / f"out{step}")
        assert found.step == (step or 12) and config.valid_vocab == 60
        jax.tree.map(np.testing.assert_array_equal, params, tiny.params(found.step))
        assert (tmp_path / f"out{step}" / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    with pytest.raises(ValueError, match="has no step 4; there: 3, 12"):
        export.export_hf(run, str(tmp_path / "x"), SCREEN, step=4)
    (run / "config.json").write_text('{"policy": "')
    with pytest.raises(
        ValueError, match="run/config.json is cut off, or no JSON; mend it, or name"
    ):
        export.export_hf(run, str(tmp_path / "x"), SCREEN)
    (run / "config.json").unlink()
    with pytest.raises(ValueError, match="does not say which policy it started from; name"):
        export.export_hf(run, str(tmp_path / "x"), SCREEN)
    export.export_hf(run, str(tmp_path / "x"), SCREEN, like=str(published))
    with pytest.raises(ValueError, match="x is not empty"):
        export.export_hf(run, str(tmp_path / "x"), SCREEN, like=str(published))
    export.export_hf(run, str(tmp_path / "x"), SCREEN, like=str(published), overwrite=True)
    other = dataclasses.replace(tiny.CONFIG, heads=2)
    huggingface.export_params(other, tiny.params(0, other), tmp_path / "other")
    with pytest.raises(ValueError, match="has heads=4, and .*other 2; name the Hugging Face"):
        export.export_hf(run, str(tmp_path / "y"), SCREEN, like=str(tmp_path / "other"))


def test_an_export_says_what_its_dtype_cannot_hold(published, tmp_path, capsys):
    """Of two numbers that moved, bfloat16 has room for one; float32 for both."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"policy": str(published)}))
    _, params = huggingface.import_policy(published)
    params = jax.tree.map(lambda x: np.array(x, np.float32), params)
    norm = params["final_norm"]
    norm[:2] *= np.float32([1 + 2**-3, 1 + 2**-12])
    meta = {"policy": dataclasses.asdict(tiny.CONFIG), "leaf_checksums": {}}
    write(run / "checkpoints", 1, {"params": params, "meta": meta}, keep=1)
    for dtype, unseen in (("bfloat16", 1), ("float32", 0)):
        out = str(tmp_path / dtype)
        assert cli.main(["export-hf", str(run), out, "--dtype", dtype, "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert (made["moved"], made["unseen"]) == (2, unseen)
        assert made["delta_lost"] < 0.01
    assert cli.main(["export-hf", str(run), str(tmp_path / "again")]) == 0
    line = "of 2 weights that training moved, 1 (50%) moved by less than bfloat16 can hold"
    assert line in capsys.readouterr().err
    (tmp_path / "gone").mkdir()
    for name in ("config.json", "tokenizer.json"):  # weights that are not here any more
        (tmp_path / "gone" / name).write_bytes((published / name).read_bytes())
    (run / "config.json").write_text(json.dumps({"policy": str(tmp_path / "gone")}))
    assert export.export_hf(run, str(tmp_path / "other"), SCREEN).moved is None


def test_a_runs_adapters_are_exported_alone(published, tmp_path, capsys):
    """Merged from the files they are the policy that the run's step holds."""
    words = (
        f"policy={published}", "optimizer.kind=adamw", "optimizer.decay=none",
        "grpo.lora.rank=2", "grpo.lora.alpha=3.0", 'grpo.lora.targets=("q", "down")',
    )  # fmt: skip
    config = configuration.load("quickstart", [f"--config.{word}" for word in words])
    learning = learner.prepare(config, *huggingface.import_policy(published))
    moved = jax.tree.map(lambda x: x + 0.25, learning.state)
    learning.state, adapters = moved, moved.masters
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.keep_base(learning.frozen)
    checkpoints.save(7, *learner.saved(learning), {}, {})
    settings = json.dumps(keys.plain(config))
    (run / "config.json").write_text(settings)
    command = ["export-hf", str(run), str(tmp_path / "out"), "--adapters", "--json"]
    assert cli.main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["tensors"], told["dtype"]) == (7, 12, "float32")
    text = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert text["base_model_name_or_path"] == str(published)
    assert (text["r"], text["lora_alpha"]) == (2, 3)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for target, name in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
        into, out = (adapters["layers"][f"{target}_lora_{way}"][1] for way in ("in", "out"))
        stem = f"base_model.model.model.layers.1.{name}.lora_"
        np.testing.assert_array_equal(found[stem + "A.weight"], into.T)
        np.testing.assert_array_equal(found[stem + "B.weight"], out.reshape(2, -1).T)

    for said, says in (
        ({"rank": 0}, "run trained no adapters .* export the policy, without"),
        ({}, "run trained no adapters"),
        ({"rank": 4, "alpha": 3.0, "targets": ["q", "down"]}, "at rank 4"),
        ({"rank": 2, "alpha": 3.0, "targets": ["q"]}, "the adapters have down_lora_in"),
    ):
        text = json.loads(settings) | {"grpo": {"lora": said}}
        (run / "config.json").write_text(json.dumps(text))
        with pytest.raises(ValueError, match=says) as raised:
            export.export_adapters(run, str(tmp_path / "x"), SCREEN)
        assert "\n" not in str(raised.value)
    # As earlier versions saved it: whole.
    (run / "config.json").write_text(settings)
    whole = lora_merge.merged(parameters.join(learning.frozen, adapters))
    Checkpoints(run / "checkpoints").save(8, whole, {"moment": np.zeros(1)}, {}, {})
    with pytest.raises(ValueError, match="checkpoints/8 has its adapters added in .an earlier"):
        export.export_adapters(run, str(tmp_path / "x"), SCREEN)
    export.export_hf(run, str(tmp_path / "out"), SCREEN, "float32", overwrite=True)
    same = lambda a, b: np.testing.assert_array_equal(a, b)  # noqa: E731
    jax.tree.map(same, huggingface.import_policy(tmp_path / "out")[1], whole)
    convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    with pytest.raises(ValueError, match="mine trained no adapters"):
        export.export_adapters(tmp_path / "mine", str(tmp_path / "x"), SCREEN)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out", "published", "run"]


def test_bad_input_ends_in_one_line_and_leaves_nothing(published, tmp_path):
    def refused(says, call):
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(ValueError, match=says) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert sorted(os.listdir(tmp_path)) == before

    def import_to(name="new", **options):
        return lambda: convert.import_hf(str(published), tmp_path / name, SCREEN, **options)

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    refused("full is not empty", import_to("full"))
    refused("holds something that is no exported policy", import_to("full", overwrite=True))
    refused("dtype is 'int4'; choose one of bfloat16", import_to(dtype="int4"))
    refused("lies in a local folder", lambda: convert.import_hf(str(published), "gs://b/p", SCREEN))
    refused("has no finished checkpoint", lambda: export.export_hf(published, "x", SCREEN))
    refused(
        "nowhere is not a folder",
        lambda: convert.import_hf(str(tmp_path / "nowhere"), tmp_path / "new", SCREEN),
    )

    def in_place(**options):
        return lambda: convert.import_hf(str(published), published, SCREEN, **options)

    refused("published is the source; choose another", in_place())
    refused("published is the source; choose another", in_place(overwrite=True))
    (tmp_path / "link").symlink_to(published)
    refused("link is the source", import_to("link", overwrite=True))
    refused("published is the source", import_to("full/../published", overwrite=True))
    refused("holds the source; choose another", import_to("", overwrite=True))
    text = (published / "config.json").read_text()
    changed = json.loads(text)
    for change, says in (
        ({"model_type": "gpt2", "architectures": ["GPT2"]}, "'gpt2' is not supported; supported"),
        ({"vocab_size": 65}, r"has shape \(64, 32\), its config.json asks for \(65, 32\)"),
        ({"num_hidden_layers": 4}, "model.layers.3.* is missing"),
        ({"num_hidden_layers": 2}, "there is a tensor 'model.layers.2"),
    ):
        (published / "config.json").write_text(json.dumps(changed | change))
        refused(says, import_to())
    (published / "config.json").write_text(text)
    part = sorted(published.glob("*.safetensors"))[1]
    whole = part.read_bytes()
    part.write_bytes(whole[:-2])
    refused(f"{part.name} is cut short", import_to())
    part.unlink()
    refused(f"{part.name} is missing", import_to())
    part.write_bytes(whole)
    (published / "config.json").unlink()
    refused("config.json is missing", import_to())
    shutil.rmtree(published)
    published.mkdir()
    (published / "config.json").write_text(text)
    (published / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused("pytorch_model.bin is a pickle", import_to())


def test_an_import_is_not_replaced_by_its_own_export(published, tmp_path):
    convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    before = sorted(os.listdir(tmp_path / "mine"))
    for source, target, says in (
        ("mine", "mine/checkpoints", "checkpoints is the source"),
        ("mine", "mine", "mine holds the source"),
        ("mine/checkpoints", "mine", "mine holds the source"),
        ("mine", ".", "holds the source"),
    ):
        with pytest.raises(ValueError, match=f"{says}; choose another destination"):
            export.export_hf(tmp_path / source, str(tmp_path / target), SCREEN, overwrite=True)
    assert sorted(os.listdir(tmp_path / "mine")) == before


def test_control_characters_of_files_never_reach_the_terminal(published, tmp_path, capsys):
    text = json.loads((published / "config.json").read_text())
    named = ["\x1b]0;evil\x07", "\x9b2J\u202e", "x" * 10_000, "\ud800", 10**400]
    for key in ("model_type", "torch_dtype", "hidden_act", "num_hidden_layers", "rope_scaling"):
        for value in named:
            (published / "config.json").write_text(json.dumps(text | {key: value}))
            assert cli.main(["import-hf", str(published), str(tmp_path / "out")]) == 1
            said = capsys.readouterr().err
            assert said.endswith("\n") and said[:-1].isprintable() and len(said) < 600
            assert said.startswith(f"notepad-jax: {published}/config.json")
    (tmp_path / "p\x1b[2J").mkdir()
    assert cli.main(["import-hf", str(tmp_path / "p\x1b[2J"), str(tmp_path / "out")]) == 1
    assert "p\ufffd[2J/config.json is missing" in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_named_in_numbers_that_tell(tmp_path, monkeypatch):
    free = types.SimpleNamespace(free=204_800)
    monkeypatch.setattr(folder_swap.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(StoreProblem, match=r"full: it needs 0\.9 MB and 0\.2 MB are free"):
        convert.import_hf(str(STARTER), tmp_path / "mine", SCREEN)


def test_a_disk_that_fills_up_while_orbax_writes(published, tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: write failed: No space left on device\nat file.cc")

    monkeypatch.setattr(convert, "_save", full)
    with pytest.raises(StoreProblem, match="the disk is full"):
        convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    assert os.listdir(tmp_path) == ["published"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2_000, 200_000])
def test_a_full_disk_leaves_nothing_of_a_policy_whose_leaves_are_written_one_by_one(
    size, tmp_path, monkeypatch, capfd
):
    """tensorstore still writes when the first of them has failed; it is waited for."""
    monkeypatch.setattr(convert, "AT_ONCE", 0)
    convert.import_hf(str(STARTER), tmp_path / "mine", SCREEN)
    before = limits.content(tmp_path)
    for name in ("mine", "new"):
        with limits.largest_file(size), pytest.raises(ValueError, match="File too large|is full"):
            convert.import_hf(str(STARTER), tmp_path / name, SCREEN, overwrite=True)
        assert limits.content(tmp_path) == before
    assert capfd.readouterr().err == ""
