"""Hugging Face folders: one table read both ways, and every mistake has its own message."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from notepad_jax.checkpoint.hf import huggingface as hf
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import abstract_params

QWEN3 = PolicyConfig(
    vocab_size=24,
    width=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=6,
    feed_forward=12,
    rope_theta=1e6,
    rms_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    tied_embeddings=True,
    valid_vocab=21,
)
QWEN2 = dataclasses.replace(QWEN3, qk_norm=False, attention_bias=True, tied_embeddings=False)
LLAMA = dataclasses.replace(QWEN2, attention_bias=False, rope_theta=1e4, rms_eps=1e-5)


def random_params(config, dtype="float32"):
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), dtype)  # noqa: E731
    return jax.tree.map(draw, abstract_params(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [QWEN3, QWEN2, LLAMA], ids=["qwen3", "qwen2", "llama"])
def test_export_and_import_are_inverse_and_byte_identical(config, dtype, tmp_path):
    params = random_params(config, dtype)
    first = hf.export_params(config, params, tmp_path / "first")
    read, back = hf.import_policy(first)
    assert read == dataclasses.replace(config, dtype=dtype)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for was, now in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
        assert now.dtype == was.dtype
        np.testing.assert_array_equal(now, was)
    second = hf.export_params(read, back, tmp_path / "second")
    for name in (hf.WEIGHTS, hf.CONFIG):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_published_tensors_have_published_names_and_layouts(tmp_path):
    params = random_params(QWEN2)
    tensors = load_file(hf.export_params(QWEN2, params, tmp_path / "p") / hf.WEIGHTS)
    assert len(tensors) == 3 + 2 * 12
    q = np.asarray(params["layers"]["q"])[1]  # [D, N, H]
    o = np.asarray(params["layers"]["o"])[1]  # [N, H, D]
    x, heads = np.arange(8.0), np.arange(24.0).reshape(4, 6)
    # A published linear layer computes y = W x with heads folded, head major.
    found = tensors["model.layers.1.self_attn.q_proj.weight"] @ x
    np.testing.assert_allclose(found.reshape(4, 6), np.einsum("d,dnh->nh", x, q), rtol=1e-5)
    found = tensors["model.layers.1.self_attn.o_proj.weight"] @ heads.reshape(-1)
    np.testing.assert_allclose(found, np.einsum("nh,nhd->d", heads, o), rtol=1e-5)
    bias = tensors["model.layers.0.self_attn.k_proj.bias"]
    np.testing.assert_array_equal(bias.reshape(2, 6), params["layers"]["k_bias"][0])
    np.testing.assert_array_equal(tensors["lm_head.weight"].T, params["unembed"])
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (8, 12)


def test_config_is_written_in_the_older_spelling_and_read_in_both(tmp_path):
    text = json.loads(
        (hf.export_params(QWEN3, random_params(QWEN3), tmp_path / "p") / hf.CONFIG).read_text()
    )
    assert text["architectures"] == ["Qwen3ForCausalLM"]
    assert (text["rope_theta"], text["torch_dtype"]) == (1e6, "float32")
    newer = {k: v for k, v in text.items() if k not in ("rope_theta", "torch_dtype")}
    newer |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    assert hf.read_config(newer) == dataclasses.replace(hf.read_config(text), dtype="bfloat16")


def test_qwen2s_published_config_is_understood():
    text = {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
        "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_sliding_window": False, "vocab_size": 152064,
    }  # fmt: skip
    config = hf.read_config(text)
    assert (config.head_size, config.kv_heads, config.attention_bias) == (128, 4, True)
    assert (config.valid_vocab, config.tied_embeddings, config.qk_norm) == (152064, False, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "architecture 'gpt2' is not supported; supported are llama, mistral",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "rope type 'dynamic'"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias"),
        ({"torch_dtype": "int8"}, "'int8'; supported are float32"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": None}, None),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(change, message):
    text = hf.write_config(QWEN3, "float32") | change
    if message is None:
        del text["hidden_size"]
        message = "'hidden_size' is missing"
    with pytest.raises(hf.ImportProblem, match=message):
        hf.read_config(text)


@pytest.fixture
def folder(tmp_path):
    return hf.export_params(QWEN3, random_params(QWEN3), tmp_path / "policy")


def test_missing_and_broken_files_are_named(folder):
    weights = folder / hf.WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        hf.import_policy(folder)
    weights.write_bytes(b"PK\x03\x04 this is a zip file")
    with pytest.raises(ValueError, match=r"model.safetensors"):
        hf.import_policy(folder)
    weights.write_bytes(b"")
    with pytest.raises(ValueError, match="cut short"):
        hf.import_policy(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing; download"):
        hf.import_policy(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle, which is not read"):
        hf.import_policy(folder)
    (folder / hf.CONFIG).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        hf.import_policy(folder)
    (folder / hf.CONFIG).unlink()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        hf.import_policy(folder)


def test_missing_wrong_and_unknown_tensors_are_named(folder):
    tensors = load_file(folder / hf.WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / hf.WEIGHTS)
    with pytest.raises(ValueError, match=f"{name}' is missing"):
        hf.import_policy(folder)
    save_file(tensors | {name: np.zeros((8, 12), np.float32)}, folder / hf.WEIGHTS)
    with pytest.raises(
        hf.ImportProblem, match=r"shape \(8, 12\), its config.json asks for \(12, 8"
    ):
        hf.import_policy(folder)
    bias = {"model.layers.0.self_attn.o_proj.bias": np.zeros(8, np.float32)}
    save_file(tensors | bias, folder / hf.WEIGHTS)
    with pytest.raises(ValueError, match="o_proj.bias"):
        hf.import_policy(folder)
    save_file(tensors | {name: np.zeros((12, 8), np.int64)}, folder / hf.WEIGHTS)
    with pytest.raises(ValueError, match="is I64"):
        hf.import_policy(folder)


def test_weights_in_several_files_are_found_through_their_index(folder):
    _, expected = hf.import_policy(folder)
    tensors = load_file(folder / hf.WEIGHTS)
    (folder / hf.WEIGHTS).unlink()
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in files if files[n] == file}, folder / file)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": files}))
    _, found = hf.import_policy(folder)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_export_is_all_or_nothing(tmp_path, monkeypatch):
    params = random_params(QWEN3)
    folder = hf.export_params(QWEN3, params, tmp_path / "p", {hf.TOKENIZER: b"pieces"})
    assert (folder / hf.TOKENIZER).read_bytes() == b"pieces"
    before = (folder / hf.WEIGHTS).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(hf, "write_config", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hf.export_params(QWEN3, jax.tree.map(lambda x: x + 1, params), folder)
    assert (folder / hf.WEIGHTS).read_bytes() == before
    hf.export_params(QWEN3, jax.tree.map(lambda x: x + 1, params), folder)
    assert (folder / hf.WEIGHTS).read_bytes() != before
    assert os.listdir(tmp_path) == ["p"]


def test_export_overwrites_no_other_folder(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="choose another folder"):
        hf.export_params(QWEN3, random_params(QWEN3), tmp_path)


def test_wrong_shapes_are_refused_at_export(tmp_path):
    params = random_params(QWEN3) | {"final_norm": jnp.ones(9)}
    with pytest.raises(ValueError, match=r"final_norm has shape \(9,\), not \(8,\)"):
        hf.export_params(QWEN3, params, tmp_path / "p")
    with pytest.raises(ValueError, match="both qk_norm and attention_bias"):
        hf.write_config(dataclasses.replace(QWEN3, attention_bias=True), "float32")


def test_bfloat16_is_read_without_being_widened_and_committed(tmp_path):
    """An array that is not committed to its device compiles every program twice."""
    folder = hf.export_params(QWEN3, random_params(QWEN3, "bfloat16"), tmp_path / "p")
    _, params = hf.import_policy(folder)
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == np.dtype(ml_dtypes.bfloat16) and leaf.committed
