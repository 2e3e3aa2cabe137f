"""Optimizer steps over `TrainBatch`es: rows in, new masters and metrics out.

The rows are split into micro-batches of equal shape (`micro_batches`). Each runs the policy,
gathers the hidden states that predict a completion token (nothing of size [B, T, V] ever
exists) and adds its gradient and its `Sums` to a running total on the device. Only when all
are in is the total divided, once, by the batch's denominator, so how rows are packed or split
moves neither loss nor gradient. Gradients add up in float32, and float32 masters move
(`state`); the forward pass sees casts of them.

A policy's tree comes in two partitions: the state's masters, which are trained, and `frozen`,
which is not (empty unless adapters are trained). A step whose loss, gradient or new parameters
are not finite leaves the state as it was, and says so in its metrics. Scalars such as the clip
range are ordinary arguments: changing them compiles nothing.

Buffers of the state are donated: after `learn` the state that was passed in is gone. Above:
programs. Beside: `batch` makes the batch, `objective` the sums, `optimizer` the rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from notepad_jax.grpo import micro_batches
from notepad_jax.grpo import objective as objectives
from notepad_jax.grpo.micro_batches import MicroBatch
from notepad_jax.grpo.state import TrainState
from notepad_jax.model import attention, logprobs, moe, parameters, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.types import TrainBatch

# Summed gradient (float32), sums, and tokens per layer and expert [L, E] (E is 0 if dense).
Total = tuple[Any, objectives.Sums, Array]


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """How one optimizer step is taken; no defaults here, they live in configs/."""

    clip_low: float  # ratios below 1 - clip_low give no gradient when the advantage is negative
    clip_high: float  # ratios above 1 + clip_high give none when it is positive
    dual_clip: float  # ratios above it give none when it is negative
    kl_weight: float  # of k3 to the reference policy, per token; 0 needs no reference
    temperature: float  # the sampler's
    micro_batch_rows: int  # rows whose activations are alive at once
    remat: bool  # recompute a layer's activations in the backward pass

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; a greedy sampler gives no gradient, "
                "set it above 0"
            )
        if self.micro_batch_rows < 1:
            raise ValueError(f"micro_batch_rows is {self.micro_batch_rows}; it must be at least 1")
        if not (0 <= self.clip_low < 1 and 0 <= self.clip_high < self.dual_clip - 1):
            raise ValueError(
                f"clip range ({self.clip_low}, {self.clip_high}), dual clip {self.dual_clip}: need "
                "0 <= clip_low < 1, clip_high >= 0 and dual_clip > 1 + clip_high"
            )
        if not 0 <= self.kl_weight < float("inf"):
            raise ValueError(f"kl_weight is {self.kl_weight}; it must be 0 (off) or more")


def learn(
    config: PolicyConfig,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    state: TrainState,
    frozen: Any,
    batches: Sequence[TrainBatch],
    rate_scale: float = 1.0,
) -> tuple[TrainState, dict[str, float]]:
    """Takes one optimizer step on each batch, in order; `state`'s buffers are donated.

    `rate_scale` multiplies what the optimizer would add to the parameters. Muon and Adam
    move as far for a faint gradient as for a strong one; a caller who knows that a batch
    carries little signal says so here. Returns the new state and metrics (`_metrics`).

    Raises:
      ValueError: the rows cannot be split, or no token or a row's first token is trained.
    """
    taken = []
    for batch in batches:
        total = _sum(config, settings, state.masters, frozen, batch)
        state, report = _apply(state, total, batch.denominator, rate_scale, optimizer=optimizer)
        taken.append(report)
    taken = jax.device_get(taken)  # the one device-to-host copy of all these steps
    return state, _metrics(taken, [batch.denominator for batch in batches])


def loss_and_gradient(
    config: PolicyConfig,
    settings: UpdateSettings,
    masters: Any,
    frozen: Any,
    batch: TrainBatch,
) -> tuple[Float[Array, ""], Any]:
    """Returns what a step of `learn` gives the optimizer: mean loss and its gradient, float32."""
    gradient, sums, _ = _sum(config, settings, masters, frozen, batch)
    d = batch.denominator
    return sums.loss / d, jax.tree.map(lambda g: g / d, gradient)


def _sum(
    config: PolicyConfig, settings: UpdateSettings, masters: Any, frozen: Any, batch: TrainBatch
) -> Total:
    """Returns the gradient and the sums over the whole batch, micro-batch by micro-batch."""
    s = settings
    clip = (s.clip_low, s.clip_high, s.dual_clip, s.kl_weight)
    fixed = dict(config=config, temperature=s.temperature, remat=s.remat)
    total = _nothing_yet(masters, config)
    for micro in micro_batches.split(batch, s.micro_batch_rows):
        total = _accumulate(total, masters, frozen, micro, *clip, **fixed)
    return total


def token_logprobs_of(
    config: PolicyConfig, params: Any, batch: TrainBatch, temperature: float, micro_batch_rows: int
) -> np.ndarray:
    """Returns `params`' logprob of every completion token, float32 [B, T], 0 elsewhere.

    Of frozen parameters these are the batch's reference logprobs, of the trainer's before
    the first step on the batch its proximal ones.
    """
    micros = micro_batches.split(batch, micro_batch_rows)
    parts = [_logprobs(params, m, config=config, temperature=temperature)[0] for m in micros]
    parts = jax.device_get(parts)
    out_BT = np.zeros(batch.tokens.shape, np.float32)
    trained_BT = batch.weights > 0
    counts = [np.count_nonzero(micro.weights) for micro in micros]
    out_BT[trained_BT] = np.concatenate([p[:n] for p, n in zip(parts, counts, strict=True)])
    return out_BT


def _metrics(
    taken: Sequence[tuple[objectives.Sums, dict[str, Any]]], denominators: Sequence[float]
) -> dict[str, float]:
    """Merges what optimizer steps reported, already on the host, into one line of metrics.

    Means over completion tokens (`objective.divide`) and, as means over the steps, the global
    norms of gradient (before clipping), update and new parameters, the share of the masters'
    elements that an update changed and the norm that arrived over the norm that was asked
    for. For a mixture of experts also how evenly the trained tokens were spread
    (`moe.load_metrics`). Steps that were skipped are counted and count nowhere else.
    """
    good = [i for i, (_, norms) in enumerate(taken) if norms["applied"]]
    counted = {"update/optimizer_steps": len(taken), "update/skipped": len(taken) - len(good)}
    if not good:
        return counted
    sums = functools.reduce(objectives.merge, (taken[i][0] for i in good))
    means = {
        name: float(np.mean([taken[i][1][name] for i in good]))
        for name in taken[good[0]][1]
        if name != "applied"
    }
    return objectives.divide(sums, sum(denominators[i] for i in good)) | means | counted


# ---------------------------------------------------------------- on the device


# The masters lend no more than their shapes; kept, they also say where the total lives.
@functools.partial(jax.jit, static_argnames="config", keep_unused=True)
def _nothing_yet(masters: Any, config: PolicyConfig) -> Total:
    gradient = jax.tree.map(jnp.zeros_like, masters)
    return gradient, objectives.zero(), jnp.zeros((config.layers, _experts(config)))


def _experts(config: PolicyConfig) -> int:
    return 0 if config.experts is None else config.experts.count


def _run(
    params: Any, micro: MicroBatch, config: PolicyConfig, temperature: float, remat: bool
) -> tuple[Float[Array, " X"], Float[Array, " X"], Float[Array, "L E"]]:
    """Returns (logprob, entropy, load of the experts) of the micro-batch's trained tokens."""
    attend = attention.packed(config, micro.kv_end)
    hidden_BTD, _, _, routes_LBTA = policy.forward_with_routes(
        config, params, micro.tokens, micro.positions, attend, remat=remat
    )
    hidden_XD = hidden_BTD.reshape(-1, config.width)[micro.before]
    logprob_X, _, entropy_X = logprobs.token_logprobs(
        config, params, hidden_XD, micro.labels, temperature
    )
    if config.experts is None:
        return logprob_X, entropy_X, jnp.zeros((config.layers, 0))
    trained_BT = jnp.zeros(micro.tokens.size).at[micro.before].add(micro.weights) > 0
    load_LE = moe.load(routes_LBTA, trained_BT.reshape(micro.tokens.shape), _experts(config))
    return logprob_X, entropy_X, load_LE


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def _logprobs(
    params: Any, micro: MicroBatch, config: PolicyConfig, temperature: float
) -> tuple[Float[Array, " X"], Float[Array, " X"]]:
    return _run(params, micro, config, temperature, remat=False)[:2]


@functools.partial(
    jax.jit, static_argnames=("config", "temperature", "remat"), donate_argnames=("total",)
)
def _accumulate(
    total: Total,
    masters: Any,
    frozen: Any,
    micro: MicroBatch,
    clip_low: float | Array,
    clip_high: float | Array,
    dual_clip: float | Array,
    kl_weight: float | Array,
    config: PolicyConfig,
    temperature: float,
    remat: bool,
) -> Total:
    """Adds the micro-batch's summed gradient and sums to `total`."""

    def loss(masters: Any) -> tuple[Float[Array, ""], tuple[objectives.Sums, Array]]:
        params = parameters.join(frozen, masters)
        logprob_X, entropy_X, load_LE = _run(params, micro, config, temperature, remat)
        with jax.named_scope("objective"):
            sums = objectives.objective(
                logprob_X,
                micro.behaviour,
                micro.proximal,
                micro.reference,
                micro.advantages,
                micro.weights,
                micro.update_turn,
                entropy_X,
                clip_low,
                clip_high,
                dual_clip,
                kl_weight,
            )
        return sums.loss, (sums, load_LE)

    gradient, (sums, load_LE) = jax.grad(loss, has_aux=True)(masters)
    summed, sums_so_far, load_so_far = total
    summed = jax.tree.map(jnp.add, summed, gradient)
    return summed, objectives.merge(sums_so_far, sums), load_so_far + load_LE


@functools.partial(jax.jit, static_argnames=("optimizer",), donate_argnames="state")
def _apply(
    state: TrainState,
    total: Total,
    denominator: float | Array,
    rate_scale: float | Array,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, tuple[objectives.Sums, dict[str, Array]]]:
    """Divides once and lets the optimizer move the masters, unless something is not finite."""
    summed, sums, load_LE = total
    gradient = jax.tree.map(lambda g: g / denominator, summed)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.masters)
        updates = jax.tree.map(lambda u: u * rate_scale, updates)
        masters = optax.apply_updates(state.masters, updates)
    moved = jax.tree.map(jnp.subtract, masters, state.masters)
    grad_norm, update_norm = optax.tree.norm(gradient), optax.tree.norm(updates)
    param_norm = optax.tree.norm(masters)
    applied = jnp.isfinite(sums.loss) & jnp.isfinite(grad_norm) & jnp.isfinite(param_norm)
    norms = {
        "applied": applied,
        "grad_norm": grad_norm,
        "update_norm": update_norm,
        "param_norm": param_norm,
        "update/changed_share": _share_changed(moved),
        "update/applied_over_asked": optax.tree.norm(moved) / jnp.maximum(update_norm, 1e-30),
    }
    if load_LE.shape[1]:
        norms |= moe.load_metrics(load_LE)
    new = TrainState(state.step + 1, masters, opt_state)
    state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, state)
    return state, (sums, norms)


def _share_changed(moved: Any) -> Array:
    leaves = jax.tree.leaves(moved)
    changed = sum(jnp.count_nonzero(leaf).astype(jnp.float32) for leaf in leaves)
    return changed / sum(leaf.size for leaf in leaves)
