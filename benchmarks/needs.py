"""What the hot programs need by their mathematics: FLOPs and bytes, whatever a program does.

- FLOPs of the update: 2 x (weights of the layers x tokens + output matrix x trained tokens),
  times 3 (forward, gradient of the input, gradient of the weight) or times 2 where the weights
  are frozen, plus 12 x layers x heads x head size x visible (query, key) pairs. This is the
  usual 6 x parameters x tokens, but the output matrix is met by trained tokens only and masked
  pairs are not counted. Work done twice (remat, the scores in attention's backward) is not
  counted either, nor are low-rank adapters, under a hundredth of their matrices.
- Bytes of a decode step: every weight once (of the embedding only what the output matrix
  needs), every cached key and value once, a shared prefix once for the slots that share it.

Dense policies only. Above: `accelerator` divides by it what it measures, `compiled` sets it
beside what XLA made of the program.
"""

from __future__ import annotations

import numpy as np

from notepad_jax.model.config import PolicyConfig
from notepad_jax.types import TrainBatch


def layer_weights(config: PolicyConfig) -> int:
    """Elements of the matrices of all layers of a dense policy (no norms, no biases)."""
    c = config
    attention = 2 * c.width * (c.heads + c.kv_heads) * c.head_size
    return c.layers * (attention + 3 * c.width * c.feed_forward)


def visible_pairs(kv_end_BT: np.ndarray) -> int:
    """(query, key) pairs under the mask j <= i < kv_end[j]: kv_end[j] - j for every key."""
    return int((kv_end_BT - np.arange(kv_end_BT.shape[1])).sum())


def update_flops(config: PolicyConfig, batch: TrainBatch, frozen: bool) -> int:
    """Forward and backward over the batch."""
    trained = int(np.count_nonzero(batch.weights))
    weights = layer_weights(config) * batch.tokens.size
    weights += config.vocab_size * config.width * trained
    attention = config.layers * config.heads * config.head_size * visible_pairs(batch.kv_end)
    return 2 * weights * (2 if frozen else 3) + 12 * attention


def prefill_flops(config: PolicyConfig, length: int) -> int:
    """A causal forward that keeps keys and values: the last layer runs its k and v only."""
    c = config
    weights = layer_weights(c) * (c.layers - 1) // c.layers
    weights += 2 * c.width * c.kv_heads * c.head_size
    pairs = length * (length + 1) // 2
    return 2 * weights * length + 4 * (c.layers - 1) * c.heads * c.head_size * pairs


def decode_bytes(config: PolicyConfig, cached: float) -> float:
    """Read by one step in bfloat16: all matrices, and `cached` tokens' keys and values."""
    c = config
    weights = layer_weights(c) + c.vocab_size * c.width
    return 2 * (weights + cached * 2 * c.layers * c.kv_heads * c.head_size)
