"""Folders that are not what they seem: refused in one printable line, soon, and by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from tensor_files import whole, write

from notepad_jax.checkpoint.hf import huggingface as hf
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.sharded_loading import Layout
from notepad_jax.checkpoint.hf.storage import StoreProblem, quoted

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    return hf.export_params(tiny.CONFIG, tiny.params(), tmp_path / "policy")


def refused(folder, says):
    with pytest.raises(ValueError, match=says) as raised:
        hf.import_policy(folder)
    said = str(raised.value)
    assert said.isprintable() and len(said) < 600
    return said


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_named_whatever_the_dtype(tmp_path, dtype, bad):
    """In the last element of a tensor that is read in several strips."""
    weights = np.full((150, 6), np.finfo(np.float16).max, np.float32)
    write(tmp_path / "sound", {"w": weights.astype(dtype)})
    layout = Layout(("w",), (), (150, 6), (150, 6), (1, 0))
    assert np.isfinite(whole(Safetensors.open(tmp_path / "sound"), layout).astype(np.float32)).all()
    weights[-1, -1] = bad
    write(tmp_path / "out", {"w": weights.astype(dtype)})
    says = r"^tensor 'w' in .*/out/model.safetensors holds (nan|inf), which is no weight; the check"
    with pytest.raises(StoreProblem, match=says):
        whole(Safetensors.open(tmp_path / "out"), layout)


def test_a_weight_too_large_for_the_dtype_asked_for_is_named(tmp_path):
    write(tmp_path / "out", {"w": np.array([[1.0, -70_000.0]], np.float32)})
    layout = Layout(("w",), (), (1, 2), (1, 2), (0, 1))
    assert whole(Safetensors.open(tmp_path / "out"), layout, "bfloat16").dtype == ml_dtypes.bfloat16
    with pytest.raises(StoreProblem, match="holds 70000, too large for float16; take another"):
        whole(Safetensors.open(tmp_path / "out"), layout, "float16")


def test_a_nan_in_a_policy_is_refused_by_the_name_of_its_tensor(folder):
    named = load_file(folder / hf.WEIGHTS)
    name = "model.layers.1.mlp.down_proj.weight"
    named[name][3, 5] = np.nan
    save_file(named, folder / hf.WEIGHTS)
    refused(folder, f"tensor '{name}' in .* holds nan, which is no weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 2 * 10**9}, r"'model.layers.3.input_layernorm.weight' is missing"),
        ({"vocab_size": 2 * 10**9}, r"'model.embed_tokens.weight' has shape \(64, 32\), its"),
        ({"model_type": "qwen3_moe", "num_experts": 2 * 10**9, "moe_intermediate_size": 4},
         r"'model.layers.0.mlp.gate.weight' is missing"),
    ],
)  # fmt: skip
def test_sizes_are_compared_with_the_file_before_anything_is_made_of_them(folder, change, says):
    text = json.loads((folder / hf.CONFIG).read_text()) | change
    (folder / hf.CONFIG).write_text(json.dumps(text))
    refused(folder, says)


def test_an_export_compares_sizes_before_it_names_tensors():
    config = hf.read_config(hf.write_config(tiny.CONFIG, "float32") | {"num_hidden_layers": 10**9})
    with pytest.raises(hf.ImportProblem, match=r"has shape \(3, .*\), not \(1000000000, "):
        hf.export(config, tiny.params(), "nowhere")


OPENED = """
import sys
from notepad_jax.checkpoint.hf import headers, storage
for folder in sys.argv[1:]:
    try:
        storage.read_json(folder, storage.open_kvstore(folder), storage.CONFIG)
        headers.Safetensors.open(folder)
    except storage.StoreProblem as problem:
        print(problem)
"""


def test_pipes_devices_and_folders_in_the_place_of_files_are_refused_at_once(folder, tmp_path):
    """In a process of their own, which can be stopped if one of them is waited for."""
    folders, wanted = [], []
    for file in (hf.CONFIG, hf.WEIGHTS, hf.INDEX):
        for what in ("a pipe or a device", "a pipe or a device", "a folder"):
            made = tmp_path / f"case {len(folders)}"
            shutil.copytree(folder, made)
            (made / file).unlink(missing_ok=True)
            if what == "a folder":
                (made / file).mkdir()
            elif len(folders) % 2:
                os.mkfifo(made / file)
            else:
                (made / file).symlink_to("/dev/zero")
            folders.append(str(made))
            wanted.append(f"{made}/{file} is {what}, not a file; put the file there")
    ran = subprocess.run(
        [sys.executable, "-c", OPENED, *folders],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout.splitlines() == wanted, ran.stderr


def test_control_characters_and_long_names_are_shown_harmlessly(folder):
    assert quoted("a\x1b[2J\u202e") == r"'a\x1b[2J\u202e'"
    assert quoted("x" * 10**5) == "'" + "x" * 79 + "... (100,002 characters)"
    named = load_file(folder / hf.WEIGHTS)
    save_file(named | {"\x1b]0;evil\x07": named["model.norm.weight"]}, folder / hf.WEIGHTS)
    refused(folder, r"there is a tensor '\\x1b\]0;evil\\x07', which a qwen3 decoder")
    save_file(named | {"n" * 100_000: named["model.norm.weight"]}, folder / hf.WEIGHTS)
    refused(folder, r"there is a tensor 'n{79}\.\.\. \(100,002 characters\), which a qwen3 decoder")
    save_file(named, folder / hf.WEIGHTS)
    index = {"weight_map": dict.fromkeys(named, "\x1b[2J.safetensors")}
    (folder / hf.INDEX).write_text(json.dumps(index))
    refused(folder, r"into '\\x1b\[2J.safetensors', which is no file name")
