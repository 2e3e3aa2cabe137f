"""Published model families: config.json to `PolicyConfig` and back, and one name table each.

A `Family` says how its config.json is read and what its checkpoints call every parameter.
`table(config)` spells that out without touching an array: for every leaf of our tree, which
published tensors make it up, where each goes, and how its axes are folded. Import and export
are the two directions of reading it. Published linear layers are [out, in] matrices with
heads folded; ours put inputs first and keep heads as an axis. Layers are stored one by one,
experts too; ours are stacked. `huggingface` (above) folds and moves the tensors.

Sources: the modeling and configuration files of transformers 5.23 (tests/model/test_families
compares logits), and the published config.json files that configs/models.py lists.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.model.parameters import abstract_params
from notepad_jax.model.rope import (
    UNSCALED,
    Linear,
    Llama3,
    Scaling,
    Unscaled,
    Yarn,
    yarn_attention_factor,
)

CONFIG = "config.json"
DTYPE_NAMES = ("float32", "float16", "bfloat16")


class ImportProblem(ValueError):
    """A folder that is not a policy we can read; the message names what is wrong in it."""


# ---------------------------------------------------------------- name tables


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a name table: a leaf of ours and what its tensors are called.

    `inputs` is the number of axes (stacked ones not counted) that a linear layer consumes:
    the published tensor is [outputs folded, inputs folded]. 0 is a bias, folded to a vector;
    None is stored as it is.
    """

    path: tuple[str, ...]
    name: str  # {layer} and {expert} mark one tensor per layer and expert
    inputs: int | None = None


_L = "model.layers.{layer}."
_ENDS = (
    Row(("embed",), "model.embed_tokens.weight"),
    Row(("final_norm",), "model.norm.weight"),
    Row(("unembed",), "lm_head.weight", inputs=1),
)
_ATTENTION = (
    Row(("layers", "attn_norm"), _L + "input_layernorm.weight"),
    Row(("layers", "q"), _L + "self_attn.q_proj.weight", inputs=1),
    Row(("layers", "k"), _L + "self_attn.k_proj.weight", inputs=1),
    Row(("layers", "v"), _L + "self_attn.v_proj.weight", inputs=1),
    Row(("layers", "o"), _L + "self_attn.o_proj.weight", inputs=2),
    Row(("layers", "mlp_norm"), _L + "post_attention_layernorm.weight"),
)
_BIASES = (
    Row(("layers", "q_bias"), _L + "self_attn.q_proj.bias", inputs=0),
    Row(("layers", "k_bias"), _L + "self_attn.k_proj.bias", inputs=0),
    Row(("layers", "v_bias"), _L + "self_attn.v_proj.bias", inputs=0),
)
_OUTPUT_BIAS = (Row(("layers", "o_bias"), _L + "self_attn.o_proj.bias", inputs=0),)
_HEAD_NORMS = (
    Row(("layers", "q_norm"), _L + "self_attn.q_norm.weight"),
    Row(("layers", "k_norm"), _L + "self_attn.k_norm.weight"),
)
_DENSE = (
    Row(("layers", "gate"), _L + "mlp.gate_proj.weight", inputs=1),
    Row(("layers", "up"), _L + "mlp.up_proj.weight", inputs=1),
    Row(("layers", "down"), _L + "mlp.down_proj.weight", inputs=1),
)
_EXPERTS = (
    Row(("layers", "router"), _L + "mlp.gate.weight", inputs=1),
    Row(("layers", "expert_gate"), _L + "mlp.experts.{expert}.gate_proj.weight", inputs=1),
    Row(("layers", "expert_up"), _L + "mlp.experts.{expert}.up_proj.weight", inputs=1),
    Row(("layers", "expert_down"), _L + "mlp.experts.{expert}.down_proj.weight", inputs=1),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One published tensor and its place in our tree: `tree[path][index]`.

    `index` is (), (layer,) or (layer, expert). `shape` is ours of that entry,
    `published_shape` the tensor's. With `inputs` axes of the entry folded into one and the
    rest into another, the tensor is the transpose; see `Row`. Nothing here holds an array.
    """

    path: tuple[str, ...]
    index: tuple[int, ...]
    name: str
    shape: tuple[int, ...]
    inputs: int | None  # see `Row`

    @property
    def published_shape(self) -> tuple[int, ...]:
        if self.inputs is None:
            return self.shape
        outputs = math.prod(self.shape[self.inputs :])
        return (outputs, math.prod(self.shape[: self.inputs])) if self.inputs else (outputs,)


def table(config: PolicyConfig) -> list[Part]:
    """Returns every tensor of `config`'s published checkpoint and where it goes in our tree.

    The parts of one leaf follow each other, layers outside, experts inside; each leaf of
    `parameters.specs(config)` is covered exactly once.
    """
    family, tree = FAMILIES[family_of(config)], abstract_params(config)
    parts = []
    for row in family.rows:
        node = tree
        for key in row.path:
            node = node.get(key) if node is not None else None
        if node is None:  # an option that this policy does not have
            continue
        axes = [name for name in ("layer", "expert") if f"{{{name}}}" in row.name]
        for index in itertools.product(*map(range, node.shape[: len(axes)])):
            name = row.name.format(**dict(zip(axes, index, strict=True)))
            parts.append(Part(row.path, index, name, node.shape[len(axes) :], row.inputs))
    covered = {part.path for part in parts}
    for path, _ in jax.tree.flatten_with_path(tree)[0]:
        assert tuple(key.key for key in path) in covered, f"{path} is in no row of {family}"
    return parts


def check(config: PolicyConfig, shapes: Mapping[str, tuple[int, ...]], where: str = "") -> None:
    """Compares the names and shapes of a checkpoint's tensors with what `config` asks for.

    Raises:
      ImportProblem: a tensor is missing, has another shape, or is one that our decoder would
        leave out of its sums. Starts with `where`.
    """
    where = f"{where}: " if where else ""
    expected = {part.name: part.published_shape for part in table(config)}
    for name, shape in expected.items():
        if name not in shapes:
            hint = ""
            if name == "lm_head.weight":
                hint = f"; if the embedding is tied, {CONFIG} must say tie_word_embeddings: true"
            raise ImportProblem(f"{where}tensor {name!r} is missing{hint}")
        if tuple(shapes[name]) != shape:
            raise ImportProblem(
                f"{where}tensor {name!r} has shape {tuple(shapes[name])}, "
                f"its {CONFIG} asks for {shape}"
            )
    for name in shapes:
        # Some tied checkpoints store the embedding twice, some old ones RoPE's frequencies.
        spare = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
        if name not in expected and not spare:
            raise ImportProblem(
                f"{where}there is a tensor {name!r}, which a {family_of(config)} decoder with "
                f"this {CONFIG} lacks"
            )


# ---------------------------------------------------------------- families


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` is read. What differs between families is all here."""

    architecture: str
    rows: tuple[Row, ...]
    # what config.json means where it is silent, as transformers takes it
    default_head_size: int | None  # None: hidden_size / num_attention_heads
    window: Callable[[Mapping[str, Any]], int | None]  # of the sliding window in use
    qk_norm: bool = False
    biases: str = "asked"  # "always" on q, k, v; "asked" (on q, k, v, o); "never"


def _qwen_window(text: Mapping[str, Any]) -> int | None:
    """Qwen's window counts if it is switched on and some layer is above the first full ones."""
    if not text.get("use_sliding_window"):
        return None
    full_layers = 0 if text["model_type"] == "qwen3_moe" else int(text.get("max_window_layers", 0))
    if full_layers >= int(text["num_hidden_layers"]):
        return None
    return text.get("sliding_window", 4096)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _ENDS + _ATTENTION + _BIASES + _OUTPUT_BIAS + _DENSE,
        default_head_size=None,
        window=lambda text: None,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _ENDS + _ATTENTION + _DENSE,
        default_head_size=None,
        # a config.json that says nothing has a window in transformers: Mistral 7B v0.1's
        window=lambda text: text.get("sliding_window", 4096),
        biases="never",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _ENDS + _ATTENTION + _BIASES + _DENSE,
        default_head_size=None,
        window=_qwen_window,
        biases="always",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _ENDS + _ATTENTION + _HEAD_NORMS + _BIASES + _OUTPUT_BIAS + _DENSE,
        default_head_size=128,
        window=_qwen_window,
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _ENDS + _ATTENTION + _HEAD_NORMS + _BIASES + _OUTPUT_BIAS + _EXPERTS,
        default_head_size=None,
        window=_qwen_window,
        qk_norm=True,
    ),
}


def family_of(config: PolicyConfig) -> str:
    """Returns the `model_type` that `config` is published as.

    Raises:
      ImportProblem: no family has this combination.
    """
    biases = (config.attention_bias, config.output_bias)
    if config.family:
        kind = config.family
    elif config.qk_norm:
        kind = "qwen3" if config.experts is None else "qwen3_moe"
    else:
        kind = "qwen2" if biases == (True, False) else "llama"
    if kind not in FAMILIES:
        raise ImportProblem(f"no family {kind!r}; supported are {', '.join(FAMILIES)}")
    allowed = {
        "always": [(True, False)],
        "asked": [(False, False), (True, True)],
        "never": [(False, False)],
    }
    family = FAMILIES[kind]
    routed = (config.experts is not None) == (kind == "qwen3_moe")
    if config.qk_norm and biases not in allowed[family.biases]:
        raise ImportProblem(
            "a policy with both qk_norm and attention_bias has no Hugging Face architecture "
            "unless it has an output_bias, too; Qwen3 has all three, Qwen2 only the second"
        )
    if biases not in allowed[family.biases] or config.qk_norm != family.qk_norm or not routed:
        raise ImportProblem(
            f"no {kind} has qk_norm={config.qk_norm}, attention_bias={config.attention_bias}, "
            f"output_bias={config.output_bias}, experts={config.experts}"
        )
    return kind


# ---------------------------------------------------------------- config.json


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
