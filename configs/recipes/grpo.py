"""GRPO as it was first published: rewards over the spread of their group, a mean of answers.

    notepad-jax train --recipe grpo

DeepSeekMath, Shao et al. 2024 (arXiv 2402.03300): one optimizer step a rollout, KL of 0.04.
Measured here: on config `mix` 6 points behind at eight times the length, one seed; the KL is to a
policy with bad habits (docs/results.md).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.grpo.update(
        advantage="grpo",
        normaliser="trajectory_mean",
        ratio="ppo_clip",
        clip_low=0.2,
        clip_high=0.2,
        kl="k3",
        kl_in="loss",
        kl_weight=0.04,
        minibatches=1,
    )
