"""What learns in a training run: from a config and a policy to updates, weights and checkpoints.

A policy's tree is split into what is trained and what is frozen (`partition`); from there on
nothing knows which it was. The trained leaves become float32 masters (`grpo.state`), and every
rollout is learnt from in `minibatches` x `epochs` optimizer steps. What others see of it is
`params`: ordinary parameters, adapters added in. Above: train, which decides when; below: grpo.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from notepad_jax.checkpoint.targets import abstract
from notepad_jax.checkpoint.training_state import Saved
from notepad_jax.grpo import algorithm, batch, update
from notepad_jax.grpo.algorithm import Algorithm
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer, schedule
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.grpo.state import TrainState, start
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import place
from notepad_jax.types import Group, TrainBatch


@dataclasses.dataclass
class Learner:
    """The trainer's side of a run; `state` is replaced by every update."""

    config: PolicyConfig
    plan: Algorithm
    settings: UpdateSettings
    optimizer: Any
    rate: Callable[[int], Any]  # the learning rate, by optimizer steps done
    state: TrainState
    frozen: Any  # leaves that are not trained; empty where all are
    reference: Any  # the starting policy, for KL; empty where none is asked for
    told: int = 0  # groups of a rollout of which `proximal` tells
    # The trainer's logprobs of each of their turns, before the last rollout was learnt from.
    proximal: Sequence[np.ndarray] = ()


def settings_of(config: ConfigDict) -> tuple[Algorithm, UpdateSettings, OptimizerSettings]:
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
    plan = Algorithm(**{field.name: g[field.name] for field in dataclasses.fields(Algorithm)})
    settings = UpdateSettings(
        ratio=g.ratio,
        clip_low=g.clip_low,
        clip_high=g.clip_high,
        dual_clip=g.dual_clip,
        cap=g.cap,
        tis_cap=g.tis_cap,
        kl=g.kl,
        kl_weight=g.kl_weight if g.kl_in == "loss" else 0.0,
        temperature=r.temperature,
        micro_batch_rows=g.micro_batch_rows,
        remat=g.remat,
    )
    for problem in algorithm.problems(plan, settings):
        raise ValueError(problem)
    return plan, settings, OptimizerSettings(**config.optimizer)


def prepare(config: ConfigDict, policy: PolicyConfig, params: Any) -> Learner:
    """Returns the learner before its first step; `params` are taken over."""
    plan, settings, optimizer_settings = settings_of(config)
    optimizer = make_optimizer(optimizer_settings)
    frozen, trained = partition(config.grpo.lora, policy, params, config.seed)
    reference = {}
    if plan.kl_weight:
        # The state below takes `trained` over and its updates donate it: this is a copy.
        reference = parameters.join(frozen, _cast_copy(trained, dtype=policy.dtype))
    rate = schedule(optimizer_settings, optimizer_settings.learning_rate)
    state = start(trained, optimizer)
    told = config.rollout.archive_turns
    return Learner(policy, plan, settings, optimizer, rate, state, frozen, reference, told)


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
    rate = float(learner.rate(int(learner.state.step)))
    now = parameters.join(learner.frozen, learner.state.masters)
    batches, stats = algorithm.batches(
        plan, learner.settings, groups,
        now=functools.partial(_logprobs, learner, now),
        reference=functools.partial(_logprobs, learner, learner.reference),
    )  # fmt: skip
    before = plan.needs_proximal(learner.settings)
    learner.proximal = _told(learner, groups, batches) if before else ()
    effective = algorithm.effective_share(batches) if before else 1.0
    scale = plan.rate_scale(share, effective)
    learner.state, learnt = update.learn(
        learner.config, learner.optimizer, learner.settings, learner.state, learner.frozen,
        batches * plan.epochs, scale,
    )  # fmt: skip
    if before:
        learnt |= _sampler_gap(batches) | {"update/effective_share": effective}
    tokens = sum(s.packed_tokens for s in stats)
    places = sum(s.rows * s.row_length for s in stats)
    return learnt | {
        "update/learning_rate": rate,  # of the first of these optimizer steps
        "update/rate_scale": scale,
        "update/packed_tokens": tokens,
        "update/prefix_tokens_saved": sum(s.prefix_tokens_saved for s in stats),
        "update/fill": tokens / places,
    }, tokens


def _told(
    learner: Learner, groups: Sequence[Group], batches: Sequence[TrainBatch]
) -> list[np.ndarray]:
    """Returns the proximal logprobs of each turn of the first groups, for people to look at."""
    found: list[np.ndarray] = []
    cut = algorithm.parts_of(len(groups), learner.plan.minibatches)
    for part, one in zip(cut, batches, strict=True):
        first = groups[part.start : min(part.stop, learner.told)]
        if first:
            found += batch.proximal_of(one, first, learner.plan.mask_truncated)
    return found


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
