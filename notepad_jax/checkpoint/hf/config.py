"""A published config.json to `PolicyConfig` and back.

Read in the spelling of transformers 4 or 5, written in that of 4. What our decoder would
compute differently from transformers is refused in one line. What a family takes for granted
where its config.json is silent stands in its entry of `names.FAMILIES` (below); `huggingface`
(above) reads and writes the file.

Sources: the configuration files of transformers 5.23, and the published config.json files that
configs/models.py lists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from notepad_jax.checkpoint.hf.names import FAMILIES, Family, ImportProblem, family_of
from notepad_jax.checkpoint.hf.storage import CONFIG
from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.model.rope import (
    UNSCALED,
    Linear,
    Llama3,
    Scaling,
    Unscaled,
    Yarn,
    yarn_attention_factor,
)

DTYPE_NAMES = ("float32", "float16", "bfloat16")


def read_config(text: Mapping[str, Any], where: str = CONFIG) -> PolicyConfig:
    """Reads a config.json in the spelling of transformers 4 or 5.

    `rope_theta` or `rope_parameters`, `torch_dtype` or `dtype`, `num_experts` or
    `num_local_experts`. `valid_vocab` is the size of the embedding unless the file was
    written by us. Raises ImportProblem for what our decoder does not compute.
    """
    kind = text.get("model_type")
    if kind not in FAMILIES:
        named = text.get("architectures") or [None]
        raise ImportProblem(
            f"{where}: architecture {kind or named[0]!r} is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    family, read = FAMILIES[kind], _Reader(text, where)
    heads, width, vocab = (
        read.size("num_attention_heads"), read.size("hidden_size"), read.size("vocab_size")
    )  # fmt: skip
    head_size = read.size("head_dim", family.default_head_size or width // heads)
    max_positions = read.size("max_position_embeddings", 32768)
    _refuse(text, family, max_positions, where)
    dtype = text.get("torch_dtype") or text.get("dtype") or "float32"
    if dtype not in DTYPE_NAMES:
        raise ImportProblem(f"{where}: dtype {dtype!r}; supported are {', '.join(DTYPE_NAMES)}")
    asked = bool(text.get("attention_bias"))
    try:
        scaling, theta = _read_rope(read, max_positions)
        return PolicyConfig(
            vocab_size=vocab,
            width=width,
            layers=read.size("num_hidden_layers"),
            heads=heads,
            kv_heads=read.size("num_key_value_heads", heads),
            head_size=head_size,
            feed_forward=read.size("intermediate_size"),
            rope_theta=theta,
            rms_eps=read.number("rms_norm_eps", 1e-6),
            qk_norm=family.qk_norm,
            attention_bias={"always": True, "asked": asked, "never": False}[family.biases],
            output_bias=family.biases == "asked" and asked,
            tied_embeddings=bool(text.get("tie_word_embeddings", False)),
            valid_vocab=read.size("valid_vocab_size", vocab),
            dtype=dtype,
            rope=scaling,
            experts=_read_experts(read) if kind == "qwen3_moe" else None,
            max_positions=max_positions,
            family=kind if kind == "mistral" else "",  # the others can be told by their parts
        )
    except ImportProblem:
        raise
    except ValueError as problem:  # sizes that do not fit each other
        raise ImportProblem(f"{where}: {problem}") from None


def write_config(config: PolicyConfig, dtype: str) -> dict[str, Any]:
    """Returns the config.json of `config`, in the spelling of transformers 4.

    `valid_vocab_size` is ours: rows of the embedding at or above it belong to no token.
    """
    kind = family_of(config)
    written = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "valid_vocab_size": config.valid_vocab,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_rope(config.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if FAMILIES[kind].biases == "asked":  # of Qwen2 they are a fixed part
        written["attention_bias"] = config.attention_bias
    if kind == "mistral":
        written["sliding_window"] = None  # silence would mean 4096
    if config.experts is not None:
        written |= {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.feed_forward,
            "norm_topk_prob": config.experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return written


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Numbers out of a config.json; null counts as silence."""

    text: Mapping[str, Any]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ImportProblem(f"{self.where}: {key!r} is {value!r}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ImportProblem(f"{self.where}: {key!r} is {value!r}, not a number")
        return float(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.text.get(key)
        value = default if value is None else value
        if value is None:
            raise ImportProblem(f"{self.where}: {key!r} is missing")
        return value


def _refuse(text: Mapping[str, Any], family: Family, max_positions: int, where: str) -> None:
    """Raises ImportProblem for what would be computed differently from transformers."""
    act, window = text.get("hidden_act", "silu"), family.window(text)
    sliding = "sliding_attention" in (text.get("layer_types") or ())
    refused = {
        f"hidden_act {act!r} (only 'silu')": act != "silu",
        # A window no context reaches changes nothing.
        f"a sliding window of {window} tokens in a context of {max_positions}": sliding
        or (window is not None and window < max_positions),
        "attention_bias": family.biases != "asked"
        and text.get("attention_bias", family.biases == "always") != (family.biases == "always"),
        "mlp_bias": bool(text.get("mlp_bias")),
        "quantized weights": bool(text.get("quantization_config")),
        "dense layers between the experts (mlp_only_layers, decoder_sparse_step)": bool(
            text.get("mlp_only_layers")
        )
        or text.get("decoder_sparse_step", 1) != 1,
    }
    for what, asked in refused.items():
        if asked:
            raise ImportProblem(f"{where} asks for {what}, which this decoder does not compute")


def _read_experts(read: _Reader) -> Experts:
    old_name = read.text.get("num_local_experts")
    return Experts(
        count=read.size("num_experts", old_name),
        per_token=read.size("num_experts_per_tok", 8),
        feed_forward=read.size("moe_intermediate_size"),
        normalize=bool(read.text.get("norm_topk_prob", False)),
    )


def _read_rope(read: _Reader, max_positions: int) -> tuple[Scaling, float]:
    """Returns (scaling, theta)."""
    text, where = read.text, read.where
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    inside = _Reader(rope, f"{where}: rope scaling")
    theta = inside.number("rope_theta", read.number("rope_theta", 10_000.0))
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ImportProblem(f"{where} rotates only {partial} of each head; supported is all of it")
    # transformers lets the outer value win, and falls back to the context length
    outer = text.get("original_max_position_embeddings")
    original = outer or inside.size("original_max_position_embeddings", max_positions)
    match rope_type := rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return UNSCALED, theta
        case "linear":
            return Linear(inside.number("factor")), theta
        case "llama3":
            low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
            return Llama3(inside.number("factor"), low, high, original), theta
        case "yarn":
            return _read_yarn(inside, original), theta
    raise ImportProblem(
        f"{where} asks for rope type {rope_type!r}; supported are default, linear, llama3, yarn"
    )


def _read_yarn(read: _Reader, original: int) -> Yarn:
    factor = read.number("factor")

    def loudness(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual, (mscale, all_dim) = loudness(1.0), map(read.text.get, ("mscale", "mscale_all_dim"))
    if mscale and all_dim:
        usual = loudness(mscale) / loudness(all_dim)
    return Yarn(
        factor=factor,
        original_positions=original,
        attention_factor=read.number("attention_factor", usual),
        beta_fast=float(read.text.get("beta_fast") or 32),
        beta_slow=float(read.text.get("beta_slow") or 1),
        truncate=bool(read.text.get("truncate", True)),
    )


def _write_rope(scaling: Scaling) -> dict[str, Any] | None:
    match scaling:
        case Unscaled():
            return None
        case Linear(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3() as s:
            return {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_frequency,
                "high_freq_factor": s.high_frequency,
                "original_max_position_embeddings": s.original_positions,
            }
        case Yarn() as s:
            written = {
                "rope_type": "yarn",
                "factor": s.factor,
                "original_max_position_embeddings": s.original_positions,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
            }
            # Not every reader of config.json knows these two: written only if they are needed.
            if s.attention_factor != yarn_attention_factor(s.factor):
                written["attention_factor"] = s.attention_factor
            if not s.truncate:
                written["truncate"] = False
            return written
