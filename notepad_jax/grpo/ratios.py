"""Importance ratios and their clips: the loss of each token, and where its gradient is clipped.

Each choice is a function of log ratios [X] to the proximal policy, logprobs [X], advantages [X]
and the `Limits`, and gives the loss of every token [X] and whether its gradient is gone [X].
With all ratios at 1 every one of them has REINFORCE's gradient, -A. Beside them stands what
corrects for a sampler that is not the trainer (`corrected`), and what leaves out turns that the
policy has moved away from (`too_far`). Pure jnp, nothing of rows or devices; `objective` calls
it. Formulas and papers: docs/algorithms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from notepad_jax import near

MAX_LOG_RATIO = 20.0  # held to before `exp`: the clips have long taken the gradient away
NEVER = 2 * math.exp(MAX_LOG_RATIO)  # no ratio is so large: a limit that is off


class Limits(NamedTuple):
    """Clip ranges and caps, scalars; which of them act depends on the ratio."""

    clip_low: float | Array  # ratios below 1 - clip_low give no gradient where A < 0
    clip_high: float | Array  # ratios above 1 + clip_high give none where A > 0
    dual_clip: float | Array  # ratios above it give none where A < 0
    cap: float | Array  # of cispo: ratios count for no more
    tis_cap: float | Array  # of `corrected`; 0: no correction
    tis_low: float | Array  # weights below it, and above tis_cap, are 0; 0: tis_cap is a cap
    tis_veto: float | Array | None  # a token's weight below which its turn's are 0
    off_policy_at: float | Array | None  # of `too_far`, nats a token


USUAL = Limits(  # a config's
    clip_low=0.2, clip_high=0.2, dual_clip=3.0, cap=4.0, tis_cap=0.0, tis_low=0.0, tis_veto=0.0,
    off_policy_at=0.0,
)  # fmt: skip

Tokens = Float[Array, " X"]
Truths = Bool[Array, " X"]
Ratio = Callable[[Tokens, Tokens, Tokens, Limits], tuple[Tokens, Truths]]
OverTurns = Callable[[Tokens], Tokens]  # each token's value to the mean over its turn


def ignored(name: str, limits: Limits) -> list[str]:
    """Returns the names of changed limits that the ratio `name` does not look at."""
    acting = (*LOOKS_AT[name], *GUARDS)
    chosen = (one for one in Limits._fields if getattr(limits, one) != getattr(USUAL, one))
    return [one for one in chosen if one not in acting]


def exp(log_ratio_X: Tokens) -> Tokens:
    """The importance ratio of a log ratio, held finite."""
    return jnp.exp(jnp.clip(log_ratio_X, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def ppo_clip(log_ratio_X, logprob_X, advantages_X, limits):
    """-min(rA, clip(r, 1 - low, 1 + high) A), and for A < 0 never more than -dual_clip * A.

    PPO's clip (Schulman et al. 2017, eq. 7) with the dual clip (Ye et al. 2020, eq. 5).
    """
    return _clipped(exp(log_ratio_X), advantages_X, limits)


def gspo(log_ratio_X, logprob_X, advantages_X, limits):
    """The clips on s, the geometric mean of the ratios of a token's turn (GSPO, Zheng et al. 2025).

    `log_ratio_X` is that mean already (`TURNWISE`). s is taken in the paper's token form,
    sg(s) pi / sg(pi), so a token's gradient is its own and `turn_mean` makes it the paper's.
    """
    own_X = logprob_X - jax.lax.stop_gradient(logprob_X)
    s_X = exp(jax.lax.stop_gradient(log_ratio_X)) * jnp.exp(own_X)
    return _clipped(s_X, advantages_X, limits)


def gspo_trajectory(log_ratio_X, logprob_X, advantages_X, limits):
    """`gspo` with a whole trajectory, all its turns' completions, as the sequence.

    `log_ratio_X` is the mean over the trajectory (`TRAJECTORYWISE`), found before the step: its
    turns lie in several micro-batches. As s has no gradient of its own, that is exact.
    """
    return gspo(log_ratio_X, logprob_X, advantages_X, limits)


def cispo(log_ratio_X, logprob_X, advantages_X, limits):
    """-sg(min(r, cap)) A log pi: the weight is bounded, no token loses its gradient.

    CISPO (MiniMax-M1, 2025), with ScaleRL's one-sided cap.
    """
    weight_X = jax.lax.stop_gradient(jnp.minimum(exp(log_ratio_X), limits.cap))
    return -weight_X * advantages_X * logprob_X, jnp.zeros(advantages_X.shape, bool)


def likelihood(log_ratio_X, logprob_X, advantages_X, limits):
    """-A log pi: no ratio, for what no policy of ours sampled (supervised learning)."""
    return -advantages_X * logprob_X, jnp.zeros(advantages_X.shape, bool)


RATIOS: dict[str, Ratio] = {
    one.__name__: one for one in (ppo_clip, gspo, gspo_trajectory, cispo, likelihood)
}
CLIPS, GUARDS = Limits._fields[:3], Limits._fields[4:]
LOOKS_AT: dict[str, tuple[str, ...]] = {  # of `Limits`, beside `GUARDS`
    "ppo_clip": CLIPS, "gspo": CLIPS, "gspo_trajectory": CLIPS, "cispo": ("cap",), "likelihood": (),
}  # fmt: skip
TURNWISE = ("gspo",)  # ratios that are given the mean over a turn
TRAJECTORYWISE = ("gspo_trajectory",)  # and over a trajectory

# Where the proximal logprobs come from: a pass of their own, or between sampler and policy.
PROXIMALS = ("recomputed", "interpolated")


def named(name: str) -> Ratio:
    """Returns the ratio called `name`; ValueError, naming its neighbour, if there is none."""
    return near.named("ratio", RATIOS, name)


def corrected(
    proximal_X: Tokens, behaviour_X: Tokens, limits: Limits, over_turns: OverTurns
) -> Tokens:
    """sg(min(w, tis_cap)) of each token, w = proximal / behaviour; 1 where `tis_cap` is 0.

    Truncated importance sampling (Yao et al. 2025) for a sampler that computes otherwise than
    the trainer; with a cap that is never met, the weight of the decoupled loss (AReaL 2025).
    With a `tis_low`, what is not in [tis_low, tis_cap] weighs 0 (masked importance sampling),
    and with a `tis_veto` so does every token of a turn that has one with w below it.
    """
    weight_X = exp(proximal_X - behaviour_X)
    outside_X = (weight_X < limits.tis_low) | (weight_X > limits.tis_cap)
    outside_X &= limits.tis_low > 0
    if limits.tis_veto is not None:
        vetoed_X = (weight_X < limits.tis_veto).astype(jnp.float32)
        outside_X |= over_turns(vetoed_X) > 0
    weight_X = jnp.where(outside_X, 0.0, jnp.minimum(weight_X, limits.tis_cap))
    return jax.lax.stop_gradient(jnp.where(limits.tis_cap > 0, weight_X, 1.0))


def too_far(
    logprob_X: Tokens, behaviour_X: Tokens, advantages_X: Tokens, limits: Limits,
    over_turns: OverTurns,
) -> Truths:  # fmt: skip
    """Tokens of turns of A < 0 that the policy has left: mean of log mu - log pi > off_policy_at.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9), a turn being the
    sequence; mu is the sampler's own, so that its differences from the trainer count, too.
    """
    if limits.off_policy_at is None:
        return jnp.zeros(advantages_X.shape, bool)
    far_X = over_turns(jax.lax.stop_gradient(behaviour_X - logprob_X))
    return (advantages_X < 0) & (far_X > limits.off_policy_at)


def interpolated(
    behaviour_X: Tokens, logprob_X: Tokens, age_X: Array, since: float | Array
) -> Tokens:
    """log mu + a (log pi - log mu): proximal logprobs without a forward pass of their own.

    a = (v_prox - v_mu) / (v_now - v_mu) in policy versions (A-3PO 2025): `age_X` is v_prox -
    v_mu of each token's turn, `since` what the policy has learnt since v_prox, v_now - v_prox.
    A turn that v_prox itself wrote (`age` 0) has a = 0: behaviour is proximal. Before the first
    step (`since` 0) a = 1 of the others: the policy itself is proximal. No gradient.
    """
    share_X = age_X / jnp.maximum(age_X + since, 1e-6)
    return jax.lax.stop_gradient(behaviour_X + share_X * (logprob_X - behaviour_X))


def _clipped(ratio_X, advantages_X, limits):
    low, high, failed_X = 1 - limits.clip_low, 1 + limits.clip_high, advantages_X < 0
    loss_X = jnp.maximum(-ratio_X * advantages_X, -jnp.clip(ratio_X, low, high) * advantages_X)
    bounded_X = jnp.minimum(loss_X, -limits.dual_clip * advantages_X)
    out_X = (ratio_X < low) | (ratio_X > limits.dual_clip)
    over_X = (advantages_X > 0) & (ratio_X > high)
    return jnp.where(failed_X, bounded_X, loss_X), over_X | (failed_X & out_X)
