"""The policy's forward pass over a batch: logprobs and entropies of its completion tokens.

One forward pass over packed rows that gathers the hidden states which predict a trained token:
nothing of size [B, T, V] ever exists. Inside an optimizer step it is differentiated (`run`);
alone, before one, it gives numbers on the host (`told`): proximal and reference logprobs, the
ratio of whole trajectories, and the entropy that a gate looks at. Above: `update`, and
setup.learner, which asks before the first step on a rollout.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from notepad_jax.grpo import micro_batches
from notepad_jax.grpo.micro_batches import MicroBatch
from notepad_jax.model import attention, logprobs, moe, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh, place, shards
from notepad_jax.parallel.shards import ROWS, WHOLE
from notepad_jax.types import TrainBatch


class Told(NamedTuple):
    """Logprob and entropy of every completion token, float32 [B, T]; 0 elsewhere."""

    logprobs: np.ndarray
    entropy: np.ndarray  # nats, of the distribution that the token was drawn from


def told(
    config: PolicyConfig, params: Any, batch: TrainBatch, temperature: float, micro_batch_rows: int
) -> Told:
    """Returns logprobs and entropies of the batch's trained tokens, on every process's host."""
    there = mesh.of(params)
    parts = there.shape["fsdp"]
    with mesh.within(there):
        found = [
            of_micro_batch(
                params, place.commit(m, place.rows(there)), config=config, temperature=temperature
            )
            for m in micro_batches.split(batch, micro_batch_rows, parts)
        ]
    apart = zip(*jax.device_get(found), strict=True)
    return Told(
        *(micro_batches.put_back(batch, micro_batch_rows, parts, list(each)) for each in apart)
    )


def run(
    params: Any, micro: MicroBatch, config: PolicyConfig, temperature: float, remat: bool
) -> tuple[Float[Array, " X"], Float[Array, " X"], Float[Array, "L E"]]:
    """Returns (logprob, entropy, load of the experts) of the micro-batch's trained tokens."""
    attend = attention.packed(config, micro.kv_end, micro.positions)
    hidden_BTD, _, _, routes_LBTA = policy.forward(
        config, params, micro.tokens, micro.positions, attend, remat=remat
    )
    logprob_X, _, entropy_X = logprobs.token_logprobs(
        config, params, hidden_BTD, micro.before, micro.labels, temperature
    )
    if config.experts is None:
        return logprob_X, entropy_X, jnp.zeros((config.layers, 0))

    def local(routes_LBTA: Array, before_X: Array, weights_X: Array) -> Array:
        B, T = routes_LBTA.shape[1:3]
        trained_BT = (jnp.zeros(B * T).at[before_X].add(weights_X) > 0).reshape(B, T)
        return shards.psum(moe.load(routes_LBTA, trained_BT, experts(config)), "fsdp")

    routes = PartitionSpec(None, "fsdp")
    load_LE = shards.shard_map(local, (routes, ROWS, ROWS), WHOLE)(
        routes_LBTA, micro.before, micro.weights
    )
    return logprob_X, entropy_X, load_LE


def experts(config: PolicyConfig) -> int:
    return 0 if config.experts is None else config.experts.count


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def of_micro_batch(
    params: Any, micro: MicroBatch, config: PolicyConfig, temperature: float
) -> tuple[Float[Array, " X"], Float[Array, " X"]]:
    """(logprob, entropy) of the micro-batch's trained tokens, whole on every device."""
    logprob_X, entropy_X, _ = run(params, micro, config, temperature, remat=False)
    return shards.all_gather((logprob_X, entropy_X))
