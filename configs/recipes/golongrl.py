"""GoLongRL: each kind of reward has a scale of its own, and what is rare weighs more.

    notepad-jax train --recipe golongrl --config chat --config.policy=path/to/model \
        --config.tasks.files=golongrl.jsonl

TMN-Reweight (arXiv 2605.19577) as its launcher has it, for training on nine kinds of reward at
once; `notepad-jax build golongrl` converts their rows. Each answer is judged by its task's own
metric, which is its reward type, and groups are filtered by that score. The launcher corrects for
the sampler in the words of verl 21271aabb (verl/trainer/ppo/mismatch_helper.py#187-211), where
mode `clip` weighs what is outside of its bounds with 0; the trainer that was released beside it
reads none of these keys. Taken is what was launched, a turn being the sequence that is vetoed.
Measured here: on config `mix` the best at eight times the length, for 4.5 times the CPU seconds
(docs/results.md).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

GOLONG = "xiaoxuanNLP/GoLongRL@c34dba310edd0b89a408c0afe533e05ed392551a"
RUN = f"{GOLONG}:Train/verl/examples/GoLongRL/qwen3-4B-tmn-reweight.sh"

SAID = {
    "grpo.advantage": Said("tmn_reweight", f"{RUN}#62,66 adv_estimator difficulty_reweight"),
    "grpo.normaliser": Said("token_mean", f"{RUN}#101 loss_agg_mode"),
    "grpo.ratio": Said("ppo_clip", f"{RUN}#64 loss_mode"),
    "grpo.clip_low": Said(0.2, f"{RUN}#74 clip_ratio_low"),
    "grpo.clip_high": Said(0.28, f"{RUN}#75 clip_ratio_high"),
    "grpo.dual_clip": Said(3.0, f"{RUN}#205 clip_ratio_c"),
    "grpo.tis_cap": Said(5.0, f"{RUN}#95 rollout_is_threshold"),
    "grpo.tis_low": Said(0.5, f"{RUN}#96 rollout_is_threshold_lower"),
    "grpo.tis_veto": Said(1e-4, f"{RUN}#99 rollout_is_veto_threshold"),
    "grpo.kl_weight": Said(0.0, f"{RUN}#72 kl_loss_coef"),
    "grpo.entropy_weight": Said(0.0, f"{RUN}#210 entropy_coeff"),
    "grpo.minibatches": Said(128 // 128, f"{RUN}#81,84 train_prompt_bsz train_prompt_mini_bsz"),
    "grpo.epochs": Said(1, f"{RUN}#217 ppo_epochs"),
    "grpo.overlong_window": Said(0, f"{RUN}#114 enable_overlong_buffer"),
    "rollout.max_rounds": Said(32, f"{RUN}#79 max_num_gen_batches"),
    "tasks.reward": Said("", f"{GOLONG}:README.md#47 natural evaluation metric"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
