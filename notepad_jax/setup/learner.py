"""The learner of a training run: from a config and a policy to updates, weights, checkpoints.

A policy's tree is split into what is trained and what is frozen (`partition`); from there on
nothing knows which it was. The trained leaves become float32 masters (`grpo.state`), and every
rollout is learnt from in `minibatches` x `epochs` optimizer steps. What others see of it are the
two parts: the frozen one once (`base`), the masters after every rollout. Above: train, which
decides when; below: grpo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.checkpoint.abstract_trees import abstract
from notepad_jax.checkpoint.training_state import Saved
from notepad_jax.grpo import advantages, algorithm, batch, entropy_gate, forward, shares, update
from notepad_jax.grpo.algorithm import Algorithm
from notepad_jax.grpo.batch import PackingStats
from notepad_jax.grpo.entropy_gate import Gate
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer, schedule
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.grpo.state import TrainState, start
from notepad_jax.model import flops, lora, lora_merge, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import place
from notepad_jax.setup import policies
from notepad_jax.setup.config.learning import AdapterKeys, GrpoKeys
from notepad_jax.setup.config.whole import Training
from notepad_jax.types import Group, TrainBatch

GATE, SCALES = "entropy_gate", "scales"  # keys of a checkpoint's data
# Of `grpo`, with which a teacher's turns, of which no logprob is known, count as they are.
UNWEIGHED = {"ratio": "likelihood", "tis_cap": 0.0, "ess_at": 0.0}


@dataclasses.dataclass
class Learner:
    """The trainer's side of a run; `state` is replaced by every update."""

    config: PolicyConfig
    plan: Algorithm
    settings: UpdateSettings
    optimizer: Any
    rate: Callable[[int], Any]  # the share of the rates, by rollouts learnt from
    peak: float  # the learning rate that it is a share of
    state: TrainState
    frozen: Any  # leaves that are not trained; empty where all are
    reference: Any  # the starting policy, for KL; empty where none is asked for
    told: int = 0  # groups of a rollout of which `proximal` tells
    # The trainer's logprobs of each of their turns, before the last rollout was learnt from.
    proximal: Sequence[np.ndarray] = ()
    gate: Gate = entropy_gate.OPEN  # on failures of turns that are unsure already
    # Of kinds of tasks, over rollouts; empty where `plan.scale_memory` is 0 or cannot act.
    scales: advantages.Scales = dataclasses.field(default_factory=dict)


def settings_of(config: Training) -> tuple[Algorithm, UpdateSettings, OptimizerSettings]:
    """Reads the sections `grpo` and `optimizer`; ValueError for what cannot work."""
    g, r = config.grpo, config.rollout
    if r.group_size < 2 and g.advantage != advantages.imitation.__name__:
        raise ValueError(
            f"rollout.group_size is {r.group_size}; an advantage compares the "
            f"readings of a group, so use at least 2"
        )
    if r.teacher and g.advantage != advantages.imitation.__name__:
        raise ValueError(
            f"rollout.teacher is {r.teacher!r}, whose readings are learnt as they are, and "
            f"grpo.advantage={g.advantage!r} compares readings of a group; use --recipe imitate"
        )
    for key, needed in UNWEIGHED.items() if r.teacher else ():
        if (said := getattr(g, key)) != needed:
            raise ValueError(
                f"rollout.teacher is {r.teacher!r}, whose turns no policy of ours sampled, and "
                f"grpo.{key}={said} weighs them by how likely they are; set it to {needed}"
            )
    if r.top_p != 1:
        raise ValueError(
            f"rollout.top_p is {r.top_p}; the ratio compares whole distributions, and a "
            f"nucleus is not one: train with rollout.top_p=1 (evaluate.top_p is free)"
        )
    plan = Algorithm(**_shared(Algorithm, g) | {"local_weight": r.local.weight})
    settings = UpdateSettings(
        **_shared(UpdateSettings, g)
        | {"kl_weight": g.kl_weight if g.kl_in == "loss" else 0.0, "temperature": r.temperature}
    )
    for problem in algorithm.problems(plan, settings):
        raise ValueError(problem)
    return plan, settings, config.optimizer


def _shared(kind: type, section: GrpoKeys) -> dict[str, Any]:
    """Returns what a section says of the fields of a value."""
    return {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(kind)
        if hasattr(section, field.name)
    }


def prepare(config: Training, policy: PolicyConfig, params: Any) -> Learner:
    """Returns the learner before its first step; `params` are taken over."""
    plan, settings, optimizer_settings = settings_of(config)
    optimizer = make_optimizer(optimizer_settings)
    frozen, trained = partition(config.grpo.lora, policy, params, config.seed)
    reference = {}
    if plan.kl_weight:
        # The state below takes `trained` over and its updates donate it: this is a copy.
        reference = parameters.join(frozen, _cast_copy(trained, dtype=policy.dtype))
    rate, peak = schedule(optimizer_settings), optimizer_settings.learning_rate
    state = start(trained, optimizer)
    told = config.rollout.archive_turns
    return Learner(policy, plan, settings, optimizer, rate, peak, state, frozen, reference, told)


def partition(
    settings: AdapterKeys, policy: PolicyConfig, params: Any, seed: int
) -> tuple[Any, Any]:
    """Returns (frozen, trained): all is trained, or adapters of rank `settings.rank` are.

    A policy that has adapters goes on with them; where all is trained they are added in. Raises
    ValueError where they are others than `settings` has.
    """
    chosen = settings.wanted
    if chosen is None:
        return {}, lora_merge.in_place(params)
    return lora.partition(policy, params, chosen, jax.random.key(seed))


def check_start(settings: AdapterKeys, policy: str) -> None:
    """Raises ValueError where `policy` has other adapters than `settings`; reads no weight."""
    chosen = settings.wanted
    if chosen is not None:
        lora.check(policies.adapted(policy), chosen)


def base(learner: Learner, stored: Any) -> Any:
    """Returns the frozen leaves in the dtypes that they are `stored` in, to be kept.

    `stored` is a tree of shapes and dtypes (`builders.LoadedPolicy`). The learner may have widened
    them: what is kept is small, and the same on every machine.
    """
    narrow = lambda x, like: x.astype(like.dtype)  # noqa: E731
    known = parameters.without(stored, parameters.without(stored, learner.frozen))
    ours = parameters.without(learner.frozen, parameters.without(learner.frozen, known))
    return parameters.join(learner.frozen, jax.tree.map(narrow, ours, known))


def seen(learner: Learner, adopted: Any) -> dict[str, float]:
    """Returns how much of what adapters learnt an engine samples with, as a metric.

    `adopted` is the policy that it was handed. Nothing before they learnt anything, and where
    all weights are trained.
    """
    ours, theirs = (lora.factors(tree) for tree in (learner.state.masters, adopted))
    laid = jax.tree.map(lambda x, like: place.laid(x, like.sharding), ours, theirs)
    share = lora.seen(laid, theirs)
    return {} if share is None else {"rollout/delta_seen": share}


# ---------------------------------------------------------------- learning


def learn(
    learner: Learner, groups: Sequence[Group], share: float, version: int,
    named: Mapping[str, str],
) -> tuple[dict[str, float], int]:  # fmt: skip
    """Learns from a rollout; returns (metrics, tokens that were packed).

    `share` of the groups that these were chosen from were informative; `version` is that of the
    policy as it is, the rollouts before this one, by which rates rise and fall; `named` says what
    the source of a task is called in metrics.
    """
    plan, rate = learner.plan, float(learner.rate(version))
    policy = parameters.join(learner.frozen, learner.state.masters)
    scales, entropies = None, []
    if plan.remembers:
        scales = advantages.remembered(plan.advantage, groups, learner.scales, plan.scale_memory)

    def now(one: TrainBatch) -> np.ndarray:
        told = _told(learner, policy, one)
        entropies.append(told.entropy)
        return told.logprobs

    batches, stats = algorithm.batches(
        plan, learner.settings, groups, now,
        reference=lambda one: _told(learner, learner.reference, one).logprobs, version=version,
        scales=scales,
    )  # fmt: skip
    there = [one for one in batches if one is not None]
    before = plan.needs_proximal(learner.settings) and bool(there)
    learner.proximal = _to_look_at(learner, groups, batches) if before else ()
    effective = shares.effective_share(there) if before else 1.0
    scale = plan.rate_scale(share, effective)
    gate, guarded, taught = learner.gate, {}, batches
    if plan.entropy_high and there:
        taught, gate, guarded = algorithm.gated(plan, gate, batches, entropies)
    learner.state, learnt = update.learn(
        learner.config, learner.optimizer, learner.settings, learner.state, learner.frozen,
        [one for one in taught if one is not None] * plan.epochs, rate * scale,
        moved=not before and any(one.age.any() for one in there),
    )  # fmt: skip
    if learnt["update/skipped"] < learnt["update/optimizer_steps"] or not any(taught):
        learner.gate = gate  # a step that is not kept has changed nothing
        learner.scales = learner.scales if scales is None else scales
    learnt |= guarded
    if before:
        learnt |= _sampler_gap(there) | {"update/effective_share": effective}
    learnt |= shares.metrics(taught, algorithm.parts_with_local(plan, groups), named)
    outcome = advantages.of_groups(plan.advantage, groups, scales)
    learnt |= shares.turn_level(groups, outcome, plan.advantage, plan.memory_weight)
    tokens = sum(s.packed_tokens for s in stats)
    places = sum(s.rows * s.row_length for s in stats)
    return learnt | {
        "update/learning_rate": rate * learner.peak,  # of all of these optimizer steps
        "update/rate_scale": scale,
        "update/packed_tokens": tokens,
        "update/prefix_tokens_saved": sum(s.prefix_tokens_saved for s in stats),
        "update/fill": tokens / max(1, places),
        "update/model_flops": _model_flops(learner, stats),
    }, tokens


def adapters(learner: Learner) -> int:
    """Returns how many elements of adapters learn beside the weights; 0 where these do."""
    return sum(leaf.size for leaf in jax.tree.leaves(learner.state.masters)) * bool(learner.frozen)


def _model_flops(learner: Learner, stats: Sequence[PackingStats]) -> int:
    """Model FLOPs of learning from packed parts, and of the forward passes that this asks for."""
    plan, beside = learner.plan, adapters(learner)
    passes = plan.forwards(learner.settings, len(stats)) / max(1, len(stats))
    found = 0.0
    for part in stats:
        work = part.packed_tokens, part.pairs, part.loss_tokens, beside
        found += plan.epochs * flops.learning(learner.config, *work)
        found += passes * flops.forward(learner.config, *work)
    return round(found)


def _to_look_at(
    learner: Learner, groups: Sequence[Group], batches: Sequence[TrainBatch | None]
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


def _told(learner: Learner, params: Any, one: TrainBatch) -> forward.Told:
    s = learner.settings
    return forward.told(learner.config, params, one, s.temperature, s.micro_batch_rows)


# ---------------------------------------------------------------- checkpoints


def saved(learner: Learner) -> tuple[Any, Any]:
    """Returns (params, opt) as a checkpoint keeps them: the masters, and the optimizer's state."""
    return learner.state.masters, {"optimizer": learner.state.opt_state}


def saved_data(learner: Learner) -> dict[str, Any]:
    """Returns what a checkpoint keeps beside the ledger, in values that JSON holds.

    Of the gate and of scales, where the algorithm has them.
    """
    plan, found = learner.plan, {}
    if plan.entropy_high:
        found[GATE] = sorted(learner.gate)
    if plan.remembers:
        found[SCALES] = {"advantage": plan.advantage, "kinds": dict(learner.scales)}
    return found


def restore_target(learner: Learner) -> tuple[Any, Any]:
    """Returns shapes, dtypes and places of (params, opt) for `Checkpoints.restore`."""
    params, opt = saved(learner)
    return abstract(params), abstract(opt)


def resume(learner: Learner, saved: Saved) -> None:
    """Puts the learner where a checkpoint left it."""
    learner.state = TrainState(
        step=place.commit(np.int32(saved.meta["optimizer_steps"]), learner.state.step.sharding),
        masters=saved.params,
        opt_state=saved.opt["optimizer"],
    )
    data = saved.data or {}
    learner.gate = frozenset(data.get(GATE, ()))
    scales = data.get(SCALES, {}) if learner.plan.remembers else {}
    if scales.get("advantage") == learner.plan.advantage:  # another's are in other units
        learner.scales = {kind: tuple(moments) for kind, moments in scales["kinds"].items()}


def _cast_copy(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), tree)
