"""The published memory agents: the group's mean as baseline, and a pull to the start.

    notepad-jax train --recipe memagent --config.grpo.minibatches=4

MemAgent, Yu et al. 2025 (arXiv 2507.02259), as its released launcher has it: no division by the
spread of a group. Its token mean is each device's, averaged; ours is over the whole step. The
whole of it, with lengths, batch and optimizer, is config memagent. Measured here: as `dr_grpo`
without a KL, within the spread of three seeds (docs/results.md, config `mix`).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

MEMAGENT = "BytedTsinghua-SIA/MemAgent@76b7a658988e4ea53d7388a62de6c0ce79084146"
RUN, USUAL = f"{MEMAGENT}:run_memory_7B.sh", f"{MEMAGENT}:verl/trainer/config/ppo_trainer.yaml"

SAID = {
    "grpo.advantage": Said("dr_grpo", f"{RUN}#26 grpo_use_adv"),
    "grpo.normaliser": Said("token_mean", f"{USUAL}#46 loss_agg_mode"),
    "grpo.ratio": Said("ppo_clip", f"{MEMAGENT}:verl/trainer/ppo/core_algos.py#419 clamp"),
    "grpo.clip_low": Said(0.2, f"{USUAL}#43 clip_ratio_low"),
    "grpo.clip_high": Said(0.2, f"{RUN}#32 clip_ratio_high"),
    "grpo.dual_clip": Said(3.0, f"{USUAL}#45 clip_ratio_c"),
    "grpo.kl": Said("k3", f"{RUN}#55 kl_loss_type"),
    "grpo.kl_in": Said("loss", f"{RUN}#53 use_kl_loss"),
    "grpo.kl_weight": Said(1e-3, f"{RUN}#54 kl_loss_coef"),  # needs the starting policy in memory
    "grpo.entropy_weight": Said(0.0, f"{RUN}#33 entropy_coeff"),
    "grpo.minibatches": Said(128 // 8, f"{RUN}#38,47 train_batch_size ppo_mini_batch_size"),
    "grpo.epochs": Said(1, f"{USUAL}#52 ppo_epochs"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
