"""Tiny GGUF files: a Hugging Face folder of ours, written as llama.cpp's converter writes it.

`folder` makes a policy with random weights and a trained tokenizer; `write` turns it into a GGUF
file by the library's own writer, with llama.cpp's names, its order of heads, and its metadata.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import tiny_bpe
from safetensors.numpy import load_file, save_file

from notepad_jax.checkpoint.hf import huggingface as hf
from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.model.parameters import abstract_params
from notepad_jax.model.rope import Linear, Llama3, Yarn, frequencies

KINDS = {"smollm": "digits", "qwen2": "qwen", "llama-bpe": "llama3", "gpt-2": "gpt2"}
BASE = PolicyConfig(
    vocab_size=1, width=64, layers=2, heads=4, kv_heads=2, head_size=16, feed_forward=96,
    rope_theta=5e5, rms_eps=1e-5, qk_norm=False, attention_bias=False, tied_embeddings=False,
    valid_vocab=1, max_positions=4096,
)  # fmt: skip
MOE = Experts(count=4, per_token=2, feed_forward=32, normalize=True)
SCALED = Yarn(4.0, 1024, attention_factor=0.1 * np.log(4.0).item() + 1)
FAMILIES: dict[str, tuple[str, PolicyConfig]] = {
    "llama": ("smollm", dataclasses.replace(BASE, tied_embeddings=True)),
    "llama3": ("llama-bpe", dataclasses.replace(BASE, rope=Llama3(8.0, 1.0, 4.0, 8192))),
    "llama_linear": (
        "gpt-2",
        dataclasses.replace(BASE, rope=Linear(2.5), attention_bias=True, output_bias=True),
    ),
    "mistral": ("gpt-2", dataclasses.replace(BASE, head_size=32, family="mistral",
                                             windows=(8, 8))),
    "qwen2": ("qwen2", dataclasses.replace(BASE, attention_bias=True, rope=SCALED)),
    "qwen3": ("qwen2", dataclasses.replace(BASE, qk_norm=True, head_size=32, rms_eps=1e-6)),
    "qwen3moe": ("qwen2", dataclasses.replace(BASE, qk_norm=True, experts=MOE)),
}  # fmt: skip
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3moe"}

ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
STEMS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def spec(pre: str) -> dict[str, Any]:
    """The tokenizer.json that a file with this `tokenizer.ggml.pre` stands for."""
    made = tiny_bpe.spec(KINDS[pre])
    if pre == "gpt-2":
        made["pre_tokenizer"]["add_prefix_space"] = False
    tiny_bpe.add_merges(made)  # controls into the vocabulary: a file numbers them all
    return made


def folder(path: Path, family: str, dtype: str = "float32", spare: int = 3) -> Path:
    """A Hugging Face folder with random weights; `spare` rows belong to no token."""
    pre, config = FAMILIES[family]
    made = spec(pre)
    tokens = len(made["model"]["vocab"])
    config = dataclasses.replace(config, vocab_size=tokens + spare, valid_vocab=tokens + spare)
    rng = np.random.default_rng(sorted(FAMILIES).index(family))

    def draw(leaf):
        return (rng.normal(size=leaf.shape) / 4).astype(np.float32)

    params = jax.tree.map(draw, abstract_params(config))
    hf.export_params(config, params, path)
    text = json.loads((path / hf.CONFIG).read_text())
    text.pop("valid_vocab_size")
    (path / hf.CONFIG).write_text(json.dumps(text | {"torch_dtype": dtype}))
    tiny_bpe.folder(path, changed=made, chat_template="{{ messages }}")
    return path


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Queries or keys in llama.cpp's order of a head (convert_hf_to_gguf.py, LlamaModel)."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def tensors(path: Path, architecture: str) -> dict[str, np.ndarray]:
    """The weights of a Hugging Face folder under llama.cpp's names, float32."""
    config = hf.import_config(path)
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in load_file(path / hf.WEIGHTS).items():
        value = value.astype(np.float32)
        stem, _, kind = name.rpartition(".")
        if stem in ENDS:
            found[f"{ENDS[stem]}.{kind}"] = value
            continue
        _, _, layer, inner = stem.split(".", 3)
        if inner.startswith("mlp.experts."):
            _, _, number, which = inner.split(".")
            key = f"blk.{layer}.ffn_{which.removesuffix('_proj')}_exps.weight"
            experts.setdefault(key, {})[int(number)] = value
            continue
        if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            value = permuted(value, config.heads if "q_proj" in inner else config.kv_heads)
        found[f"blk.{layer}.{STEMS[inner]}.{kind}"] = value
    found |= {key: np.stack([each[n] for n in range(len(each))]) for key, each in experts.items()}
    if isinstance(config.rope, Llama3):
        plain = frequencies(config.head_size, config.rope_theta)[0]
        scaled = frequencies(config.head_size, config.rope_theta, config.rope)[0]
        found["rope_freqs.weight"] = plain / scaled
    return found


def write(
    path: Path, source: Path, family: str, kind: str = "F32",
    metadata: dict[str, Any] | None = None, changed: dict[str, np.ndarray | None] | None = None,
) -> Path:  # fmt: skip
    """Writes `source` as a GGUF file whose matrices are stored as `kind`.

    `metadata` and `changed` (tensors) replace entries, None takes one away; a metadata value may
    be (value, gguf.GGUFValueType).
    """
    architecture = ARCHITECTURES.get(family, "llama")
    writer = gguf.GGUFWriter(path, architecture)
    fields = _fields(source, family, architecture) | (metadata or {})
    for key, value in fields.items():
        if key == "general.architecture":
            writer.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType.STRING)
        elif isinstance(value, tuple):
            writer.add_key_value(key, *value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    stored = gguf.GGMLQuantizationType[kind]
    for name, value in (tensors(source, architecture) | (changed or {})).items():
        if value is None:
            continue
        if value.ndim == 1 or "ffn_gate_inp" in name or kind == "F32":
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _fields(source: Path, family: str, architecture: str) -> dict[str, Any]:
    pre, _ = FAMILIES[family]
    config, made = hf.import_config(source), spec(pre)
    vocab = made["model"]["vocab"]
    added = {token["content"]: token["special"] for token in made["added_tokens"]}
    types = gguf.TokenType
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [
        types.NORMAL if token not in added else
        types.CONTROL if added[token] else types.USER_DEFINED
        for token in tokens
    ]  # fmt: skip
    spare = config.vocab_size - len(tokens)
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in made["model"]["merges"]]
    a = architecture
    fields: dict[str, Any] = {
        f"{a}.block_count": config.layers,
        f"{a}.context_length": config.max_positions,
        f"{a}.embedding_length": config.width,
        f"{a}.feed_forward_length": config.feed_forward,
        f"{a}.attention.head_count": config.heads,
        f"{a}.attention.head_count_kv": config.kv_heads,
        f"{a}.attention.key_length": config.head_size,
        f"{a}.attention.value_length": config.head_size,
        f"{a}.rope.dimension_count": config.head_size,
        f"{a}.rope.freq_base": float(config.rope_theta),
        f"{a}.attention.layer_norm_rms_epsilon": config.rms_eps,
        f"{a}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{n}]" for n in range(spare))],
        "tokenizer.ggml.token_type": [*map(int, kinds), *[int(types.UNUSED)] * spare],
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.eot_token_id": vocab["<|endoftext|>"],
        "tokenizer.chat_template": "{{ messages }}",
    }
    match config.rope:
        case Linear(factor=factor):
            fields |= {f"{a}.rope.scaling.type": "linear", f"{a}.rope.scaling.factor": factor}
        case Yarn() as yarn:
            fields |= {
                f"{a}.rope.scaling.type": "yarn",
                f"{a}.rope.scaling.factor": yarn.factor,
                f"{a}.rope.scaling.original_context_length": yarn.original_positions,
            }
    if config.experts:
        fields |= {
            f"{a}.expert_count": config.experts.count,
            f"{a}.expert_used_count": config.experts.per_token,
            f"{a}.expert_feed_forward_length": config.experts.feed_forward,
        }
    if config.family == "mistral":
        fields[f"{a}.attention.sliding_window"] = max(config.windows)
    return fields


def dequantised(source: Path, target: Path, kind: str) -> Path:
    """`source` with the weights that a file of `kind` holds, multiplied out, as a folder."""
    stored = gguf.GGMLQuantizationType[kind]
    held = {
        name: value if value.ndim == 1 or name.endswith("mlp.gate.weight")
        else gguf.dequantize(gguf.quantize(value, stored), stored)
        for name, value in load_file(source / hf.WEIGHTS).items()
    }  # fmt: skip
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(held, target / hf.WEIGHTS)
    return target
