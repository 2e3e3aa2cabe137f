"""Metrics of credit: the share of a rollout's advantage that each kind of task and turn has.

Taken from the batches as they are learnt from, so that scales, normaliser, masks and gates are in
it: a kind of task with a large share pulls the policy its way, and one with none is not trained,
whatever its reward is. Pure numpy. Above: setup.learner; beside: `batch`, which makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from notepad_jax.grpo import advantages, ratios
from notepad_jax.types import Group, TrainBatch


def metrics(
    batches: Sequence[TrainBatch | None], parts: Sequence[Sequence[Group]], named: Mapping[str, str]
) -> dict[str, float]:
    """Returns shares of sum(weight x |advantage|) / denominator over all optimizer steps.

    `parts` are the groups of each batch (None: a gate left nothing of it), and `named` says what a
    task's source is called.
    `advantage_share_update` is that of the memories' tokens; each kind of task with a group here
    has its `task/NAME/advantage_share`. Nothing where no token has an advantage.
    """
    of_task = dict.fromkeys((named[g.task.source] for part in parts for g in part), 0.0)
    whole = updates = 0.0
    for one, groups in zip(batches, parts, strict=True):
        if one is None:
            continue
        on_BT = one.weights > 0
        mass_N = (one.weights * np.abs(one.advantages))[on_BT].astype(np.float64) / one.denominator
        whole += mass_N.sum()
        updates += mass_N[one.update_turn[on_BT] > 0].sum()
        of_group = np.bincount(one.prompt[on_BT], mass_N, minlength=len(groups))
        for group, mass in zip(groups, of_group, strict=True):
            of_task[named[group.task.source]] += mass
    if not 0 < whole < np.inf:
        return {}
    shares = {f"task/{name}/advantage_share": of_task[name] / whole for name in sorted(of_task)}
    return {"advantage_share_update": updates / whole} | shares


def turn_level(
    groups: Sequence[Group], advantages_G: Sequence[np.ndarray], name: str, weight: float
) -> dict[str, float]:
    """Returns metrics of turn-level advantages, which update turns have beside trajectories'.

    `turn_advantage` is its mean size, and `turn_advantage_share` its share of the sizes of both.
    Nothing where memories earn nothing. Arguments are those of `advantages.of_turns`.
    """
    if not any(one.memory_rewards for group in groups for one in group.trajectories):
        return {}
    own = outcome = turns = 0.0
    for group, its_G in zip(groups, advantages_G, strict=True):
        alone = advantages.of_turns(group, np.zeros(len(its_G)), name, weight)
        counts_G = np.array([len(one.memory_rewards) for one in group.trajectories])
        own += sum(np.abs(one).sum() for one in alone)
        outcome += (np.abs(its_G) * counts_G).sum()
        turns += counts_G.sum()
    share = own / (own + outcome) if own else 0.0
    return {"turn_advantage": own / max(1, turns), "turn_advantage_share": share}


def effective_share(made: Sequence[TrainBatch]) -> float:
    """Effective sample size of turns weighed by proximal / behaviour, over their number.

    (sum w)^2 / (n sum w^2), w of a turn the product over its tokens: 1 where the sampler
    computes as the trainer does, 1 / n where one turn outweighs all others.
    """
    log_w = np.concatenate([_log_weights(one) for one in made])
    w = np.exp(np.clip(log_w - log_w.max(), -ratios.MAX_LOG_RATIO, 0))
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def _log_weights(one: TrainBatch) -> np.ndarray:
    on_BT = one.weights > 0
    far = (one.proximal_logprobs - one.behaviour_logprobs)[on_BT]
    _, turn_N = np.unique(one.turn[on_BT], return_inverse=True)
    return np.bincount(turn_N, far)
