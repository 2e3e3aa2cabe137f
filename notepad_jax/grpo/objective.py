"""The clipped policy-gradient objective, as sums and counts.

Pure jnp over a flat vector of completion tokens [X]: nothing here knows about rows,
packing or devices. Everything is a sum, a count or a maximum (`Sums`), so micro-batches,
rows and hosts are merged by adding (`merge`), and `update` divides once by the batch's
denominator: averages of averages are the oldest bug in this field.

PPO's clip (Schulman et al. 2017, eq. 7) with the dual clip for negative advantages (Ye et
al. 2020, eq. 5) and the k3 estimate of KL(policy || reference) (Schulman, "Approximating
KL divergence", 2020), all per token. Departures: the log ratio is held in [-20, 20] before
`exp`, where the clips have long taken the gradient away, and k3's d in [-10, 10].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0
MAX_KL_LOG_RATIO = 10.0

Leaf = Any  # an array, or whatever jax puts in its place when it maps over a tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Float32 scalars: sums over the tokens that have a weight; fields named max are maxima."""

    loss: Leaf  # weighted: policy loss + kl_weight * kl; the thing that is differentiated
    policy_loss: Leaf  # weighted
    kl: Leaf  # weighted k3, before kl_weight
    tokens: Leaf  # how many
    clipped: Leaf  # tokens whose gradient a clip took away
    ratio: Leaf
    ratio_max: Leaf
    gap: Leaf  # |logprob - behaviour|
    gap_max: Leaf
    entropy_update: Leaf
    tokens_update: Leaf
    entropy_answer: Leaf
    tokens_answer: Leaf


def zero() -> Sums:
    """Returns the sums of no tokens."""
    return Sums(**{f.name: jnp.zeros((), jnp.float32) for f in dataclasses.fields(Sums)})


def merge(a: Sums, b: Sums) -> Sums:
    """Returns the sums of a's and b's tokens together."""

    def one(name: str) -> Leaf:
        x, y = getattr(a, name), getattr(b, name)
        return jnp.maximum(x, y) if name.endswith("_max") else x + y

    return Sums(**{f.name: one(f.name) for f in dataclasses.fields(Sums)})


def k3(logprob_X: Float[Array, " X"], reference_X: Float[Array, " X"]) -> Float[Array, " X"]:
    """exp(d) - d - 1 with d = reference - logprob in [-10, 10]; never negative."""
    d = jnp.clip(reference_X - logprob_X, -MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO)
    return jnp.expm1(d) - d


def clipped_loss(
    ratio_X: Float[Array, " X"],
    advantages_X: Float[Array, " X"],
    clip_low: float | Array,
    clip_high: float | Array,
    dual_clip: float | Array,
) -> Float[Array, " X"]:
    """-min(rA, clip(r, 1 - low, 1 + high) A), and for A < 0 never more than -dual_clip * A."""
    inside_X = jnp.clip(ratio_X, 1 - clip_low, 1 + clip_high)
    loss_X = jnp.maximum(-ratio_X * advantages_X, -inside_X * advantages_X)
    bound_X = -dual_clip * advantages_X
    return jnp.where(advantages_X < 0, jnp.minimum(loss_X, bound_X), loss_X)


def objective(
    logprob_X: Float[Array, " X"],
    behaviour_X: Float[Array, " X"],
    proximal_X: Float[Array, " X"],
    reference_X: Float[Array, " X"],
    advantages_X: Float[Array, " X"],
    weights_X: Float[Array, " X"],
    update_turn_X: Float[Array, " X"],
    entropy_X: Float[Array, " X"],
    clip_low: float | Array,
    clip_high: float | Array,
    dual_clip: float | Array,
    kl_weight: float | Array,
) -> Sums:
    """Returns the sums over tokens with a weight; `.loss` is differentiable in `logprob_X`.

    All vectors are float32 over the same tokens. `proximal_X` is the denominator of the
    ratio, `behaviour_X` what the sampler reported, `update_turn_X` tells update turns'
    tokens from answer turns', for the metrics only. Where the weight is 0 the other vectors
    may hold anything, NaN included.
    """
    on_X = weights_X > 0
    mask_X = on_X.astype(jnp.float32)

    def masked(x_X: Array) -> Array:
        return jnp.where(on_X, x_X, 0.0)

    log_ratio_X = masked(logprob_X - proximal_X)
    ratio_X = jnp.exp(jnp.clip(log_ratio_X, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantages_X = masked(advantages_X)
    policy_X = masked(clipped_loss(ratio_X, advantages_X, clip_low, clip_high, dual_clip))
    kl_X = k3(masked(logprob_X), masked(reference_X))
    over_X = (advantages_X > 0) & (ratio_X > 1 + clip_high)
    under_X = (advantages_X < 0) & ((ratio_X < 1 - clip_low) | (ratio_X > dual_clip))
    gap_X = jax.lax.stop_gradient(jnp.abs(masked(logprob_X - behaviour_X)))
    entropy_X = jax.lax.stop_gradient(masked(entropy_X))
    update_X = masked(update_turn_X)
    policy_loss, kl = (weights_X * policy_X).sum(), (weights_X * kl_X).sum()
    return Sums(
        loss=policy_loss + kl_weight * kl,
        policy_loss=policy_loss,
        kl=kl,
        tokens=mask_X.sum(),
        clipped=(over_X | under_X).sum().astype(jnp.float32),
        ratio=masked(ratio_X).sum(),
        ratio_max=masked(ratio_X).max(),
        gap=gap_X.sum(),
        gap_max=gap_X.max(),
        entropy_update=(entropy_X * update_X).sum(),
        tokens_update=update_X.sum(),
        entropy_answer=(entropy_X * (mask_X - update_X)).sum(),
        tokens_answer=(mask_X - update_X).sum(),
    )


def divide(sums: Sums, denominator: float) -> dict[str, float]:
    """Turns the sums, already on the host, into what is logged.

    `denominator` is the batch's (or the sum of several batches'): the losses are divided by
    it, everything else by the tokens that it is a mean over.
    """
    s = {f.name: float(getattr(sums, f.name)) for f in dataclasses.fields(Sums)}
    count = max(s["tokens"], 1.0)
    return {
        "loss": s["loss"] / denominator,
        "policy_loss": s["policy_loss"] / denominator,
        "kl": s["kl"] / denominator,
        "loss_tokens": s["tokens"],
        "clip_share": s["clipped"] / count,
        "ratio_mean": s["ratio"] / count,
        "ratio_max": s["ratio_max"],
        "logprob_gap_mean": s["gap"] / count,
        "logprob_gap_max": s["gap_max"],
        "entropy_update": s["entropy_update"] / max(s["tokens_update"], 1.0),
        "entropy_answer": s["entropy_answer"] / max(s["tokens_answer"], 1.0),
    }
