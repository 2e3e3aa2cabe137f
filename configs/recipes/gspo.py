"""GSPO: one ratio and one clip for a whole turn, the geometric mean over its tokens.

    notepad-jax train --recipe gspo

Zheng et al. 2025 (arXiv 2507.18071): its formulas, and the constants of its section 5.1 as verl's
example has them. Measured here: on config `mix` with so narrow a clip it learns more slowly at
each of three rates (docs/results.md).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

VERL = "volcengine/verl@b178a3cd56f58b2d502255daba591e92833930a7"
RUN, CORE = f"{VERL}:examples/gspo_trainer/test_gspo_3b_math.sh", "verl/trainer/ppo/core_algos.py"

SAID = {
    "grpo.advantage": Said("grpo", f"{RUN}#44 adv_estimator"),
    "grpo.normaliser": Said("turn_mean", f"{RUN}#46 loss_agg_mode"),
    "grpo.ratio": Said("gspo", f"{RUN}#45 loss_mode"),
    "grpo.clip_low": Said(0.0003, f"{RUN}#72 clip_ratio_low"),
    "grpo.clip_high": Said(0.0004, f"{RUN}#73 clip_ratio_high"),
    "grpo.dual_clip": Said(0.0, f"{VERL}:{CORE}#1305 pg_losses"),
    "grpo.kl_weight": Said(0.0, f"{RUN}#70 kl_loss_coef"),
    "grpo.minibatches": Said(512 // 128, f"{RUN}#74,75 train_batch_size ppo_mini_batch_size"),
    "grpo.epochs": Said(1, f"{VERL}:verl/trainer/config/actor/actor.yaml#111 ppo_epochs"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
