"""From hidden states to what a loss or a sampler needs of the logits, always in float32.

Two consumers, one definition. The update asks for the logprob of given labels and never
holds [B, T, V] (`token_logprobs`, through the kernels' dispatch); the sampler asks for the
logits themselves at a handful of positions (`logits`). Temperature and the mask of ids that
no tokenizer has are applied in both by the same two rules: divide, then mask.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params
from notepad_jax.model.policy import output_matrix


def logits(
    config: PolicyConfig, params: Params, hidden_XD: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """Returns float32 logits at temperature 1, -inf for ids that no tokenizer has."""
    w_DV = output_matrix(config, params).astype(hidden_XD.dtype)
    logits_XV = jnp.matmul(hidden_XD, w_DV, preferred_element_type=jnp.float32)
    if config.valid_vocab == config.vocab_size:
        return logits_XV
    return jnp.where(jnp.arange(config.vocab_size) < config.valid_vocab, logits_XV, -jnp.inf)


def token_logprobs(
    config: PolicyConfig,
    params: Params,
    hidden_XD: Float[Array, "X D"],
    labels_X: Int[Array, " X"],
    temperature: float,
) -> tuple[Float[Array, " X"], Float[Array, " X"], Float[Array, " X"]]:
    """Returns (logprob of the label, logsumexp, entropy) of softmax(logits / temperature)."""
    tied = config.tied_embeddings
    return pallas_kernels.token_logprob(
        hidden_XD,
        (params["embed"] if tied else params["unembed"]).astype(hidden_XD.dtype),
        labels_X,
        temperature=temperature,
        valid_vocab=config.valid_vocab,
        transposed=tied,
    )
