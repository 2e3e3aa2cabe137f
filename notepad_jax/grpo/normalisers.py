"""Loss normalisers: the weight of each token's loss, and the denominator of their sum.

The loss of a step is sum(weight * loss of a token) / denominator, over all rows, micro-batches
and hosts, divided once. A normaliser chooses these two from which turn, trajectory and prompt
each completion token is of. All but `turn_mean` leave the loss as it is if a completion is
split into more turns. Pure numpy; `batch` calls it. Formulas and papers: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from notepad_jax import near

# Ids [N] of each token's turn, trajectory and prompt, and the constant, to weights [N] and what
# their sum is divided by.
Normaliser = Callable[[np.ndarray, np.ndarray, np.ndarray, float], tuple[np.ndarray, float]]


def token_mean(turn_N, trajectory_N, prompt_N, constant) -> tuple[np.ndarray, float]:
    """The mean over all tokens (DAPO, Yu et al. 2025): long completions count for more."""
    return np.ones(len(turn_N)), float(len(turn_N))


def turn_mean(turn_N, trajectory_N, prompt_N, constant) -> tuple[np.ndarray, float]:
    """A mean over turns of the mean of each: a context is a sample (GSPO on turns)."""
    return _mean_of(turn_N)


def trajectory_mean(turn_N, trajectory_N, prompt_N, constant) -> tuple[np.ndarray, float]:
    """A mean over trajectories of the mean of each (GRPO; Delethink, over all its chunks)."""
    return _mean_of(trajectory_N)


def prompt_mean(turn_N, trajectory_N, prompt_N, constant) -> tuple[np.ndarray, float]:
    """A mean over prompts of the token mean within the prompt's group (ScaleRL)."""
    return _mean_of(prompt_N)


def constant(turn_N, trajectory_N, prompt_N, constant) -> tuple[np.ndarray, float]:
    """Summed tokens over `constant` for each trajectory, however long it is (Dr. GRPO)."""
    return np.ones(len(turn_N)), constant * len(np.unique(trajectory_N))


NORMALISERS: dict[str, Normaliser] = {
    one.__name__: one for one in (token_mean, turn_mean, trajectory_mean, prompt_mean, constant)
}


def named(name: str) -> Normaliser:
    """Returns the normaliser called `name`; ValueError, naming its neighbour, if there is none."""
    return near.named("normaliser", NORMALISERS, name)


def _mean_of(ids_N: np.ndarray) -> tuple[np.ndarray, float]:
    _, which_N, count = np.unique(ids_N, return_inverse=True, return_counts=True)
    return 1.0 / count[which_N], float(len(count))
