"""Logits and token logprobs from hidden states, always in float32.

Two consumers, one definition. The update asks for the logprob of given labels and never
holds [B, T, V] (`token_logprobs`, through the kernels' dispatch); the sampler asks for the
logits themselves at a handful of positions (`logits`). Temperature and the mask of ids that
no tokenizer has are applied in both by the same two rules: divide, then mask.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

import pallas_kernels
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import seen
from notepad_jax.model.parameters import Params, specs
from notepad_jax.model.policy import output_matrix
from notepad_jax.parallel import shards
from notepad_jax.parallel.shards import ROWS


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
    hidden_BTD: Float[Array, "B T D"],
    places_X: Int[Array, " X"],
    labels_X: Int[Array, " X"],
    temperature: float,
) -> tuple[Float[Array, " X"], Float[Array, " X"], Float[Array, " X"]]:
    """Returns (logprob of the label, logsumexp, entropy) of softmax(logits / temperature).

    `places` are where in the rows the label is predicted: flat indices, on a mesh into the rows
    of the shard that the place is on (X is cut as the rows are, evenly). The vocabulary is cut
    over "tensor". Of the hidden states, only those at the places meet the output matrix.
    """
    tied = config.tied_embeddings
    name = "embed" if tied else "unembed"
    matrix = seen(params[name], specs(config)[name].axes, hidden_BTD.dtype)

    def local(hidden_BTD: Array, matrix: Array, places_X: Array, labels_X: Array) -> Any:
        return pallas_kernels.token_logprob(
            hidden_BTD.reshape(-1, config.width)[places_X],
            matrix,
            labels_X,
            temperature=temperature,
            valid_vocab=config.valid_vocab,
            transposed=tied,
            axis_name=shards.name("tensor"),
        )

    cut = PartitionSpec("tensor", None) if tied else PartitionSpec(None, "tensor")
    # Typed, results must be proved equal over "tensor": the collectives do, where it is cut.
    typed = shards.name("tensor") is not None
    call = shards.shard_map(local, (ROWS, cut, ROWS, ROWS), ROWS, typed)
    return call(hidden_BTD, matrix, places_X, labels_X)
