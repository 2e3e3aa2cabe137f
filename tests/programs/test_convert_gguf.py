"""import-hf of GGUF files: the same kind of folder as of safetensors, and one line for mistakes."""

import json
import os
import sys

import jax
import numpy as np
import pytest
import tiny_gguf

import notepad_jax.checkpoint.gguf
from notepad_jax import cli
from notepad_jax.programs import convert, export
from notepad_jax.setup import builders
from notepad_jax.telemetry.screen import SilentScreen

SCREEN = SilentScreen()
ROOM = "notepad_jax.checkpoint.gguf"


@pytest.fixture
def source(tmp_path):
    return tiny_gguf.folder(tmp_path / "source", "llama")


def test_a_gguf_file_comes_in_as_a_policy_and_goes_out_as_safetensors(source, tmp_path):
    path = tiny_gguf.write(tmp_path / "it.gguf", source, "llama", "Q8_0")
    imported = convert.import_hf(str(path), tmp_path / "mine", SCREEN)
    assert (imported.family, imported.dtype) == ("llama", "bfloat16")
    exported = export.export_hf(tmp_path / "mine", str(tmp_path / "back"), SCREEN)
    assert "tokenizer.json" in exported.files and "generation_config.json" in exported.files
    tiny_gguf.dequantised(source, tmp_path / "held", "Q8_0")
    ours, back, wanted = (
        builders.load_policy(tmp_path / name, "float32") for name in ("mine", "back", "held")
    )
    for loaded in (ours, back):
        assert loaded.config == wanted.config
        assert loaded.tokenizer.encode("the code 12").tolist() == (
            wanted.tokenizer.encode("the code 12").tolist()
        )
        jax.tree.map(
            lambda found, was: np.testing.assert_array_equal(found, was.astype("bfloat16")),
            loaded.params, wanted.params,
        )  # fmt: skip
    assert ours.config.valid_vocab == ours.config.vocab_size - 3  # rows that no token has


def test_the_dtype_is_said_and_may_be_asked_for(source, tmp_path, capsys):
    path = tiny_gguf.write(tmp_path / "it.gguf", source, "llama", "Q4_1")
    out = str(tmp_path / "out")
    assert cli.main(["import-hf", str(path), out, "--dtype", "float32"]) == 0
    told = capsys.readouterr()
    assert "tensors are 15 Q4_1, 5 F32; written as float32 (--dtype)" in told.err
    assert "parameters of a llama in float32" in told.out
    plain = tiny_gguf.write(tmp_path / "plain.gguf", source, "llama")
    assert cli.main(["import-hf", str(plain), out, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"
    assert cli.main(["import-hf", str(source), out, "--overwrite"]) == 0
    assert "tensors are 20 F32; written as float32" in capsys.readouterr().err


def test_a_file_is_known_by_its_first_bytes_too(source, tmp_path):
    tiny_gguf.write(tmp_path / "it", source, "llama")
    assert convert.import_hf(str(tmp_path / "it"), tmp_path / "out", SCREEN).family == "llama"


def test_mistakes_end_in_one_line_and_leave_nothing(source, tmp_path, capsys):
    path = tiny_gguf.write(tmp_path / "it.gguf", source, "llama")
    strange = tiny_gguf.write(
        tmp_path / "b.gguf", source, "llama", metadata={"general.architecture": "gemma3"}
    )
    parts_of_one = tmp_path / "parts"
    parts_of_one.mkdir()
    for n in (1, 2, 3):
        (parts_of_one / f"big-0000{n}-of-00003.gguf").write_bytes(path.read_bytes())
    (tmp_path / "text.txt").write_text("no model at all")
    before = sorted(os.listdir(tmp_path))
    for given, says in (
        (path.parent / "nowhere.gguf", "nowhere.gguf is no file; give a .gguf file that lies here"),
        (strange, "architecture 'gemma3' is not read; read are llama, qwen2, qwen3, qwen3moe"),
        (parts_of_one / "big-00001-of-00003.gguf", "is one of 3 parts of a model; join them first"),
        (parts_of_one, f"name the one to import: {parts_of_one}/big-00001-of-00003.gguf"),
        (tmp_path / "text.txt", "text.txt is not a folder; give a Hugging Face folder"),
        ("gs://bucket/it.gguf", "a GGUF file is read from a local disk; copy it there"),
    ):
        assert cli.main(["import-hf", str(given), str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1
        assert sorted(os.listdir(tmp_path)) == before
    assert cli.main(["import-hf", str(path), str(tmp_path), "--overwrite"]) == 1
    assert "holds the source; choose another destination" in capsys.readouterr().err


def test_without_the_extra_one_line_says_how_to_get_it(source, tmp_path, capsys, monkeypatch):
    path = tiny_gguf.write(tmp_path / "it.gguf", source, "llama")
    for name in ("policy", "reader"):
        monkeypatch.delitem(sys.modules, f"{ROOM}.{name}", raising=False)
        monkeypatch.delattr(notepad_jax.checkpoint.gguf, name, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["import-hf", str(path), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said == (
        "notepad-jax: reading GGUF needs gguf, which is not installed; "
        "pip install 'notepad-jax[gguf]'\n"
    )
    assert cli.main(["import-hf", str(source), str(tmp_path / "out")]) == 0  # that needs no extra
