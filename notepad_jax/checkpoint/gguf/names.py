"""Tensor names of GGUF files, and their names in Hugging Face folders.

A table of one line a kind of tensor. Experts lie in one tensor with an axis for them, where
safetensors have a tensor each: `TensorPlace` names the tensor and the entry of it. Names that no
table has (`unknown`) are refused by `policy` (above), for a decoder that leaves a tensor out
computes something else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator

ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # how Llama 3's rope scaling is told
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """Where one published tensor lies: a tensor of the file, or one expert's entry of it."""

    name: str
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f" of expert {n}" for n in self.index)

    @property
    def rotated(self) -> bool:
        """Whether it makes queries or keys, whose pairs llama.cpp keeps side by side."""
        return _ROTATED.fullmatch(self.name) is not None


def published(
    names: Iterable[str], shape: Callable[[str], tuple[int, ...]]
) -> Iterator[tuple[str, TensorPlace]]:
    """Yields (the name in a Hugging Face folder, where it lies) of what the tables know."""
    for name in names:
        found = _LAYER.fullmatch(name)
        if name in ENDS:
            yield ENDS[name], TensorPlace(name)
        elif found and found[2] in LAYERS:
            yield f"model.layers.{found[1]}.{LAYERS[found[2]]}.{found[3]}", TensorPlace(name)
        elif found and found[2] in EXPERTS and found[3] == "weight" and len(shape(name)) == 3:
            for expert in range(shape(name)[0]):
                spelled = EXPERTS[found[2]].format(expert)
                yield f"model.layers.{found[1]}.{spelled}.weight", TensorPlace(name, (expert,))


def spelled(name: str) -> str:
    """The GGUF name of a tensor that has `name` in a Hugging Face folder."""
    for theirs, ours in ENDS.items():
        if name == ours:
            return theirs
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    stem, _, kind = rest.rpartition(".")
    expert = re.sub(r"\.\d+\.", ".{}.", stem)
    for theirs, ours in (LAYERS | EXPERTS).items():
        if ours in (stem, expert):
            return f"blk.{layer}.{theirs}.{kind}"
    return name
