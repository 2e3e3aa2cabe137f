"""Published model families: what each calls its tensors, and where they go in our tree.

A `Family` holds what one `model_type` has otherwise than another: what its config.json takes for
granted (`config`, above, reads the rest) and what its checkpoints call every parameter.
`table(config)` spells the names out without touching an array: for every leaf of our tree, which
published tensors make it up, where each goes, and how its axes are folded. Import and export
(`huggingface`) are the two directions of reading it. Published linear layers are [out, in] matrices
with heads folded; ours put inputs first and keep heads as an axis. Layers are stored one by one,
experts too; ours are stacked.

Source: the modeling files of transformers 5.23 (tests/model/test_families compares logits).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from notepad_jax.checkpoint.hf.fields import ImportProblem
from notepad_jax.checkpoint.hf.storage import CONFIG, quoted
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import abstract_params

# ---------------------------------------------------------------- name tables


@dataclasses.dataclass(frozen=True)
class LeafNames:
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
    LeafNames(("embed",), "model.embed_tokens.weight"),
    LeafNames(("final_norm",), "model.norm.weight"),
    LeafNames(("unembed",), "lm_head.weight", inputs=1),
)
_ATTENTION = (
    LeafNames(("layers", "attn_norm"), _L + "input_layernorm.weight"),
    LeafNames(("layers", "q"), _L + "self_attn.q_proj.weight", inputs=1),
    LeafNames(("layers", "k"), _L + "self_attn.k_proj.weight", inputs=1),
    LeafNames(("layers", "v"), _L + "self_attn.v_proj.weight", inputs=1),
    LeafNames(("layers", "o"), _L + "self_attn.o_proj.weight", inputs=2),
    LeafNames(("layers", "mlp_norm"), _L + "post_attention_layernorm.weight"),
)
_BIASES = (
    LeafNames(("layers", "q_bias"), _L + "self_attn.q_proj.bias", inputs=0),
    LeafNames(("layers", "k_bias"), _L + "self_attn.k_proj.bias", inputs=0),
    LeafNames(("layers", "v_bias"), _L + "self_attn.v_proj.bias", inputs=0),
)
_OUTPUT_BIAS = (LeafNames(("layers", "o_bias"), _L + "self_attn.o_proj.bias", inputs=0),)
_HEAD_NORMS = (
    LeafNames(("layers", "q_norm"), _L + "self_attn.q_norm.weight"),
    LeafNames(("layers", "k_norm"), _L + "self_attn.k_norm.weight"),
)
_DENSE = (
    LeafNames(("layers", "gate"), _L + "mlp.gate_proj.weight", inputs=1),
    LeafNames(("layers", "up"), _L + "mlp.up_proj.weight", inputs=1),
    LeafNames(("layers", "down"), _L + "mlp.down_proj.weight", inputs=1),
)
_EXPERTS = (
    LeafNames(("layers", "router"), _L + "mlp.gate.weight", inputs=1),
    LeafNames(("layers", "expert_gate"), _L + "mlp.experts.{expert}.gate_proj.weight", inputs=1),
    LeafNames(("layers", "expert_up"), _L + "mlp.experts.{expert}.up_proj.weight", inputs=1),
    LeafNames(("layers", "expert_down"), _L + "mlp.experts.{expert}.down_proj.weight", inputs=1),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One published tensor and its place in our tree: `tree[path][index]`.

    `index` is (), (layer,) or (layer, expert). `shape` is ours of that entry,
    `published_shape` the tensor's. With `inputs` axes of the entry folded into one and the
    rest into another, the tensor is the transpose; see `LeafNames`. Nothing here holds an array.
    """

    path: tuple[str, ...]
    index: tuple[int, ...]
    name: str
    shape: tuple[int, ...]
    inputs: int | None  # see `LeafNames`

    @property
    def published_shape(self) -> tuple[int, ...]:
        if self.inputs is None:
            return self.shape
        outputs = math.prod(self.shape[self.inputs :])
        return (outputs, math.prod(self.shape[: self.inputs])) if self.inputs else (outputs,)


def table(config: PolicyConfig) -> Iterator[Part]:
    """Yields every tensor of `config`'s published checkpoint and where it goes in our tree.

    The parts of one leaf follow each other, layers outside, experts inside; each leaf of
    `parameters.specs(config)` is covered exactly once. One by one, as a config.json may ask for
    more layers than any memory has room to name. Raises ImportProblem as `family_of`, at once.
    """
    return _parts(FAMILIES[family_of(config)], abstract_params(config))


def _parts(family: Family, tree: Mapping[str, Any]) -> Iterator[Part]:
    covered = set()
    for row in family.rows:
        node: Any = tree
        for key in row.path:
            node = node.get(key) if node is not None else None
        if node is None:  # an option that this policy does not have
            continue
        covered.add(row.path)
        axes = [name for name in ("layer", "expert") if f"{{{name}}}" in row.name]
        stack, shape = node.shape[: len(axes)], node.shape[len(axes) :]
        for number in range(math.prod(stack)):
            index = _unfolded(number, stack)
            name = row.name.format(**dict(zip(axes, index, strict=True)))
            yield Part(row.path, index, name, shape, row.inputs)
    for path, _ in jax.tree.flatten_with_path(tree)[0]:
        assert tuple(key.key for key in path) in covered, f"{path} is in no row of {family}"


def _unfolded(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an entry by its number in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        number, last = divmod(number, size)
        index.insert(0, last)
    return tuple(index)


def check(
    config: PolicyConfig, shapes: Mapping[str, tuple[int, ...]], where: str = "",
    asks: str = f"its {CONFIG} asks", spelled: Callable[[str], str] = str,
) -> None:  # fmt: skip
    """Compares the names and shapes of a checkpoint's tensors with what `config` asks for.

    Raises:
      ImportProblem: a tensor is missing, has another shape, or is one that our decoder would
        leave out of its sums. Starts with `where`; `asks` says whose word `config` is, and
        `spelled` what the checkpoint calls a tensor.
    """
    where = f"{where}: " if where else ""
    expected = set()
    for part in table(config):  # ends where the first tensor is missing
        name, shape = part.name, part.published_shape
        expected.add(name)
        if name not in shapes:
            hint = ""
            if name == "lm_head.weight":
                hint = f"; if the embedding is tied, {CONFIG} must say tie_word_embeddings: true"
            raise ImportProblem(f"{where}tensor {quoted(spelled(name))} is missing{hint}")
        if tuple(shapes[name]) != shape:
            raise ImportProblem(
                f"{where}tensor {quoted(spelled(name))} has shape {tuple(shapes[name])}, "
                f"{asks} for {shape}"
            )
    for name in shapes:
        # Some tied checkpoints store the embedding twice, some old ones RoPE's frequencies.
        spare = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
        if name not in expected and not spare:
            raise ImportProblem(
                f"{where}there is a tensor {quoted(spelled(name))}, which a "
                f"{family_of(config)} decoder as {asks} for lacks"
            )


# ---------------------------------------------------------------- families


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family (`model_type`): all that its checkpoints have otherwise than another's."""

    architecture: str
    rows: tuple[LeafNames, ...]
    # what config.json means where it is silent, as transformers takes it
    default_head_size: int | None  # None: hidden_size / num_attention_heads
    # sliding windows: "never"; "always" in all layers, unless null says no; "asked" in all layers
    # by use_sliding_window; "by layer" if asked, in those that layer_types names, or in the upper
    windows: str
    default_positions: int = 32768
    qk_norm: bool = False
    biases: str = "asked"  # "always" on q, k, v; "asked" (on q, k, v, o); "never"


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _ENDS + _ATTENTION + _BIASES + _OUTPUT_BIAS + _DENSE,
        default_head_size=None,
        windows="never",
        default_positions=2048,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _ENDS + _ATTENTION + _DENSE,
        default_head_size=None,
        windows="always",
        default_positions=131072,
        biases="never",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _ENDS + _ATTENTION + _BIASES + _DENSE,
        default_head_size=None,
        windows="by layer",
        biases="always",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _ENDS + _ATTENTION + _HEAD_NORMS + _BIASES + _OUTPUT_BIAS + _DENSE,
        default_head_size=128,
        windows="by layer",
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _ENDS + _ATTENTION + _HEAD_NORMS + _BIASES + _OUTPUT_BIAS + _EXPERTS,
        default_head_size=None,
        windows="asked",
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
    uneven = 0 in config.windows and family.windows != "by layer"
    if config.windows and (uneven or family.windows == "never"):
        raise ImportProblem(
            f"no {kind} has windows={config.windows}: Qwen2 and Qwen3 have them layer by layer, "
            f"Mistral and Qwen3-MoE in all layers"
        )
    return kind
