"""The config of a decoder-only transformer: its sizes, and nothing else.

`PolicyConfig` is a frozen, hashable value, so it can be a static argument of `jax.jit`.
It describes Qwen2, Qwen3, Qwen3-MoE, Llama and Mistral decoders; `checkpoint.hf.config` reads
one from a published config.json and writes it back. Above: `policy` builds parameters and
runs them. Below: `rope` has the kinds of rotary scaling.
"""

from __future__ import annotations

import dataclasses

from notepad_jax.model.rope import UNSCALED, Scaling


@dataclasses.dataclass(frozen=True)
class Experts:
    """Sizes of a mixture of experts, which takes the place of every layer's feed-forward."""

    count: int  # [E]
    per_token: int  # [A] experts that each token is sent to
    feed_forward: int  # [F] of each expert
    normalize: bool  # the A chosen probabilities are divided by their sum

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"every token is sent to {self.per_token} of {self.count} experts; "
                f"per_token must be in 1..{self.count}"
            )


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Sizes of a decoder; the letter in brackets is the axis name used in array names."""

    vocab_size: int  # [V] rows of the embedding, padding rows included
    width: int  # [D]
    layers: int  # [L]
    heads: int  # [N] query heads
    kv_heads: int  # [K]
    head_size: int  # [H]
    feed_forward: int  # [F]; not used by any layer if there are `experts`
    rope_theta: float
    rms_eps: float
    qk_norm: bool  # Qwen3: RMSNorm of each query and key head before RoPE
    attention_bias: bool  # Qwen2: biases on the q, k and v projections
    tied_embeddings: bool  # the output matrix is the embedding, transposed
    valid_vocab: int  # ids at or above this exist in no tokenizer and are never sampled
    dtype: str = "float32"  # of activations; logits, softmax and norms are always float32
    output_bias: bool = False  # a bias on the attention's output projection, too
    rope: Scaling = UNSCALED
    experts: Experts | None = None  # None: one dense feed-forward per layer
    max_positions: int = 32768  # tokens of context that are promised on export; nothing is cut
    family: str = ""  # model_type on export, where the sizes do not tell: "mistral" or ""
    # [L] tokens that a layer's queries see back, themselves included; 0: all. (): all, everywhere
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} kv heads; "
                f"heads must be a multiple of kv_heads"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size is {self.head_size}; rotary embeddings need an even one")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(
                f"windows has {len(self.windows)} numbers for {self.layers} layers; give one for "
                f"each, 0 for a layer that sees all of its context"
            )
        if min(self.windows, default=0) < 0 or len({w for w in self.windows if w}) > 1:
            raise ValueError(
                f"windows is {self.windows}; all windows of a policy have one size, above 0, "
                f"and 0 says that a layer has none"
            )
        if not any(self.windows):
            object.__setattr__(self, "windows", ())
        if not 0 < self.valid_vocab <= self.vocab_size:
            raise ValueError(
                f"valid_vocab is {self.valid_vocab}; it must be in 1..vocab_size, "
                f"which is {self.vocab_size}"
            )
