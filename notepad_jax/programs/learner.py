"""What learns in a training run: from a config and a policy to updates, weights and checkpoints.

A policy's tree is split into what is trained and what is frozen (`partition`); from there on
nothing knows which it was. The trained leaves become float32 masters (`grpo.state`), and every
rollout is learnt from in `minibatches` x `epochs` optimizer steps. What others see of it is
`params`: ordinary parameters, adapters added in. Above: train, which decides when; below: grpo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from notepad_jax.checkpoint.targets import abstract
from notepad_jax.checkpoint.training_state import Saved
from notepad_jax.grpo import advantages, batch, update
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.grpo.state import TrainState, start
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import place
from notepad_jax.types import Group, TrainBatch


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a rollout's groups become optimizer steps."""

    advantage: str  # a name in advantages.ADVANTAGES
    minibatches: int  # parts of a rollout, of whole groups; each is one optimizer step
    epochs: int  # times that a rollout is gone through
    row_length: int  # tokens of a packed row
    full_rate_at: float  # share of informative groups for the whole rate; 0: always whole
    max_skipped: int  # steps in a row that may be skipped for not being finite

    def __post_init__(self) -> None:
        advantages.of_groups(self.advantage, ())  # knows its name

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that a rollout of enough groups is learnt from."""
        return self.minibatches * self.epochs

    def rate_scale(self, share: float) -> float:
        """Returns what the rate is multiplied by when that share of the groups is informative."""
        return min(1.0, share / self.full_rate_at) if self.full_rate_at else 1.0


@dataclasses.dataclass
class Learner:
    """The trainer's side of a run; `state` is replaced by every update."""

    config: PolicyConfig
    plan: Plan
    settings: UpdateSettings
    optimizer: Any
    state: TrainState
    frozen: Any  # leaves that are not trained; empty where all are
    reference: Any  # the starting policy, for KL; empty where none is asked for


def settings_of(config: ConfigDict) -> tuple[Plan, UpdateSettings, OptimizerSettings]:
    """Reads the sections `grpo` and `optimizer`; ValueError for what cannot work."""
    g, r = config.grpo, config.rollout
    if r.group_size < 2:
        raise ValueError(
            f"rollout.group_size is {r.group_size}; an advantage compares the "
            f"readings of a group, so use at least 2"
        )
    if r.top_p != 1:
        raise ValueError(
            f"rollout.top_p is {r.top_p}; the ratio compares whole distributions, and a "
            f"nucleus is not one: train with rollout.top_p=1 (evaluate.top_p is free)"
        )
    plan = Plan(g.advantage, g.minibatches, g.epochs, g.row_length, g.full_rate_at, g.max_skipped)
    settings = UpdateSettings(
        clip_low=g.clip_low,
        clip_high=g.clip_high,
        dual_clip=g.dual_clip,
        kl_weight=g.kl_weight,
        temperature=r.temperature,
        micro_batch_rows=g.micro_batch_rows,
        remat=g.remat,
    )
    return plan, settings, OptimizerSettings(**config.optimizer)


def prepare(config: ConfigDict, policy: PolicyConfig, params: Any) -> Learner:
    """Returns the learner before its first step; `params` are taken over."""
    plan, settings, optimizer_settings = settings_of(config)
    optimizer = make_optimizer(optimizer_settings)
    frozen, trained = partition(config.grpo.lora, policy, params, config.seed)
    reference = {}
    if settings.kl_weight:
        # The state below takes `trained` over and its updates donate it: this is a copy.
        reference = parameters.join(frozen, _cast_copy(trained, dtype=policy.dtype))
    return Learner(policy, plan, settings, optimizer, start(trained, optimizer), frozen, reference)


def partition(
    settings: ConfigDict, policy: PolicyConfig, params: Any, seed: int
) -> tuple[Any, Any]:
    """Returns (frozen, trained): all is trained, or adapters of rank `settings.rank` are."""
    if not settings.rank:
        return {}, params
    chosen = lora.Lora(settings.rank, settings.alpha, tuple(settings.targets))
    return lora.partition(policy, params, chosen, jax.random.key(seed))


def params(learner: Learner) -> Any:
    """Returns the policy as of now, as ordinary parameters, where the learner has them."""
    joined = parameters.join(learner.frozen, learner.state.masters)
    where = jax.tree.map(lambda x: x.sharding, lora.plain(joined))
    return place.commit(lora.merged(joined), where)


# ---------------------------------------------------------------- learning


def learn(learner: Learner, groups: Sequence[Group], share: float) -> tuple[dict[str, float], int]:
    """Learns from a rollout; returns (metrics, tokens that were packed).

    `share` of the groups that these were chosen from were informative.
    """
    plan = learner.plan
    values = advantages.of_groups(plan.advantage, groups)
    packed = [
        batch.pack(
            groups[part],
            values[part],
            row_length=plan.row_length,
            rows_multiple=learner.settings.micro_batch_rows,
            length_multiple=plan.row_length,  # one width: each further one compiles anew
        )
        for part in parts_of(len(groups), plan.minibatches)
    ]
    batches = [_with_logprobs(learner, one.batch) for one in packed] * plan.epochs
    scale = plan.rate_scale(share)
    learner.state, learnt = update.learn(
        learner.config, learner.optimizer, learner.settings, learner.state, learner.frozen,
        batches, scale,
    )  # fmt: skip
    if plan.optimizer_steps > 1:
        learnt |= _sampler_gap(batches[: len(packed)])
    stats = [one.stats for one in packed]
    tokens = sum(s.packed_tokens for s in stats)
    places = sum(s.rows * s.row_length for s in stats)
    return learnt | {
        "update/rate_scale": scale,
        "update/packed_tokens": tokens,
        "update/prefix_tokens_saved": sum(s.prefix_tokens_saved for s in stats),
        "update/fill": tokens / places,
    }, tokens


def parts_of(count: int, parts: int) -> list[slice]:
    """Cuts `count` groups, in order, into at most `parts` parts that differ by one at most."""
    parts = min(parts, count)
    ends = [count * (i + 1) // parts for i in range(parts)]
    return [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def _with_logprobs(learner: Learner, one: TrainBatch) -> TrainBatch:
    """Adds what only the trainer knows, before the first step on the rollout moves it.

    With a single step the policy that learns is the one that sampled, so the sampler's own
    logprobs are the ratio's denominator. With several, the trainer computes them once: then
    the ratio is exactly 1 at the first step, and the clips bound how far the others go.
    """
    found = {}
    if learner.plan.optimizer_steps > 1:
        now = parameters.join(learner.frozen, learner.state.masters)
        found["proximal_logprobs"] = _logprobs(learner, now, one)
    if learner.settings.kl_weight:
        found["reference_logprobs"] = _logprobs(learner, learner.reference, one)
    return dataclasses.replace(one, **found)


def _sampler_gap(batches: Sequence[TrainBatch]) -> dict[str, float]:
    """How far sampler and trainer are apart before the first step; later ones move the policy."""
    gap_N = np.concatenate(
        [np.abs(b.proximal_logprobs - b.behaviour_logprobs)[b.weights > 0] for b in batches]
    )
    return {"logprob_gap_mean": float(gap_N.mean()), "logprob_gap_max": float(gap_N.max())}


def _logprobs(learner: Learner, params: Any, one: TrainBatch) -> Any:
    s = learner.settings
    return update.token_logprobs_of(learner.config, params, one, s.temperature, s.micro_batch_rows)


# ---------------------------------------------------------------- checkpoints


def saved_beside(learner: Learner, whole: Any) -> Mapping[str, Any]:
    """Returns what a checkpoint keeps as `opt` beside the parameters `whole`.

    Masters that are parameters of their own are not in `whole`: adapters, which are summed
    up there.
    """
    return {
        "optimizer": learner.state.opt_state,
        "trained": parameters.without(learner.state.masters, whole),
    }


def restore_target(learner: Learner) -> tuple[Any, Any]:
    """Returns shapes, dtypes and places of (params, opt) for `Checkpoints.restore`."""
    joined = parameters.join(learner.frozen, learner.state.masters)
    whole, made = lora.plain(joined), jax.eval_shape(lora.merged, joined)
    target = jax.tree.map(
        lambda x, like: jax.ShapeDtypeStruct(x.shape, like.dtype, sharding=x.sharding), whole, made
    )
    return target, abstract(saved_beside(learner, whole))


def resume(learner: Learner, saved: Saved) -> None:
    """Puts the learner where a checkpoint left it."""
    same = parameters.without(saved.params, parameters.without(saved.params, learner.state.masters))
    learner.state = TrainState(
        step=place.commit(np.int32(saved.meta["optimizer_steps"]), learner.state.step.sharding),
        masters=parameters.join(same, saved.opt["trained"]),
        opt_state=saved.opt["optimizer"],
    )


def _cast_copy(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), tree)
