"""Conversion between a published config.json and `PolicyConfig`, both ways.

Read in the spelling of transformers 4 or 5, written in that of 4. What our decoder would
compute differently from transformers is refused in one line. What a family takes for granted
where its config.json is silent stands in its entry of `names.FAMILIES` (below); `huggingface`
(above) reads and writes the file.

Sources: the configuration files of transformers 5.23, and the published config.json files that
configs/models.py lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from notepad_jax.checkpoint.hf.fields import Fields, ImportProblem
from notepad_jax.checkpoint.hf.names import FAMILIES, Family, family_of
from notepad_jax.checkpoint.hf.storage import CONFIG, quoted
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

LAYER_TYPES = ("full_attention", "sliding_attention")
DTYPE_NAMES = ("float32", "float16", "bfloat16")


def read_config(text: Mapping[str, Any], where: str = CONFIG) -> PolicyConfig:
    """Reads a config.json in the spelling of transformers 4 or 5.

    `rope_theta` or `rope_parameters`, `torch_dtype` or `dtype`, `num_experts` or
    `num_local_experts`. `valid_vocab` is the size of the embedding unless the file was
    written by us. Raises ImportProblem for what our decoder does not compute, and for a value
    that is not of its kind.
    """
    read = Fields(text, where)
    kind = read.word("model_type", "")
    if kind not in FAMILIES:
        named = kind or next(iter(read.words("architectures")), None)
        raise ImportProblem(
            f"{where}: architecture {quoted(named)} is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    heads, width, vocab = (
        read.size("num_attention_heads"), read.size("hidden_size"), read.size("vocab_size")
    )  # fmt: skip
    max_positions = read.size("max_position_embeddings", family.default_positions)
    _refuse(read, family)
    dtype = read.word("dtype", read.word("torch_dtype", "float32"))  # the newer one counts
    if dtype not in DTYPE_NAMES:
        raise ImportProblem(
            f"{where}: dtype {quoted(dtype)}; supported are {', '.join(DTYPE_NAMES)}"
        )
    asked = read.flag("attention_bias")
    try:
        scaling, theta = _read_rope(read, max_positions)
        return PolicyConfig(
            vocab_size=vocab,
            width=width,
            layers=read.size("num_hidden_layers"),
            heads=heads,
            kv_heads=read.size("num_key_value_heads", heads),
            head_size=read.size("head_dim", family.default_head_size or width // heads),
            feed_forward=read.size("intermediate_size"),
            rope_theta=theta,
            rms_eps=read.number("rms_norm_eps", 1e-6),
            qk_norm=family.qk_norm,
            attention_bias={"always": True, "asked": asked, "never": False}[family.biases],
            output_bias=family.biases == "asked" and asked,
            tied_embeddings=read.flag("tie_word_embeddings"),
            valid_vocab=read.size("valid_vocab_size", vocab),
            dtype=dtype,
            rope=scaling,
            experts=_read_experts(read) if kind == "qwen3_moe" else None,
            max_positions=max_positions,
            family=kind if kind == "mistral" else "",  # the others can be told by their parts
            windows=_read_windows(read, family),
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
        written["sliding_window"] = max(config.windows, default=None)  # silence would mean 4096
    elif config.windows:
        written |= {"use_sliding_window": True, "sliding_window": max(config.windows)}
    elif FAMILIES[kind].windows != "never":  # said, for the file that this one follows may ask
        written["use_sliding_window"] = False
    if config.windows and kind in ("qwen2", "qwen3"):
        written["layer_types"] = [LAYER_TYPES[window > 0] for window in config.windows]
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


def _refuse(read: Fields, family: Family) -> None:
    """Raises ImportProblem for what would be computed differently from transformers."""
    act, kinds = read.word("hidden_act", "silu"), read.words("layer_types")
    others = [kind for kind in kinds if kind not in LAYER_TYPES]
    always = family.biases == "always"
    refused = {
        f"hidden_act {quoted(act)} (only 'silu')": act != "silu",
        f"layers of {quoted(others[:1])} (layer_types)": bool(others),
        "windows in some layers (layer_types)": (
            "sliding_attention" in kinds and family.windows != "by layer"
        ),
        "attention_bias": family.biases != "asked"
        and read.flag("attention_bias", always) != always,
        "mlp_bias": read.flag("mlp_bias"),
        "quantized weights": bool(read.text.get("quantization_config")),
        "layers of their own sizes (per_layer_config)": bool(read.text.get("per_layer_config")),
        "dense layers between the experts (mlp_only_layers, decoder_sparse_step)": (
            bool(read.text.get("mlp_only_layers")) or read.size("decoder_sparse_step", 1) != 1
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise ImportProblem(
                f"{read.where} asks for {what}, which this decoder does not compute"
            )
    if kinds and len(kinds) != read.size("num_hidden_layers"):
        raise read.wrong("layer_types", "one word for each of num_hidden_layers")


def _read_windows(read: Fields, family: Family) -> tuple[int, ...]:
    """`PolicyConfig.windows`, as wide as max_position_embeddings, too: contexts may be longer."""
    kinds, silent = read.words("layer_types"), "sliding_window" not in read.text
    asked = family.windows == "always" or read.flag("use_sliding_window")
    if family.windows == "never" or not asked:
        if "sliding_attention" in kinds:
            raise read.wrong("layer_types", "all full, as use_sliding_window is not true")
        return ()
    # Silence is a window in transformers, Mistral 7B v0.1's; null is none.
    if not silent and not read.said("sliding_window"):
        return ()
    window = read.size("sliding_window", 4096)
    full = read.size("max_window_layers", 28, least=0) if family.windows == "by layer" else 0
    layers = read.size("num_hidden_layers")
    if not kinds and full >= layers:
        return ()
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if layers > 10_000:  # a number for each would be kept
        raise read.wrong("num_hidden_layers", "at most 10,000 where there are windows")
    return tuple(window if layer >= full else 0 for layer in range(layers))


def _read_experts(read: Fields) -> Experts:
    older = read.size("num_local_experts") if read.said("num_local_experts") else None
    return Experts(
        count=read.size("num_experts", older),
        per_token=read.size("num_experts_per_tok", 8),
        feed_forward=read.size("moe_intermediate_size"),
        normalize=read.flag("norm_topk_prob"),
    )


def _read_rope(read: Fields, max_positions: int) -> tuple[Scaling, float]:
    """Returns (scaling, theta).

    Where both spellings are given, transformers takes `rope_scaling` and forgets the other,
    its theta included; an empty one counts as silence.
    """
    older, newer = read.object("rope_scaling"), read.object("rope_parameters")
    rope, where = (older if older.text else newer), read.where
    nested = [key for key, value in rope.text.items() if isinstance(value, dict)]
    if nested:
        raise ImportProblem(
            f"{rope.where} is given for each kind of attention ({quoted(nested[0])}, ...); "
            f"supported is one for all layers"
        )
    theta = rope.number("rope_theta", read.number("rope_theta", 10_000.0))
    inner = rope if rope.said("partial_rotary_factor") else read
    if inner.number("partial_rotary_factor", 1.0) != 1:
        raise ImportProblem(
            f"{where} rotates only {inner.number('partial_rotary_factor')} of each head; "
            f"supported is all of it"
        )
    # transformers lets the outer value win, and falls back to the context length
    outer = read if read.said("original_max_position_embeddings") else rope
    original = outer.size("original_max_position_embeddings", max_positions)
    match rope_type := rope.word("rope_type", rope.word("type", "default")):
        case "default":
            return UNSCALED, theta
        case "linear":
            return Linear(rope.number("factor")), theta
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            return Llama3(rope.number("factor"), low, high, original), theta
        case "yarn":
            if theta <= 1:
                raise ImportProblem(f"{where}: yarn needs a rope_theta above 1, not {theta}")
            return _read_yarn(rope, original), theta
    raise ImportProblem(
        f"{where} asks for rope type {quoted(rope_type)}; supported are default, linear, llama3, "
        f"yarn"
    )


def _read_yarn(read: Fields, original: int) -> Yarn:
    factor = read.number("factor")

    def loudness(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = loudness(1.0)
    if read.text.get("mscale") and read.text.get("mscale_all_dim"):
        usual = loudness(read.number("mscale")) / loudness(read.number("mscale_all_dim"))
    return Yarn(
        factor=factor,
        original_positions=original,
        attention_factor=read.number("attention_factor", usual),
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        truncate=read.flag("truncate", True),
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
