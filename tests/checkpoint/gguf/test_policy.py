"""A GGUF file comes in as the Hugging Face folder that it was made of, bit by bit."""

import dataclasses
import functools
import itertools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_gguf
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.checkpoint.gguf import names, policy
from notepad_jax.checkpoint.hf import huggingface as hf
from notepad_jax.checkpoint.hf.headers import TensorRows
from notepad_jax.model.parameters import abstract_params
from notepad_jax.parallel import place
from notepad_jax.text.tokenizer import open_tokenizer


@functools.cache
def folder(family):
    kept = tempfile.TemporaryDirectory()
    path = tiny_gguf.folder(Path(kept.name) / family, family)
    folders.append(kept)  # until the end of the tests
    return path


folders = []


def params(published, dtype=None):
    first = place.first_device()
    shardings = jax.tree.map(lambda _: first, abstract_params(published.config))
    return hf.import_params(published.config, published.store, shardings, dtype)


@pytest.mark.parametrize("family", tiny_gguf.FAMILIES)
def test_every_family_is_what_its_safetensors_are(family, tmp_path):
    path = tiny_gguf.write(tmp_path / "it.gguf", folder(family), family)
    found, wanted = policy.open_policy(path), hf.open_published(folder(family))
    assert found.config == wanted.config
    assert found.config.dtype == "float32"
    jax.tree.map(np.testing.assert_array_equal, params(found), params(wanted))
    kind = tiny_gguf.FAMILIES[family][1].family or hf.names.family_of(found.config)
    assert found.text["model_type"] == kind
    assert set(found.store.tensors) == set(wanted.store.tensors)
    for name in found.store.tensors:  # said as it is spelled
        assert str(found.store.sources[name]).startswith(names.spelled(name))


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_what_is_stored_smaller_is_multiplied_out_and_kept_in_bfloat16(family, kind, tmp_path):
    source = folder(family)
    path = tiny_gguf.write(tmp_path / "it.gguf", source, family, kind)
    found = policy.open_policy(path)
    wanted = hf.open_published(tiny_gguf.dequantised(source, tmp_path / "out", kind))
    assert found.config == dataclasses.replace(wanted.config, dtype="bfloat16")
    assert found.text["torch_dtype"] == "bfloat16"
    assert set(found.kinds) == {"F32", kind} and found.kinds[kind] > 10
    for dtype in ("float32", "bfloat16"):
        jax.tree.map(np.testing.assert_array_equal, params(found, dtype), params(wanted, dtype))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj",
                          "mlp.down_proj", "input_layernorm"]),
    cut=st.tuples(st.integers(0, 4), st.integers(0, 4)), block=st.sampled_from([1, 700, 10**6]),
)  # fmt: skip
def test_any_rows_in_any_blocks_are_those_of_the_whole(name, cut, block):
    """As a device that holds some heads asks for them."""
    published = whole()
    layout = hf.layouts(published.config)
    found = next(a for a in layout.values() if f"model.layers.1.{name}.weight" in a.names)
    rows = found.unfolded[0]
    start, stop = sorted(min(n * rows // 4, rows) for n in cut)
    wanted = next(
        value for part, _, value in published.store.blocks(
            [TensorRows(f"model.layers.1.{name}.weight", found.unfolded, 0, rows)]
        )
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "BLOCK_BYTES", block)
        asked = [TensorRows(f"model.layers.1.{name}.weight", found.unfolded, start, stop)]
        pieces = [*published.store.blocks(asked)]
    at = start
    for _, first, value in pieces:
        assert first == at and (value.nbytes <= block or len(value) == 1)
        np.testing.assert_array_equal(value, wanted[first : first + len(value)])
        at += len(value)
    assert at == stop


@functools.cache
def whole():
    kept = tempfile.TemporaryDirectory()
    folders.append(kept)
    path = tiny_gguf.write(Path(kept.name) / "it.gguf", folder("llama"), "llama", "Q8_0")
    return policy.open_policy(path)


def test_heads_are_turned_as_transformers_turns_them():
    """By hand: a head of 4 has the pairs (0, 2) and (1, 3) there, and (0, 1), (2, 3) here."""
    theirs = np.arange(8, dtype=np.float32)  # two heads; the value is the place in a folder
    stored = tiny_gguf.permuted(theirs, heads=2)
    np.testing.assert_array_equal(stored, [0, 2, 1, 3, 4, 6, 5, 7])


# ---------------------------------------------------------------- tokenizers

TEXTS = (
    "The year 1984, 3.14 and 12345678: don't, I'LL, we've\n",
    "def f(x):\n\treturn x**2  # ok\r\n\r\n    else:\n",
    "   \u00a0\u3000 tabs\t\t\tand  \n \n\n  spaces   ",
    "\u65e5\u672c\u8a9e\u306e\u6587\u3002\u4e2d\u6587\uff0c\u4e16\u754c caf\u00e9 e\u0301 \u2126",
    "\U0001f600\u200d\U0001f525 \U0001f1e9\U0001f1ea \u0645\u0631\u062d\u0628\u0627 \x00\x04\x7f",
    "<|im_start|> <think> [PAD0] \u0664\u0665 \u2167 x\u00b2 \u00bd",
)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "mistral"])
def test_text_is_split_and_merged_as_the_tokenizer_that_the_file_names(family, tmp_path):
    pre, _ = tiny_gguf.FAMILIES[family]
    path = tiny_gguf.write(tmp_path / "it.gguf", folder(family), family)
    made = policy.open_policy(path).beside
    assert sorted(made) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "made").mkdir()
    for name, content in made.items():
        (tmp_path / "made" / name).write_bytes(content)
    wanted = open_tokenizer(folder(family))
    found = open_tokenizer(tmp_path / "made")
    assert found.controls == wanted.controls and found.vocab_size == wanted.vocab_size
    assert found.stop_ids == wanted.stop_ids
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tiny_gguf.spec(pre)))
    ours = tokenizers.Tokenizer.from_str(made["tokenizer.json"].decode())
    for text in (*TEXTS, "".join(TEXTS), *map("".join, itertools.permutations(TEXTS, 2))):
        assert found.encode(text).tolist() == wanted.encode(text).tolist()
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_what_the_metadata_say_of_ends_and_beginnings(tmp_path):
    vocab = tiny_gguf.spec("smollm")["model"]["vocab"]
    said = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.padding_token_id": 5,
        "tokenizer.ggml.eom_token_id": vocab["the"],  # its type says that it is ordinary text
    }
    path = tiny_gguf.write(tmp_path / "it.gguf", folder("llama"), "llama", metadata=said)
    published = policy.open_policy(path)
    config = json.loads(published.beside["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "<|im_end|>")
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, False)
    assert config["chat_template"] == "{{ messages }}"
    ends = [vocab["<|im_end|>"], vocab["<|endoftext|>"], vocab["the"]]
    generation = json.loads(published.beside["generation_config.json"])
    assert generation == {"bos_token_id": vocab["<s>"], "eos_token_id": ends, "pad_token_id": 5}
    assert published.text["eos_token_id"] == ends
    made = tokenizers.Tokenizer.from_str(published.beside["tokenizer.json"].decode())
    assert made.encode("red").ids[0] == vocab["<s>"]
    assert made.encode("red").ids[1:] == made.encode("red", add_special_tokens=False).ids
    assert json.loads(made.to_str())["added_tokens"][0]["content"] == "the"
    (tmp_path / "made").mkdir()
    for name, content in published.beside.items():
        (tmp_path / "made" / name).write_bytes(content)
    opened = open_tokenizer(tmp_path / "made")
    assert opened.stop_ids == tuple(ends)
    assert vocab["the"] not in opened.encode("the the").tolist()
