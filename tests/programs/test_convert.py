"""import-hf and export-hf: a policy goes in, comes out the same, and mistakes cost one line."""

import dataclasses
import io
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
import tiny
from safetensors.numpy import load_file

from notepad_jax import cli
from notepad_jax.checkpoint import manifest, stored
from notepad_jax.checkpoint.checksums import leaf_checksums
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.hf.storage import StoreProblem
from notepad_jax.checkpoint.steps import load_params, write
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.model import parameters
from notepad_jax.programs import configuration, convert, learner, parts
from notepad_jax.telemetry.progress import LineScreen, SilentScreen

SCREEN = SilentScreen()


@pytest.fixture
def published(tmp_path):
    """A Hugging Face folder in several parts, with everything that travels along."""
    beside = {
        "generation_config.json": b'{"eos_token_id": 3}\n',
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
    }
    huggingface.export(
        tiny.CONFIG, tiny.params(), tmp_path / "published", "bfloat16", beside,
        {"eos_token_id": 3, "dtype": "float64"}, part_bytes=10_000,
    )  # fmt: skip
    return tmp_path / "published"


def contents(folder: Path):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_in_and_out_again_is_byte_identical(published, tmp_path):
    imported = convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    assert (imported.family, imported.dtype) == ("qwen3", "bfloat16")
    assert imported.parameters == parameters.count(tiny.CONFIG)
    exported = convert.export_hf(
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
    convert.export_hf(tmp_path / "mine", str(tmp_path / "back"), screen)
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
        found = convert.export_hf(
            source, str(tmp_path / f"out{step}"), SCREEN, "float32", step=step
        )
        config, params = huggingface.import_policy(tmp_path / f"out{step}")
        assert found.step == (step or 12) and config.valid_vocab == 60
        jax.tree.map(np.testing.assert_array_equal, params, tiny.params(found.step))
        assert (tmp_path / f"out{step}" / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    with pytest.raises(ValueError, match="has no step 4; there: 3, 12"):
        convert.export_hf(run, str(tmp_path / "x"), SCREEN, step=4)
    (run / "config.json").write_text('{"policy": "')
    with pytest.raises(
        ValueError, match="run/config.json is cut off, or no JSON; mend it, or name"
    ):
        convert.export_hf(run, str(tmp_path / "x"), SCREEN)
    (run / "config.json").unlink()
    with pytest.raises(ValueError, match="does not say which policy it started from; name"):
        convert.export_hf(run, str(tmp_path / "x"), SCREEN)
    convert.export_hf(run, str(tmp_path / "x"), SCREEN, like=str(published))
    with pytest.raises(ValueError, match="x is not empty"):
        convert.export_hf(run, str(tmp_path / "x"), SCREEN, like=str(published))
    convert.export_hf(run, str(tmp_path / "x"), SCREEN, like=str(published), overwrite=True)
    other = dataclasses.replace(tiny.CONFIG, heads=2)
    huggingface.export_params(other, tiny.params(0, other), tmp_path / "other")
    with pytest.raises(ValueError, match="has heads=4, and .*other 2; name the Hugging Face"):
        convert.export_hf(run, str(tmp_path / "y"), SCREEN, like=str(tmp_path / "other"))


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
    run, params = tmp_path / "run", learner.params(learning)
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(7, params, learner.saved_beside(learning, params), {}, {})
    settings = json.dumps(configuration.plain(config))
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

    for lora, says in (
        ({"rank": 0}, "run trained no adapters .* export the policy, without"),
        ({}, "run trained no adapters"),
        ({"rank": 4, "alpha": 3.0, "targets": ["q", "down"]}, "at rank 4"),
        ({"rank": 2, "alpha": 3.0, "targets": ["q"]}, "the adapters have down_lora_in"),
    ):
        text = json.loads(settings) | {"grpo": {"lora": lora}}
        (run / "config.json").write_text(json.dumps(text))
        with pytest.raises(ValueError, match=says) as raised:
            convert.export_adapters(run, str(tmp_path / "x"), SCREEN)
        assert "\n" not in str(raised.value)
    convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    with pytest.raises(ValueError, match="mine trained no adapters"):
        convert.export_adapters(tmp_path / "mine", str(tmp_path / "x"), SCREEN)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out", "published", "run"]


class Counted:
    """A stored array that remembers what was read of it."""

    def __init__(self, array, reads):
        self.array, self.reads, self.chunk_layout = array, reads, array.chunk_layout

    def __getitem__(self, index):
        self.reads.append(index)
        return self.array[index]


def test_layers_that_share_a_chunk_are_read_once(tmp_path):
    params = {"layers": {"q": np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)}}
    write(tmp_path, 0, {"params": params, "meta": {}}, keep=1)
    leaf = stored.open_tree(tmp_path / "0")["layers"]["q"]
    reads = []

    leaf._array = Counted(leaf._array, reads)
    for layer in (0, 1, 2, 3):
        np.testing.assert_array_equal(leaf[(layer,)], params["layers"]["q"][layer])
    np.testing.assert_array_equal(leaf[(2, 1)], params["layers"]["q"][2, 1])
    assert reads == [slice(0, 4)]
    with pytest.raises(ValueError, match="has no params that can be read"):
        stored.open_tree(tmp_path / "1")


def test_a_large_leaf_is_read_a_layer_at_a_time(tmp_path):
    """2 MB a layer. What a reader holds is one layer of one leaf, whatever else there is."""
    rng = np.random.default_rng(0)
    params = {
        "layers": {name: rng.normal(size=(3, 2, 256, 1024)).astype(np.float32) for name in "ab"}
    }
    leaves = leaf_checksums(params)
    write(tmp_path, 0, {"params": params, "meta": {"leaf_checksums": leaves}}, keep=1)
    found, reads = stored.open_tree(tmp_path / "0")["layers"], []
    for leaf in found.values():
        assert leaf._array.chunk_layout.read_chunk.shape == (1, 2, 256, 1024)
        leaf._array = Counted(leaf._array, reads)
    for name in "ab":
        for index in np.ndindex(3, 2):  # an entry for each layer and expert
            np.testing.assert_array_equal(found[name][index], params["layers"][name][index])
    assert reads == [slice(0, 1), slice(1, 2), slice(2, 3)] * 2
    assert found["a"]._held is found["b"]._held and found["b"]._held.rows.nbytes == 2**21
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    back, _ = load_params(tmp_path, 0, target)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_a_damaged_step_is_refused_in_one_line_and_nothing_is_left(published, tmp_path):
    convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    step = tmp_path / "mine" / "checkpoints" / "0"

    def refused(says):
        with pytest.raises(ValueError, match=says) as raised:
            convert.export_hf(tmp_path / "mine", str(tmp_path / "out"), SCREEN)
        assert "\n" not in str(raised.value)
        assert sorted(os.listdir(tmp_path)) == ["mine", "published"]

    # one element of one layer is another number, in files that agree with their manifest
    leaf = stored.open_tree(step)["layers"]["down"]
    array = ts.open(leaf._array.spec(), open=True).result()
    was = array[1, 7, 3].read().result()
    array[1, 7, 3].write(-was).result()
    refused(r"step 0 is damaged \(params/d/\w+ does not belong there\)")
    manifest.write(step, manifest.made(step))
    refused(r"0: layers/down was saved as bfloat16\[3x48x32\]:\w{8} and reads as .*is damaged; exp")
    array[1, 7, 3].write(was).result()
    manifest.write(step, manifest.made(step))
    convert.export_hf(tmp_path / "mine", str(tmp_path / "sound"), SCREEN)
    shutil.rmtree(tmp_path / "sound")
    for path in (step / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            path.write_bytes(path.read_bytes()[:5000])
    refused(r"step 0 is damaged \(params/\S+ is cut: 5,000 of [\d,]+ bytes\)")
    with pytest.raises(ValueError, match=r"step 0 is damaged \(params.*; import the policy again$"):
        parts.load_policy(tmp_path / "mine")
    manifest.write(step, manifest.made(step))
    refused("0: .* cannot be read, so the step is damaged; export another step")


def test_the_newest_good_step_is_exported_and_what_was_passed_over_is_said(published, tmp_path):
    """What an export does not read may be damaged: the weights, for adapters alone."""
    run, target = tmp_path / "run", str(tmp_path / "out")
    config = configuration.load("quickstart", ["--config.grpo.lora.rank=2"])
    config.policy, config.grpo.lora.targets = str(published), ("q",)
    learning = learner.prepare(config, *huggingface.import_policy(published))
    params, checkpoints = learner.params(learning), Checkpoints(run / "checkpoints")
    meta = {"policy": dataclasses.asdict(tiny.CONFIG)}
    for step in (3, 12):
        checkpoints.save(step, params, learner.saved_beside(learning, params), {}, meta)
    (run / "config.json").write_text(json.dumps(configuration.plain(config)))
    stream = io.StringIO()
    screen = LineScreen(stream)

    def exported(export, **options):
        return export(run, target, screen, overwrite=True, **options).step

    for item, harmed, sound in (
        ("opt", convert.export_adapters, convert.export_hf),
        ("params", convert.export_hf, convert.export_adapters),
    ):
        path = max((run / "checkpoints/12" / item).rglob("d/*"), key=lambda p: p.stat().st_size)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
        assert exported(sound) == 12 and "damaged" not in stream.getvalue()
        shutil.rmtree(target)
        assert exported(harmed) == 3
        (said,) = [line for line in stream.getvalue().splitlines() if "damaged" in line]
        assert f"step 12 is damaged ({item}/" in said and said.endswith("newest good step is 3")
        damaged = rf"step 12 is damaged \({item}/\S+ has other bytes than were saved\); others"
        with pytest.raises(ValueError, match=damaged) as refused:
            exported(harmed, step=12)
        assert "\n" not in str(refused.value)
        path.write_bytes(content)
        stream.truncate(0)
        shutil.rmtree(target)


def test_flipped_bits_are_refused_or_harm_no_weight(tmp_path):
    """Anywhere in a step's files; half of them in the largest, which holds the weights."""
    params = tiny.params()
    meta = {"leaf_checksums": leaf_checksums(params)}
    write(tmp_path, 0, {"params": params, "meta": meta}, keep=1)

    def read():
        found = stored.open_tree(tmp_path / "0")
        layers = found.pop("layers")
        stacked = {
            n: np.stack([leaf[(i,)] for i in range(len(params["layers"][n]))])
            for n, leaf in layers.items()
        }
        return {n: leaf[()] for n, leaf in found.items()} | {"layers": stacked}

    rng, refused = np.random.default_rng(0), 0
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size)
    largest = max(files, key=lambda path: path.stat().st_size)
    for attempt in range(60):
        path = largest if attempt % 2 else files[rng.integers(len(files))]
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[rng.integers(len(sound))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            jax.tree.map(np.testing.assert_array_equal, read(), params)
        except ValueError as problem:
            assert "\n" not in str(problem)
            refused += 1
        path.write_bytes(sound)
    assert refused > 20


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
    refused("cannot be split into tensor groups of 3", import_to(tensor=3))
    refused("lies in a local folder", lambda: convert.import_hf(str(published), "gs://b/p", SCREEN))
    refused("has no finished checkpoint", lambda: convert.export_hf(published, "x", SCREEN))
    refused(
        "nowhere is not a folder",
        lambda: convert.import_hf(str(tmp_path / "nowhere"), tmp_path / "new", SCREEN),
    )
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


def test_a_disk_that_fills_up_while_orbax_writes(published, tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: write failed: No space left on device\nat file.cc")

    monkeypatch.setattr(convert, "_save", full)
    with pytest.raises(StoreProblem, match="the disk is full"):
        convert.import_hf(str(published), tmp_path / "mine", SCREEN)
    assert os.listdir(tmp_path) == ["published"]
