"""Dr. GRPO: no division by a spread and none by a length, both of which bias what is learnt.

    notepad-jax train --recipe dr_grpo --config.grpo.minibatches=4

Liu et al. 2025 (arXiv 2503.20783) and its released code: the denominator is what an answer may
have in tokens, here what a trajectory may: all its memories and the answer (of files, name
`tasks.max_tokens`, or `data.tokens` stands for it). It learns from a rollout of 128 questions,
read 8 times each, in batches of 128 answers. No KL and no dual clip. Measured here: as `dr_grpo`
with `token_mean` and one update (docs/results.md, config `mix`).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

ZERO = "sail-sg/understand-r1-zero@dfca49dd460ee7cc8e4a5a162c876a7fd6993b87"
RUN = f"{ZERO}:examples/qwen2.5-math-7b.sh"
OAT = "sail-sg/oat@c1a074c320ff5ca9fe9a4f669bf05208e2f310be:oat/algorithms/ppo.py"

SAID = {
    "grpo.advantage": Said("dr_grpo", f"{RUN}#20 critic_type"),
    "grpo.normaliser": Said("constant", f"{ZERO}:train_zero_math.py#288 constant_normalizer"),
    "grpo.constant": Said(None, f"{RUN}#51 generate_max_length"),
    "grpo.ratio": Said("ppo_clip", f"{OAT}#532,533 clamp ratio"),
    "grpo.clip_low": Said(0.2, "arXiv:2503.20783, table 6, policy clipping parameter"),
    "grpo.clip_high": Said(0.2, "arXiv:2503.20783, table 6, policy clipping parameter"),
    "grpo.dual_clip": Said(0.0, f"{OAT}#535 pg_loss_max"),
    "grpo.kl_weight": Said(0.0, f"{RUN}#33 beta"),
    "grpo.minibatches": Said(
        128 * 8 // 128, f"{RUN}#55,48,53 rollout_batch_size num_samples train_batch_size"
    ),
    "grpo.epochs": Said(1, f"{RUN}#32 num_ppo_epochs"),
}  # fmt: skip


def apply(config: ConfigDict) -> None:
    put(config, SAID)
    reading = config.reading
    document = (config.tasks.max_tokens if config.tasks.files else 0) or config.data.tokens
    turns = -(-document // reading.chunk_size)
    more = (reading.answer_chunks - 1) * (reading.max_answer - reading.carry)
    config.grpo.constant = float(turns * reading.max_memory + reading.max_answer + more)
