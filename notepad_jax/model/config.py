"""The sizes of a policy, and nothing else.

`PolicyConfig` is a frozen, hashable value, so it can be a static argument of `jax.jit`.
It describes Qwen2, Qwen3 and Llama style decoders; `checkpoint.huggingface` reads one
from a published config.json. Above: `policy` builds parameters and runs them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Sizes of a decoder; the letter in brackets is the axis name used in array names."""

    vocab_size: int  # [V] rows of the embedding, padding rows included
    width: int  # [D]
    layers: int  # [L]
    heads: int  # [N] query heads
    kv_heads: int  # [K]
    head_size: int  # [H]
    feed_forward: int  # [F]
    rope_theta: float
    rms_eps: float
    qk_norm: bool  # Qwen3: RMSNorm of each query and key head before RoPE
    attention_bias: bool  # Qwen2: biases on the q, k and v projections
    tied_embeddings: bool  # the output matrix is the embedding, transposed
    valid_vocab: int  # ids at or above this exist in no tokenizer and are never sampled
    dtype: str = "float32"  # of activations; logits, softmax and norms are always float32

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} kv heads; "
                f"heads must be a multiple of kv_heads"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size is {self.head_size}; rotary embeddings need an even one")
        if not 0 < self.valid_vocab <= self.vocab_size:
            raise ValueError(
                f"valid_vocab is {self.valid_vocab}; it must be in 1..vocab_size, "
                f"which is {self.vocab_size}"
            )
