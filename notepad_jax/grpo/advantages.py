"""Advantages: from the rewards of a batch to one per trajectory, by a baseline and a scale.

Statistics are taken over trajectories, never over turns: a reading of a long document has
more turns, and must not weigh more in its own baseline. The baseline is always of the group;
the scale is of the group, of the batch, or of all groups of one kind in it, so an advantage is
a function of a whole batch; or of several, where `remembered` scales are given instead of the
batch's own. A group whose rewards are all equal gets exactly 0 and is in no scale. All turns of a
trajectory have its advantage, unless their memories earn something, too (`of_turns`: turn-level
advantages); `batch` (beside) gives a turn's to each of its completion tokens. Turns that were
written again beside their group (`local`) have a baseline of their own.
Pure numpy; formulas and papers: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from notepad_jax import near
from notepad_jax.types import Group, TurnKind

Advantage = Callable[..., list[np.ndarray]]  # of groups (and scales): float64 [G] for each
Kind = Callable[[Group], str]
Moments = tuple[float, float]  # squares summed up, and what their sum is divided by
Scales = Mapping[str, Moments]  # of each kind of task; the root of the quotient is its scale

EPS = 1e-6
KEPT, SHARPNESS = 0.8, 1.0  # of TMN-Reweight: a and g of its paper


# ---------------------------------------------------------------- baselines, of a group


def centred(rewards_G: np.ndarray) -> np.ndarray:
    """R - mean of the group, float64 [G]; exactly 0 where all rewards are equal."""
    rewards_G = np.asarray(rewards_G, np.float64)
    return rewards_G - rewards_G.mean() if informative(rewards_G) else np.zeros_like(rewards_G)


def informative(rewards_G: np.ndarray) -> bool:
    """Whether a group's rewards carry signal: False when all are equal.

    Raises ValueError for a group of one, and for rewards that are not finite.
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(
            f"a group has {rewards_G.size} trajectory; a baseline over a group needs at least 2: "
            "raise the number of samples per task"
        )
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards {rewards_G.tolist()} are not all finite; mend the scoring")
    return bool(rewards_G.max() > rewards_G.min())


def standardised(rewards_G: np.ndarray) -> np.ndarray:
    """(R - mean) / (std + 1e-6), Bessel-corrected std."""
    return centred(rewards_G) / (rewards_G.std(ddof=1) + EPS)


def leaving_out(rewards_G: np.ndarray) -> np.ndarray:
    """R minus the mean of the others."""
    # R - (sum - R) / (G - 1) = (R - mean) G / (G - 1)
    return centred(rewards_G) * len(rewards_G) / max(len(rewards_G) - 1, 1)


# ---------------------------------------------------------------- advantages


def dr_grpo(groups: Sequence[Group]) -> list[np.ndarray]:
    """R - mean of the group (Dr. GRPO, Liu et al. 2025; the memory-agent reference)."""
    return [centred(group.rewards) for group in groups]


def grpo(groups: Sequence[Group]) -> list[np.ndarray]:
    """(R - mean) / (std + 1e-6), Bessel-corrected std (GRPO, Shao et al. 2024)."""
    return [standardised(group.rewards) for group in groups]


def rloo(groups: Sequence[Group]) -> list[np.ndarray]:
    """R minus the mean of the others (leave-one-out, Ahmadian et al. 2024)."""
    return [leaving_out(group.rewards) for group in groups]


def batch_std(groups: Sequence[Group], scales: Scales | None = None) -> list[np.ndarray]:
    """(R - mean of the group) / std of these over the batch (Magistral 2025; ScaleRL 2025)."""
    return _scaled("batch_std", groups, scales)


def task_std(groups: Sequence[Group], scales: Scales | None = None) -> list[np.ndarray]:
    """(R - mean) / std of all rewards of the task's source in the batch (QwenLong-L1.5, eq. 7)."""
    return _scaled("task_std", groups, scales)


def tmn(groups: Sequence[Group], scales: Scales | None = None) -> list[np.ndarray]:
    """(R - mean) / (S_k + 1e-6): Task-Mixed Normalisation (GoLongRL).

    S_k is the root of the mean, over the prompts of reward type k, of the Bessel-corrected
    variance within the prompt's group. The reward type is the task's metric.
    """
    return _scaled("tmn", groups, scales)


def tmn_reweight(groups: Sequence[Group], scales: Scales | None = None) -> list[np.ndarray]:
    """`tmn` times a weight of the prompt's difficulty (GoLongRL's TMN-Reweight).

    m = a mean_x + (1 - a) M_k with M_k the mean of mean_x over type k; p the share of the group
    with R > m. What is better than its group weighs exp(g (0.5 - p)), the rest exp(g (p - 0.5)):
    rare success and rare failure count for more.
    """
    means: dict[str, list[float]] = {}
    for group in groups:
        means.setdefault(reward_type(group), []).append(group.rewards.mean())

    def weighted(group: Group, advantage_G: np.ndarray) -> np.ndarray:
        r, mean = group.rewards, group.rewards.mean()
        m = KEPT * mean + (1 - KEPT) * np.mean(means[reward_type(group)])
        hard = SHARPNESS * (0.5 - np.mean(r > m))
        return advantage_G * np.where(r > mean, np.exp(hard), np.exp(-hard))

    return [weighted(*pair) for pair in zip(groups, tmn(groups, scales), strict=True)]


def imitation(groups: Sequence[Group]) -> list[np.ndarray]:
    """R, without a baseline: only success is learnt from (rejection sampling, a teacher)."""
    return [group.rewards for group in groups]


def local(name: str, scores_M: np.ndarray, weight: float) -> np.ndarray:
    """The advantage `name` of one turn's completions among themselves, times `weight`, float64 [M].

    A set is a group of its own (LoGo-GRPO, Memory-R2 2026). Scales of several groups are of
    readings, so with an advantage that has one, scores are centred alone.
    """
    return weight * WITHIN.get(name, centred)(scores_M)


WITHIN = {"dr_grpo": centred, "grpo": standardised, "rloo": leaving_out}  # of one group alone


ADVANTAGES: dict[str, Advantage] = {
    one.__name__: one
    for one in (dr_grpo, grpo, rloo, batch_std, task_std, tmn, tmn_reweight, imitation)
}


def of_groups(name: str, groups: Sequence[Group], scales: Scales | None = None) -> list[np.ndarray]:
    """Returns advantages [G] for each group, by the function called `name` in ADVANTAGES.

    `scales` are those of an advantage of SCALES, instead of the batch's own (`remembered`).
    """
    advantage = near.named("advantage", ADVANTAGES, name)
    return advantage(groups) if scales is None else advantage(groups, scales)


def of_turns(
    group: Group, advantages_G: np.ndarray, name: str = dr_grpo.__name__, weight: float = 1.0
) -> list[np.ndarray]:
    """Returns each trajectory's advantages, [turns]: its own, the same for all of its turns.

    Where memories earn something by themselves, an update turn has in addition `weight` times the
    advantage `name` of what its memory is worth, among the group's turns at the same place of the
    reading: round, level, unit. A turn that no other member has made is compared with nothing, and
    has its trajectory's. Raises ValueError for rewards that are not one an update turn.
    """
    members = group.trajectories
    found = [np.full(len(m.turns), a) for m, a in zip(members, advantages_G, strict=True)]
    if not any(member.memory_rewards for member in members):
        return found
    for at in _places(group).values():
        worth_M = np.array([worth for _, _, worth in at], np.float64)
        if len(at) > 1:
            own_M = weight * WITHIN.get(name, centred)(worth_M)
            for (member, turn, _), own in zip(at, own_M, strict=True):
                found[member][turn] += own
    return found


def _places(group: Group) -> dict[tuple[int, int, int], list[tuple[int, int, float]]]:
    """Gathers (member, turn, worth of its memory) of a group's update turns by their place."""
    places: dict[tuple[int, int, int], list[tuple[int, int, float]]] = {}
    for member, one in enumerate(group.trajectories):
        updates = [k for k, turn in enumerate(one.turns) if turn.kind is TurnKind.UPDATE]
        if len(updates) != len(one.memory_rewards):
            raise ValueError(
                f"task {group.task.id!r}: {len(one.memory_rewards)} rewards of memories for "
                f"{len(updates)} update turns; give one for each"
            )
        for k, worth in zip(updates, one.memory_rewards, strict=True):
            places.setdefault(one.turns[k].place, []).append((member, k, worth))
    return places


# ---------------------------------------------------------------- scales


def source(group: Group) -> str:
    """The kind of a group's task by where it comes from."""
    return group.task.source


def reward_type(group: Group) -> str:
    """TMN's reward type of a group: the metric that scores the task."""
    return group.task.metric


# Whose scale is of one kind of task: where there is one kind alone, it is a batch's.
BY_KIND: dict[str, Kind] = {"task_std": source, "tmn": reward_type, "tmn_reweight": reward_type}


def remembered(name: str, groups: Sequence[Group], before: Scales, decay: float) -> Scales:
    """Returns the scales of advantage `name` after another batch; pure.

    Of a kind that is in the batch, what was known counts `decay` times what it did, so a kind of
    two groups is scaled by those of earlier batches, too, each by its number; a kind that is not
    there stays as it is. Groups whose rewards are all equal are in none. With `before` empty, or
    a decay of 0, these are the batch's own scales.
    """
    kind, moments = SCALES[name]
    of_kind: dict[str, list[np.ndarray]] = {}
    for group in groups:
        if informative(group.rewards):
            of_kind.setdefault(kind(group), []).append(group.rewards)
    after = dict(before)
    for one, rewards in of_kind.items():
        squares, count = before.get(one, (0.0, 0.0))
        more, number = moments(rewards)
        after[one] = (decay * squares + more, decay * count + number)
    return after


def _scaled(name: str, groups: Sequence[Group], scales: Scales | None) -> list[np.ndarray]:
    """Centred rewards over the scale of their kind; the batch's own scales where none are given."""
    kind, _ = SCALES[name]
    if scales is None:
        scales = remembered(name, groups, {}, 0.0)
    by = {one: float(np.sqrt(squares / count)) + EPS for one, (squares, count) in scales.items()}
    return [centred(group.rewards) / by.get(kind(group), 1.0) for group in groups]


def _of_centred(rewards: list[np.ndarray]) -> Moments:
    return _around_mean(np.concatenate([centred(r) for r in rewards]))


def _of_rewards(rewards: list[np.ndarray]) -> Moments:
    return _around_mean(np.concatenate(rewards))


def _around_mean(values: np.ndarray) -> Moments:
    return float(((values - values.mean()) ** 2).sum()), float(len(values) - 1)


def _within_groups(rewards: list[np.ndarray]) -> Moments:
    return float(np.sum([r.var(ddof=1) for r in rewards])), float(len(rewards))


# Whose scale is of more than one group: of which kind of task, and by what.
SCALES: dict[str, tuple[Kind, Callable[[list[np.ndarray]], Moments]]] = {
    "batch_std": (lambda group: "batch", _of_centred),
    "task_std": (source, _of_rewards),
    "tmn": (reward_type, _within_groups),
    "tmn_reweight": (reward_type, _within_groups),
}
