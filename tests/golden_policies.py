"""The golden networks of every published family, and a tiny one with experts.

tests/goldens/make_goldens.py made them with torch and transformers; nothing here needs those.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.model.config import Experts, PolicyConfig

GOLDENS = Path(__file__).parent / "goldens"


CASES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))


EXPERTS = Experts(count=4, per_token=2, feed_forward=6, normalize=True)


MOE = PolicyConfig(
    vocab_size=24, width=8, layers=3, heads=4, kv_heads=2, head_size=6, feed_forward=12,
    rope_theta=1e6, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=False,
    valid_vocab=21, experts=EXPERTS,
)  # fmt: skip


DENSE = dataclasses.replace(MOE, experts=None)


@functools.cache
def load(case):
    """(config, params, golden), all in float32 though the files are float16."""
    config, params = huggingface.import_policy(GOLDENS / case)
    config = dataclasses.replace(config, dtype="float32")
    golden = dict(np.load(GOLDENS / case / "golden.npz"))
    return config, jax.tree.map(lambda x: jnp.asarray(x, "float32"), params), golden


def shapes_of(store):
    return {name: tensor.shape for name, tensor in store.tensors.items()}
