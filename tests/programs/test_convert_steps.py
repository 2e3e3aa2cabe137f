"""What export-hf reads of a step: a layer at a time, and nothing that is damaged."""

import dataclasses
import io
import json
import os
import shutil

import jax
import numpy as np
import pytest
import tensorstore as ts
import tiny

from notepad_jax import keys
from notepad_jax.checkpoint import lazy_arrays, manifest
from notepad_jax.checkpoint.checksums import leaf_checksums
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.restore import load_params
from notepad_jax.checkpoint.steps import write
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.programs import convert, export
from notepad_jax.setup import builders, configuration, learner
from notepad_jax.telemetry.line_screen import LineScreen
from notepad_jax.telemetry.screen import SilentScreen

SCREEN = SilentScreen()


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
    leaf = lazy_arrays.open_tree(tmp_path / "0")["layers"]["q"]
    reads = []

    leaf._array = Counted(leaf._array, reads)
    for layer in (0, 1, 2, 3):
        np.testing.assert_array_equal(leaf[(layer,)], params["layers"]["q"][layer])
    np.testing.assert_array_equal(leaf[(2, 1)], params["layers"]["q"][2, 1])
    assert reads == [slice(0, 4)]
    with pytest.raises(ValueError, match="has no params that can be read"):
        lazy_arrays.open_tree(tmp_path / "1")


def test_a_large_leaf_is_read_a_layer_at_a_time(tmp_path):
    """2 MB a layer. What a reader holds is one layer of one leaf, whatever else there is."""
    rng = np.random.default_rng(0)
    params = {
        "layers": {name: rng.normal(size=(3, 2, 256, 1024)).astype(np.float32) for name in "ab"}
    }
    leaves = leaf_checksums(params)
    write(tmp_path, 0, {"params": params, "meta": {"leaf_checksums": leaves}}, keep=1)
    found, reads = lazy_arrays.open_tree(tmp_path / "0")["layers"], []
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
            export.export_hf(tmp_path / "mine", str(tmp_path / "out"), SCREEN)
        assert "\n" not in str(raised.value)
        assert sorted(os.listdir(tmp_path)) == ["mine", "published"]

    # one element of one layer is another number, in files that agree with their manifest
    leaf = lazy_arrays.open_tree(step)["layers"]["down"]
    array = ts.open(leaf._array.spec(), open=True).result()
    was = array[1, 7, 3].read().result()
    array[1, 7, 3].write(-was).result()
    refused(r"step 0 is damaged \(params/d/\w+ does not belong there\)")
    manifest.write(step, manifest.made(step))
    refused(r"0: layers/down was saved as bfloat16\[3x48x32\]:\w{8} and reads as .*is damaged; exp")
    array[1, 7, 3].write(was).result()
    manifest.write(step, manifest.made(step))
    export.export_hf(tmp_path / "mine", str(tmp_path / "sound"), SCREEN)
    shutil.rmtree(tmp_path / "sound")
    for path in (step / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 5_000:
            path.write_bytes(path.read_bytes()[:5000])
    refused(r"step 0 is damaged \(params/\S+ is cut: 5,000 of [\d,]+ bytes\)")
    with pytest.raises(ValueError, match=r"step 0 is damaged \(params.*; import the policy again$"):
        builders.load_policy(tmp_path / "mine")
    manifest.write(step, manifest.made(step))
    refused("0: .* cannot be read, so the step is damaged; export another step")


def test_the_newest_good_step_is_exported_and_what_was_passed_over_is_said(published, tmp_path):
    """What an export does not read may be damaged: moments; and the base, for adapters alone."""
    run, target = tmp_path / "run", str(tmp_path / "out")
    said = ("grpo.lora.rank=2", "grpo.lora.targets=q", f"policy={published}")
    config = configuration.load("quickstart", [f"--config.{word}" for word in said])
    learning = learner.prepare(config, *huggingface.import_policy(published))
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.keep_base(learning.frozen)
    meta = {"policy": dataclasses.asdict(tiny.CONFIG)}
    for step in (3, 12):
        checkpoints.save(step, *learner.saved(learning), {}, meta)
    (run / "config.json").write_text(json.dumps(keys.plain(config)))
    stream = io.StringIO()
    screen = LineScreen(stream)

    def exported(how, **options):
        return how(run, target, screen, overwrite=True, **options).step

    def flipped(folder):
        path = max(folder.rglob("d/*"), key=lambda p: p.stat().st_size)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
        return lambda: path.write_bytes(content)

    flipped(run / "checkpoints/12/opt")
    both = export.export_adapters, export.export_hf
    for out in both:
        assert exported(out) == 12 and "damaged" not in stream.getvalue()
        shutil.rmtree(target)
    mended = flipped(run / "checkpoints/12/params")
    for out in both:
        assert exported(out) == 3
        (said,) = [line for line in stream.getvalue().splitlines() if "damaged" in line]
        assert "step 12 is damaged (params/" in said and said.endswith("newest good step is 3")
        damaged = r"step 12 is damaged \(params/\S+ has other bytes than were saved\); others"
        with pytest.raises(ValueError, match=damaged) as refused:
            exported(out, step=12)
        assert "\n" not in str(refused.value)
        stream.truncate(0)
        shutil.rmtree(target)
    mended()
    flipped(run / "checkpoints/base/0/params")
    assert exported(export.export_adapters) == 12
    with pytest.raises(
        ValueError, match=r"base: step 0 is damaged \(params/.*; resume the run, wh"
    ):
        exported(export.export_hf)
    checkpoints.keep_base(learning.frozen)
    assert exported(export.export_hf) == 12


def test_flipped_bits_are_refused_or_harm_no_weight(tmp_path):
    """Anywhere in a step's files; half of them in the largest, which holds the weights."""
    params = tiny.params()
    meta = {"leaf_checksums": leaf_checksums(params)}
    write(tmp_path, 0, {"params": params, "meta": meta}, keep=1)

    def read():
        found = lazy_arrays.open_tree(tmp_path / "0")
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
