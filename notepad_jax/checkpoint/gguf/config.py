"""From the metadata of a GGUF file to a published config.json.

Four architectures are known, which are five families of ours (Mistral is a `llama` there). What
llama.cpp would compute and we would not is refused by its key. Numbers are float32 in the file
and are written as their shortest decimals, so 1e-05 comes back as 1e-05. Llama 3's rope scaling
is told by a tensor of factors, one a pair; they are recognised (`_llama3`). Below:
`checkpoint.hf.config`, which reads the result as it reads any config.json.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from notepad_jax.checkpoint.hf.fields import Fields, ImportProblem
from notepad_jax.checkpoint.hf.names import FAMILIES
from notepad_jax.checkpoint.hf.storage import quoted
from notepad_jax.model.rope import UNSCALED, Llama3, frequencies

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
# Keys under which llama.cpp computes something else, and the value with which it does not.
NEUTRAL = {
    "tensor_data_layout": "",
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "use_parallel_residual": False,
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# What Llama 3.1, 3.2 and 3.3 were published with; the factor is 8 or 32.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture(metadata: Fields) -> str:
    """Returns `general.architecture`; raises ImportProblem for one that is not read."""
    name = metadata.word("general.architecture")
    if name not in ARCHITECTURES:
        raise ImportProblem(
            f"{metadata.where}: architecture {quoted(name)} is not read; read are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name


def published(
    metadata: Fields, tensors: Collection[str], factors: np.ndarray | None, dtype: str
) -> dict[str, Any]:
    """Returns the config.json of a file, for weights that are to be kept in `dtype`.

    `tensors` are the names that Hugging Face gives them: they tell of biases and of a tied
    embedding. `factors` is the tensor of rope factors, float [head size / 2]. Raises
    ImportProblem for what is missing, no number, or not computed by our decoder.
    """
    name = architecture(metadata)
    read = _Scoped(metadata, f"{name}.")
    _refuse(read)
    heads, width = read.size("attention.head_count"), read.size("embedding_length")
    head_size = read.size("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.size(key, head_size) != head_size:
            raise ImportProblem(
                f"{metadata.where}: {name}.{key} is {read.size(key)}, and a head of queries has "
                f"{head_size}; only heads of one size, rotated whole, are read"
            )
    window = read.size("attention.sliding_window", 0, least=0)
    kind = "mistral" if name == "llama" and window else ARCHITECTURES[name]
    experts = kind == "qwen3_moe"
    theta = read.decimal("rope.freq_base", 10_000.0)
    written = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "vocab_size": len(metadata.words("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": read.size(
            "feed_forward_length", read.size("expert_feed_forward_length", 1) if experts else None
        ),
        "num_hidden_layers": read.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.size("attention.head_count_kv", heads),
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": read.size("context_length"),
        "rms_norm_eps": read.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(read, theta, head_size, factors),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": dtype,
    }
    if FAMILIES[kind].biases == "asked":
        written["attention_bias"] = "model.layers.0.self_attn.o_proj.bias" in tensors
    if kind == "mistral":
        written["sliding_window"] = window
    elif window:
        raise ImportProblem(
            f"{metadata.where}: {name}.attention.sliding_window is {window}, and the file does not "
            f"say in which layers; only Mistral's, in all of them, is read"
        )
    if experts:
        written |= {
            "num_experts": read.size("expert_count"),
            "num_experts_per_tok": read.size("expert_used_count"),
            "moe_intermediate_size": read.size("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp's way with this architecture
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return written


class _Scoped:
    """The fields of one architecture."""

    def __init__(self, metadata: Fields, prefix: str) -> None:
        self.metadata, self.prefix = metadata, prefix

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        return self.metadata.size(self.prefix + key, default, least)

    def decimal(self, key: str, default: float | None = None) -> float:
        """A positive number, the shortest decimal that float32 rounds to it."""
        return float(str(np.float32(self.metadata.number(self.prefix + key, default))))

    def word(self, key: str, default: str) -> str:
        return self.metadata.word(self.prefix + key, default)

    def raw(self, key: str) -> Any:
        return self.metadata.text.get(self.prefix + key)


def _refuse(read: _Scoped) -> None:
    where, kind = read.metadata.where, read.prefix
    for key, neutral in NEUTRAL.items():
        value = read.raw(key)
        if value is not None and value != neutral:
            raise ImportProblem(
                f"{where} asks for {kind}{key} = {quoted(value)}, which this decoder does not "
                f"compute (only {neutral!r})"
            )
    if kind == "llama." and read.raw("expert_count"):
        raise ImportProblem(
            f"{where} is a llama with {read.raw('expert_count')} experts (Mixtral), which this "
            f"decoder does not compute; of models with experts, qwen3moe is read"
        )


def _rope_scaling(
    read: _Scoped, theta: float, head_size: int, factors: np.ndarray | None
) -> dict[str, Any] | None:
    kind, where = read.word("rope.scaling.type", "none"), read.metadata.where
    if factors is not None and kind != "none":
        raise ImportProblem(f"{where} has both rope factors (rope_freqs.weight) and {kind} scaling")
    match kind:
        case "none" if factors is None or np.all(factors == 1):
            return None
        case "none":
            return _llama3(where, theta, head_size, factors)
        case "linear":
            return {"rope_type": "linear", "factor": read.decimal("rope.scaling.factor")}
        case "yarn":
            original = read.size(
                "rope.scaling.original_context_length", read.size("context_length")
            )
            return {
                "rope_type": "yarn",
                "factor": read.decimal("rope.scaling.factor"),
                "original_max_position_embeddings": original,
                "beta_fast": read.decimal("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": read.decimal("rope.scaling.yarn_beta_slow", 1.0),
            }
    raise ImportProblem(
        f"{where}: rope scaling {quoted(kind)} is not computed; read are none, linear, yarn, and "
        f"Llama 3's factors"
    )


def _llama3(where: str, theta: float, head_size: int, factors: np.ndarray) -> dict[str, Any]:
    """The scaling whose frequencies are the plain ones divided by `factors`.

    The slowest pairs are divided by the whole factor; what lies between follows from it.
    """
    factor = float(factors.max())
    scaling = Llama3(factor, *LLAMA3.values()) if factor > 1 else UNSCALED
    expected = frequencies(head_size, theta)[0] / frequencies(head_size, theta, scaling)[0]
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise ImportProblem(
            f"{where}: its rope factors (rope_freqs.weight) are not Llama 3's for a factor of "
            f"{factor:g} and 8,192 positions; only those are read"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
