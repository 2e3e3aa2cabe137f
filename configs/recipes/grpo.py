"""GRPO as it was first published: rewards over the spread of their group, a mean of answers.

    notepad-jax train --recipe grpo

DeepSeekMath, Shao et al. 2024 (arXiv 2402.03300), whose code was not released. It clips ratios and
never says by how much, so the clips stay the config's; with its single update a rollout no ratio
leaves 1. Measured here: on config `mix` 5 points behind the same without its KL at eight times the
length; it is to a policy with bad habits (docs/results.md).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

PAPER = "arXiv:2402.03300"

SAID = {
    "grpo.advantage": Said("grpo", f"{PAPER}, section 4.1.2"),
    "grpo.normaliser": Said("trajectory_mean", f"{PAPER}, eq. 3"),
    "grpo.ratio": Said("ppo_clip", f"{PAPER}, eq. 3"),
    "grpo.dual_clip": Said(0.0, f"{PAPER}, eq. 3, which has none"),
    "grpo.kl": Said("k3", f"{PAPER}, eq. 4"),
    "grpo.kl_in": Said("loss", f"{PAPER}, eq. 3"),
    "grpo.kl_weight": Said(0.04, f"{PAPER}, section 4.2"),
    "grpo.minibatches": Said(1, f"{PAPER}, section 4.2"),
    "grpo.epochs": Said(1, f"{PAPER}, section 4.2"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
