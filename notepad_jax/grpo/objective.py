"""The policy-gradient objective, as sums and counts.

Pure jnp over a flat vector of completion tokens [X]: nothing here knows about rows,
packing or devices. Everything is a sum, a count or a maximum (`Sums`), so micro-batches,
rows and hosts are merged by adding (`merge`), and `update` divides once by the batch's
denominator: averages of averages are the oldest bug in this field.

Which ratio is clipped how stands in `ratios`, the estimates of KL(policy || reference) here
(Schulman, "Approximating KL divergence", 2020), all per token. Departures: a log ratio is held
in [-20, 20] before `exp`, and a KL's d in [-10, 10].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from notepad_jax import near
from notepad_jax.grpo import ratios
from notepad_jax.grpo.ratios import Limits

MAX_KL_LOG_RATIO = 10.0

Leaf = Any  # an array, or whatever jax puts in its place when it maps over a tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Float32 scalars: sums over the tokens that have a weight; fields named max are maxima."""

    # weighted: policy loss + kl_weight * kl - entropy_weight * entropy; what is differentiated
    loss: Leaf
    policy_loss: Leaf  # weighted
    kl: Leaf  # weighted, before kl_weight
    tokens: Leaf  # how many
    clipped_update: Leaf  # tokens whose gradient a clip took away, by the kind of their turn
    clipped_answer: Leaf
    uncorrected: Leaf  # tokens that a correction for the sampler weighs with 0
    off_policy: Leaf  # tokens of failures that the policy has left
    ratio: Leaf
    ratio_squares: Leaf
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


def k1(logprob_X: Float[Array, " X"], reference_X: Float[Array, " X"]) -> Float[Array, " X"]:
    """-d with d = reference - logprob: unbiased, of either sign; as a loss it pulls nowhere."""
    return -_apart(logprob_X, reference_X)


def k2(logprob_X: Float[Array, " X"], reference_X: Float[Array, " X"]) -> Float[Array, " X"]:
    """d^2 / 2: biased, never negative; as a loss its gradient is the KL's."""
    return _apart(logprob_X, reference_X) ** 2 / 2


def k3(logprob_X: Float[Array, " X"], reference_X: Float[Array, " X"]) -> Float[Array, " X"]:
    """exp(d) - d - 1: unbiased, never negative."""
    d = _apart(logprob_X, reference_X)
    return jnp.expm1(d) - d


def _apart(logprob_X: Float[Array, " X"], reference_X: Float[Array, " X"]) -> Float[Array, " X"]:
    return jnp.clip(reference_X - logprob_X, -MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO)


KLS: dict[str, Callable[[Array, Array], Array]] = {one.__name__: one for one in (k1, k2, k3)}


def kl_named(name: str) -> Callable[[Array, Array], Array]:
    """Returns the KL estimator called `name`; ValueError if there is none."""
    return near.named("estimate of KL", KLS, name)


def objective(
    logprob_X: Float[Array, " X"],
    behaviour_X: Float[Array, " X"],
    proximal_X: Float[Array, " X"],
    reference_X: Float[Array, " X"],
    advantages_X: Float[Array, " X"],
    weights_X: Float[Array, " X"],
    update_turn_X: Float[Array, " X"],
    entropy_X: Float[Array, " X"],
    limits: Limits,
    kl_weight: float | Array,
    entropy_weight: float | Array | None = None,
    ratio: str = "ppo_clip",
    kl: str = "k3",
    over_turns: ratios.OverTurns = lambda x_X: x_X,
    trajectory_X: Array | float = 0.0,
) -> Sums:
    """Returns the loss (`.loss`, differentiable in `logprob_X`) and metrics, as sums over tokens.

    All vectors are float32 over the same tokens. `proximal_X` is the denominator of the
    ratio, `behaviour_X` what the sampler reported, `update_turn_X` tells update turns'
    tokens from answer turns', for the metrics only. `ratio` and `kl` are names in
    `ratios.RATIOS` and `KLS`; `over_turns` replaces each token's value by the mean over its
    turn, for ratios and guards that are a turn's; `trajectory_X` is the mean log ratio over each
    token's trajectory, for ratios that are a trajectory's. With an `entropy_weight` the loss is
    less by that times the weighted sum of `entropy_X`, and differentiable in it, too. Tokens of
    weight 0 are in no sum: there the other vectors may hold anything, NaN included.
    """
    on_X = weights_X > 0
    mask_X = on_X.astype(jnp.float32)

    def masked(x_X: Array) -> Array:
        return jnp.where(on_X, x_X, 0.0)

    behaviour_X, proximal_X = masked(behaviour_X), masked(proximal_X)
    logprob_X = masked(logprob_X)
    log_ratio_X = logprob_X - proximal_X
    if ratio in ratios.TURNWISE:
        log_ratio_X = over_turns(log_ratio_X)
    if ratio in ratios.TRAJECTORYWISE:
        log_ratio_X = jnp.where(on_X, trajectory_X, 0.0)
    ratio_X = ratios.exp(log_ratio_X)
    advantages_X = masked(advantages_X)
    policy_X, cut_X = ratios.named(ratio)(log_ratio_X, logprob_X, advantages_X, limits)
    weight_X = ratios.corrected(proximal_X, behaviour_X, limits, over_turns)
    far_X = ratios.too_far(logprob_X, behaviour_X, advantages_X, limits, over_turns)
    policy_X = jnp.where(on_X & ~far_X, policy_X * weight_X, 0.0)
    kl_X = kl_named(kl)(logprob_X, masked(reference_X))
    gap_X = jax.lax.stop_gradient(jnp.abs(logprob_X - behaviour_X))
    entropy_X = masked(entropy_X)
    update_X = masked(update_turn_X)
    none_X = on_X & (weight_X == 0)
    cut_X = (cut_X & on_X & ~far_X & ~none_X).astype(jnp.float32)
    policy_loss, kl_sum = (weights_X * policy_X).sum(), (weights_X * kl_X).sum()
    loss = policy_loss + kl_weight * kl_sum
    if entropy_weight is not None:
        loss = loss - entropy_weight * (weights_X * entropy_X).sum()
    entropy_X = jax.lax.stop_gradient(entropy_X)
    return Sums(
        loss=loss,
        policy_loss=policy_loss,
        kl=kl_sum,
        tokens=mask_X.sum(),
        clipped_update=(cut_X * update_X).sum(),
        clipped_answer=(cut_X * (mask_X - update_X)).sum(),
        uncorrected=none_X.sum(dtype=jnp.float32),
        off_policy=(far_X & on_X).sum(dtype=jnp.float32),
        ratio=masked(ratio_X).sum(),
        ratio_squares=masked(ratio_X**2).sum(),
        ratio_max=masked(ratio_X).max(),
        gap=gap_X.sum(),
        gap_max=gap_X.max(),
        entropy_update=(entropy_X * update_X).sum(),
        tokens_update=update_X.sum(),
        entropy_answer=(entropy_X * (mask_X - update_X)).sum(),
        tokens_answer=(mask_X - update_X).sum(),
    )


def divide(sums: Sums, denominator: float) -> dict[str, float]:
    """Turns the sums, already on the host, into the metrics that are logged.

    `denominator` is the batch's (or the sum of several batches'): the losses are divided by
    it, everything else by the tokens that it is a mean over. `ratio_effective` is the effective
    share of tokens weighed by their ratios, (sum r)^2 / (n sum r^2): 1 on policy.
    """
    s = {f.name: float(getattr(sums, f.name)) for f in dataclasses.fields(Sums)}
    count = max(s["tokens"], 1.0)
    updates, answers = max(s["tokens_update"], 1.0), max(s["tokens_answer"], 1.0)
    return {
        "loss": s["loss"] / denominator,
        "policy_loss": s["policy_loss"] / denominator,
        "kl": s["kl"] / denominator,
        "loss_tokens": s["tokens"],
        "clip_share": (s["clipped_update"] + s["clipped_answer"]) / count,
        "clip_share_update": s["clipped_update"] / updates,
        "clip_share_answer": s["clipped_answer"] / answers,
        "tis_left_out": s["uncorrected"] / count,
        "off_policy_left_out": s["off_policy"] / count,
        "ratio_mean": s["ratio"] / count,
        "ratio_max": s["ratio_max"],
        "ratio_effective": s["ratio"] ** 2 / max(count * s["ratio_squares"], 1e-30),
        "logprob_gap_mean": s["gap"] / count,
        "logprob_gap_max": s["gap_max"],
        "entropy_update": s["entropy_update"] / updates,
        "entropy_answer": s["entropy_answer"] / answers,
    }
