"""LoGo-GRPO: of some groups one memory is written again four times, and the four are compared.

    notepad-jax train --recipe logo

Memory-R2 (arXiv 2605.21768), as the launcher that its README calls the paper's has it; a second
one, for single stages, has KL of 0.001 and a share of 0.5. A turn's ratio is the geometric mean
over its tokens, clipped twice, and the loss a mean over turns. No local weight is in the paper's
code: the sets of memories are groups like any other, which is weight 1. It found that its
curriculum on chunks did more: add `--config.tasks.curriculum=4@0,8@50,16@100`, in steps of your
own. Not taken: a reward for each session (ours: one question a document), a penalty for the size
of the memory over what was read (0.2 in the launcher, 0.3 in README and paper: their memory has no
limit, ours `reading.max_memory`), its share of sessions (here at most one turn a group), its mean
of KL and entropy over tokens (here weighed as the rest of the loss), and the parts of a rollout,
which follow from its sessions. Measured here: no gain beyond the spread of seeds on config
`mix` (docs/results.md).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

R2 = "ahmedehabb/Memory-R2@357b4ecc9ea643e0825bbfbb8c9e6607eb48e855"
RUN = f"{R2}:scripts/examples/_curriculum_learning.sh"
TRAINER = f"{R2}:src/verl/verl/rema_trainer"

SAID = {
    "rollout.local.samples": Said(4, f"{RUN}#115 inner_n"),
    "rollout.local.share": Said(0.25, f"{RUN}#93 INNER_GPRO_FRAC"),
    "rollout.local.weight": Said(1.0, f"{TRAINER}/ppo/ray_trainer.py#2632 evaluated_inner_batches"),
    "grpo.advantage": Said("grpo", f"{RUN}#50 algorithm"),
    "grpo.normaliser": Said("turn_mean", f"{RUN}#155 agg_mode"),
    "grpo.ratio": Said("gspo", f"{RUN}#154 clip_mode"),
    "grpo.clip_low": Said(0.2, f"{RUN}#66 CLIP_RATIO"),
    "grpo.clip_high": Said(0.2, f"{RUN}#66 CLIP_RATIO"),
    "grpo.dual_clip": Said(3.0, f"{TRAINER}/config/ppo_trainer.yaml#40 clip_ratio_c"),
    "grpo.kl": Said("k3", f"{RUN}#144 kl_loss_type"),
    "grpo.kl_in": Said("loss", f"{RUN}#54 use_kl_loss"),
    "grpo.kl_weight": Said(0.01, f"{RUN}#55 kl_loss_coef"),
    "grpo.entropy_weight": Said(0.001, f"{RUN}#149 entropy_coeff"),
    "grpo.epochs": Said(2, f"{RUN}#63 PPO_EPOCHS"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
