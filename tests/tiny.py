"""A random policy small enough to check in a blink, and prompts for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.engine.apart import Apart
from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.model import attention, logprobs, parameters, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Quantized
from notepad_jax.types import Completion, Prompt, SamplingParams, tokens

STOPS = (2, 3)
CONFIG = PolicyConfig(
    vocab_size=64, width=32, layers=3, heads=4, kv_heads=2, head_size=8, feed_forward=48,
    rope_theta=1e4, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
    valid_vocab=60,
)  # fmt: skip
SETTINGS = EngineSettings(
    slots=16, page_size=8, pages=160, max_prompt=96, max_new_tokens=12, steps_per_launch=4,
    row_tokens=256,
)  # fmt: skip


def params(seed: int = 0, config: PolicyConfig = CONFIG):
    """Random parameters, scaled so that distributions are far from uniform."""
    drawn = parameters.init_params(config, jax.random.key(seed))
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, drawn)


def multiplied_out(params):
    """The float32 weights that int8 ones stand for, made without our code; of a tree or one."""
    return jax.tree.map(
        lambda x: (
            x.values.astype("float32") * x.scale
            if isinstance(x, Quantized)
            else x.astype("float32")
        ),
        params,
        is_leaf=lambda x: isinstance(x, Quantized),
    )


def executor(
    settings: EngineSettings = SETTINGS, config: PolicyConfig = CONFIG, mesh=None
) -> Executor:
    there = None if mesh is None else Apart(config, mesh)
    return Executor(settings, Device(config, settings, there))


def sampling(seed: int, temperature: float = 1.0, length: int = 12) -> SamplingParams:
    return SamplingParams(temperature, 1.0, length, STOPS, seed)


@functools.partial(jax.jit, static_argnames="config")
def _logprobs(config, weights, row, labels, length, temperature):
    """Logprob of every label of one right-padded row: the update's path, one context."""
    kv_end = jnp.where(jnp.arange(len(row)) < length, length, jnp.arange(len(row)) + 1)
    positions = jnp.arange(len(row))[None]
    attend = attention.packed(config, kv_end[None].astype(jnp.int32), positions)
    hidden, *_ = policy.forward(config, weights, row[None], positions, attend)
    # token_logprobs takes a static temperature; scaling the hidden states is the same.
    places = jnp.arange(len(row))
    hidden = hidden / temperature
    return logprobs.token_logprobs(config, weights, hidden, places, labels, 1.0)[0]


def trainer_logprobs(
    weights, prompt: Prompt, completion: Completion, temperature: float, config=CONFIG
) -> np.ndarray:
    """What the update computes for a completion, its whole context in one row."""
    ids = np.concatenate([prompt.tokens, completion.tokens])
    row = np.zeros(128, np.int32)
    row[: len(ids)] = ids
    logp = _logprobs(config, weights, row, np.roll(row, -1), len(ids), temperature or 1.0)
    start = len(prompt.tokens) - 1
    return np.asarray(logp)[start : start + len(completion.tokens)]


def prompts(seed: int = 0, per_prefix: int = 4) -> list[Prompt]:
    """Ragged prompts over prefixes that fill pages, that do not, and none at all."""
    rng = np.random.default_rng(seed)
    draw = lambda n: tokens(rng.integers(4, 60, n))  # noqa: E731
    shared = [draw(16), draw(21), draw(40), draw(3), tokens()]
    return [
        Prompt(prefix, draw(rng.integers(1, 20)), draw(5), draw(11).copy)
        for prefix in shared
        for _ in range(per_prefix)
    ]
