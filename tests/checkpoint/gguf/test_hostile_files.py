"""What is wrong with a GGUF file is one line that names it, and is said before a weight is read."""

import functools
import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.checkpoint.gguf import policy, reader
from notepad_jax.programs import convert
from notepad_jax.telemetry.screen import SilentScreen

FAMILY = "llama"


@functools.cache
def sound() -> tuple[Path, Path]:
    """(a Hugging Face folder, the GGUF file of it)"""
    kept.append(tempfile.TemporaryDirectory())
    source = tiny_gguf.folder(Path(kept[-1].name) / "folder", FAMILY)
    return source, tiny_gguf.write(Path(kept[-1].name) / "sound.gguf", source, FAMILY)


kept: list[tempfile.TemporaryDirectory] = []


def refused(path, says):
    with pytest.raises(ValueError, match=says) as raised:
        policy.open_policy(path)
    said = str(raised.value)
    assert said.isprintable() and len(said) < 600 and str(path) in said


METADATA = [
    ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not read; read are llama, qwe"),
    ({"general.architecture": "\x1b[2J"}, r"architecture '\\x1b\[2J' is not read"),
    ({"tokenizer.ggml.model": None}, r"has no tokenizer \(tokenizer.ggml.model\)"),
    ({"tokenizer.ggml.model": "llama"}, "a tokenizer of kind 'llama'; read is 'gpt2'"),
    ({"tokenizer.ggml.pre": "tekken"}, "splits text by 'tekken' .* known are gpt-2, smollm, qwen2"),
    ({"tokenizer.ggml.pre": None}, "splits text by ''"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has not one number for each of the"),
    ({"tokenizer.ggml.token_type": None}, "token_type has not one number for each of the"),
    ({"tokenizer.ggml.tokens": None}, r"has no tokens \(tokenizer.ggml.tokens\)"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "tokens' is .*not a list of strings"),
    ({"tokenizer.ggml.merges": ["x yy"]}, "of its metadata was made tokenizer.json is not a token"),
    ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000, and there are"),
    ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token' is 'yes', not true or false"),
    ({"tokenizer.chat_template": 7}, "chat_template' is 7, not a string"),
    ({"llama.block_count": None}, "'llama.block_count' is missing"),
    ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
    ({"llama.block_count": 2**31 - 1}, "tensor 'blk.2.attn_norm.weight' is missing"),
    ({"llama.block_count": 1}, "there is a tensor 'blk.1.attn_.*', which a llama decoder as its"),
    ({"llama.block_count": 0}, "'llama.block_count' is 0, not a positive whole number"),
    ({"llama.embedding_length": 128}, r"'token_embd.weight' has shape \(\d+, 64\), its metadata"),
    ({"llama.feed_forward_length": 97}, r"'blk.0.ffn_gate.weight' has shape \(96, 64\), its meta"),
    ({"llama.attention.head_count": [4, 4]}, r"head_count' is \[4, 4\], not a positive whole num"),
    ({"llama.attention.head_count": 3}, "3 .*heads|heads .*3"),
    ({"llama.attention.value_length": 8}, "value_length is 8, and a head of queries has 16"),
    ({"llama.rope.dimension_count": 8}, "dimension_count is 8, and a head of queries has 16"),
    ({"llama.rope.freq_base": float("nan")}, "freq_base' is nan, not a positive number"),
    ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not computed; read are"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
      "llama.rope.scaling.yarn_log_multiplier": 0.5}, "yarn_log_multiplier = 0.5, which this dec"),
    ({"llama.attention.clamp_kqv": 8.0}, "asks for llama.attention.clamp_kqv = 8.0, which this"),
    ({"llama.expert_count": 8}, r"is a llama with 8 experts \(Mixtral\)"),
    ({"split.count": 3}, "is one of 3 parts of a model; join them first: llama-gguf-split --merge"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "says"), METADATA, ids=[says[:30] for _, says in METADATA])
def test_metadata_that_are_missing_strange_or_of_another_model(metadata, says, tmp_path):
    path = tiny_gguf.write(tmp_path / "it.gguf", sound()[0], FAMILY, metadata=metadata)
    refused(path, says)


def test_tokens_named_twice_or_of_an_odd_type(tmp_path):
    fields = tiny_gguf._fields(sound()[0], FAMILY, "llama")
    twice = [*fields["tokenizer.ggml.tokens"][:-1], "a"]
    path = tiny_gguf.write(
        tmp_path / "a.gguf", sound()[0], FAMILY, metadata={"tokenizer.ggml.tokens": twice}
    )
    refused(path, "has the token 'a' twice")
    types = [*fields["tokenizer.ggml.token_type"][:-1], int(gguf.TokenType.BYTE)]
    path = tiny_gguf.write(
        tmp_path / "b.gguf", sound()[0], FAMILY, metadata={"tokenizer.ggml.token_type": types}
    )
    refused(path, "token_type holds 6, which a byte-level tokenizer does not have")


def test_tensors_that_are_missing_or_too_many(tmp_path):
    plain = np.ones((4, 4), np.float32)
    for changed, says in (
        ({"blk.1.ffn_up.weight": None}, "tensor 'blk.1.ffn_up.weight' is missing"),
        ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
        ({"blk.0.ssm_in.weight": plain}, "a tensor 'blk.0.ssm_in.weight', which a llama as we com"),
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, "'blk.0.attn_q.bias', which a llama dec"),
        ({"blk.0.attn_q.weight": plain}, r"'blk.0.attn_q.weight' has shape \(4, 4\), its metadata"),
        ({"rope_freqs.weight": plain[0] * 3}, "are not Llama 3's for a factor of 3"),
        ({"rope_freqs.weight": np.full(8, np.nan, np.float32)}, "are not Llama 3's for a factor"),
        ({"blk.0.attn_norm.weight": np.ones((0, 4), np.float32)}, "'blk.0.attn_norm.*' is empty"),
    ):
        path = tiny_gguf.write(tmp_path / "it.gguf", sound()[0], FAMILY, changed=changed)
        refused(path, says)
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}  # scales nothing
    same = policy.open_policy(
        tiny_gguf.write(tmp_path / "it.gguf", sound()[0], FAMILY, changed=ones)
    )
    assert same.config == policy.open_policy(sound()[1]).config


def test_files_of_another_kind_version_or_byte_order(tmp_path):
    content = sound()[1].read_bytes()
    for name, raw, says in (
        ("a.gguf", b"", r"is not a GGUF file \(it begins with b''\)"),
        ("b.gguf", b"PK\x03\x04" + content[4:], r"begins with b'PK\\x03\\x04'\)"),
        ("c.gguf", content[:20], "is cut short: it has 20 bytes"),
        ("d.gguf", content[:4] + struct.pack("<I", 1) + content[8:], "is GGUF version 1; read are"),
        ("e.gguf", content[:4] + struct.pack(">I", 3) + content[8:], "is big-endian; convert"),
        ("f.gguf", content[:8] + struct.pack("<Q", 2**60) + content[16:], "tensors and .* fields"),
        ("g-00001-of-00003.gguf", content, "is one of 3 parts of a model; join them first"),
    ):
        (tmp_path / name).write_bytes(raw)
        refused(tmp_path / name, says)
    refused(tmp_path / "nowhere.gguf", "is no file")
    refused(tmp_path, "is a folder")


@pytest.mark.parametrize("left", [24, 1_000, 0.1, 0.5, 0.9, -1])
def test_a_file_that_is_cut_short(left, tmp_path):
    content = sound()[1].read_bytes()
    stop = int(left * len(content)) if isinstance(left, float) else left
    (tmp_path / "it.gguf").write_bytes(content[:stop])
    refused(tmp_path / "it.gguf", "is cut short: its header speaks of byte .* and it has .*; down")


def test_quantisations_that_nothing_multiplies_out(tmp_path):
    path = tmp_path / "it.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.ones((2, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "tensor 'blk.0.ffn_up.weight' is I32, which gguf does not multiply out; take")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    raw[at : at + 4] = struct.pack("<I", 99)
    path.write_bytes(raw)
    refused(path, r"tensor 'blk.0.ffn_up.weight' is stored in a way \(99\) that this gguf does")


@pytest.mark.slow
def test_an_array_that_claims_to_be_endless_ends_with_the_file(tmp_path):
    """The library would loop over empty slices 2^60 times."""
    content = sound()[1].read_bytes()
    at = content.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    (tmp_path / "it.gguf").write_bytes(content[:at] + struct.pack("<Q", 2**60) + content[at + 8 :])
    refused(tmp_path / "it.gguf", "is cut short|is damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "MOST_PARTS", 50)
        refused(sound()[1], "has more than 50 numbers and strings before its weights")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    places=st.lists(st.integers(0, 2**30), min_size=1, max_size=4),
    values=st.lists(st.binary(min_size=1, max_size=8), min_size=4, max_size=4),
)
def test_no_damage_to_a_header_is_a_traceback(places, values):
    source, path = sound()
    raw = bytearray(path.read_bytes())
    header = raw.index(b"blk.1.ffn_down.weight")
    for place, value in zip(places, values, strict=False):
        at = place % header
        raw[at : at + len(value)] = value
    with tempfile.TemporaryDirectory() as folder:
        damaged = Path(folder) / "it.gguf"
        damaged.write_bytes(raw)
        try:
            policy.open_policy(damaged)
        except ValueError as problem:
            said = str(problem)
            assert said.isprintable() and len(said) < 700 and str(damaged) in said


def test_a_number_that_is_no_weight_is_named_as_it_is_read(tmp_path):
    weights = tiny_gguf.tensors(sound()[0], "llama")["blk.1.ffn_up.weight"].copy()
    weights[3, 5] = np.nan
    path = tiny_gguf.write(
        tmp_path / "it.gguf", sound()[0], FAMILY, changed={"blk.1.ffn_up.weight": weights}
    )
    with pytest.raises(ValueError, match="mlp.up_proj.* in .*/it.gguf holds nan, which is no weig"):
        convert.import_hf(str(path), tmp_path / "out", SilentScreen())
    assert not (tmp_path / "out").exists()
