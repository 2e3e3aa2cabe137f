"""From the rewards of a batch to one advantage per trajectory.

Statistics are taken over trajectories, never over turns: a reading of a long document has
more turns, and must not weigh more in its own baseline. An advantage sees the whole batch,
because some scale by what other groups did; those here look at one group at a time
(`of_each`), and are functions of its rewards [G]. `batch` (beside) gives a trajectory's
advantage unchanged to every completion token of every one of its turns. Pure numpy.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

import numpy as np

from notepad_jax.types import Group

Advantage = Callable[[Sequence[Group]], list[np.ndarray]]  # float64 [G] for each group


def _informative(rewards_G: np.ndarray) -> bool:
    """Checks the group; False when all rewards are equal, where every advantage is exactly 0."""
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(
            f"a group has {rewards_G.size} trajectory; a baseline over a group needs at least 2: "
            "raise the number of samples per task"
        )
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards {rewards_G.tolist()} are not all finite; mend the scoring")
    return bool(rewards_G.max() > rewards_G.min())


def dr_grpo(rewards_G: np.ndarray) -> np.ndarray:
    """R - mean of the group (Dr. GRPO, Liu et al. 2025; the memory-agent reference)."""
    rewards_G = np.asarray(rewards_G, np.float64)
    if not _informative(rewards_G):
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def grpo(rewards_G: np.ndarray) -> np.ndarray:
    """(R - mean) / (std + 1e-6), Bessel-corrected std (GRPO, Shao et al. 2024)."""
    rewards_G = np.asarray(rewards_G, np.float64)
    if not _informative(rewards_G):
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + 1e-6)


def rloo(rewards_G: np.ndarray) -> np.ndarray:
    """R minus the mean of the others (leave-one-out, Ahmadian et al. 2024)."""
    rewards_G = np.asarray(rewards_G, np.float64)
    if not _informative(rewards_G):
        return np.zeros_like(rewards_G)
    others = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
    return rewards_G - others


def of_each(function: Callable[[np.ndarray], np.ndarray]) -> Advantage:
    """Returns the advantage that looks at each group alone."""
    return lambda groups: [function(group.rewards) for group in groups]


ADVANTAGES: dict[str, Advantage] = {
    "dr_grpo": of_each(dr_grpo),
    "grpo": of_each(grpo),
    "rloo": of_each(rloo),
}


def of_groups(name: str, groups: Sequence[Group]) -> list[np.ndarray]:
    """Returns advantages [G] for each group, by the function called `name` in ADVANTAGES."""
    if name not in ADVANTAGES:
        near = difflib.get_close_matches(name, ADVANTAGES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no advantage is called {name!r}; {hint}known: {', '.join(ADVANTAGES)}")
    return ADVANTAGES[name](groups)
