"""The published memory agents: the group's mean as baseline, and a pull to the start.

    notepad-jax train --recipe memagent --config.grpo.minibatches=4

MemAgent, Yu et al. 2025 (arXiv 2507.02259), in its last published form: no division by the
spread of a group. The whole of it, with lengths, batch and optimizer, is config memagent.
Measured here: as `dr_grpo` without a KL (docs/results.md, config `mix`).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.grpo.update(
        advantage="dr_grpo",
        normaliser="token_mean",
        ratio="ppo_clip",
        clip_low=0.2,
        clip_high=0.2,
        kl="k3",
        kl_in="loss",
        kl_weight=1e-3,  # needs the starting policy beside the trained one
        minibatches=16,
    )
