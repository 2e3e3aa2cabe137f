"""QwenLong-L1.5: rewards over the spread of their task in the batch.

    notepad-jax train --recipe qwenlong

Shen et al. 2025 (arXiv 2512.12967), of which the paper and pieces of code were released, and no
launcher. It takes one update a rollout, so nothing is clipped, and divides by the tokens of a
question's group, in so many words (DAPO, which it names, has the same formula and code that
divides by a batch's). Its batches have equal numbers of each kind of task (`tasks.balanced`, for a
`rollout.documents` that they divide), and its entropy gate is `grpo.entropy_high` and
`entropy_low`; the bounds it does not say, so they are yours. Measured here: as `dr_grpo`,
within the spread of three seeds, on a mix of four rewards (docs/results.md).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

PAPER = "arXiv:2512.12967"
QWEN = "Tongyi-Zhiwen/Qwen-Doc@12489b077ecdd98cf4457eef7ef7ba6f11eebf0f:QwenLong-L1.5/README.md"

SAID = {
    "grpo.advantage": Said("task_std", f"{QWEN}#319 task2std"),
    "grpo.normaliser": Said("prompt_mean", f"{PAPER}, eq. 4"),
    "grpo.ratio": Said("ppo_clip", f"{PAPER}, eq. 2"),
    "grpo.kl_weight": Said(0.0, f"{PAPER}, section 2.2"),
    "grpo.minibatches": Said(1, f"{PAPER}, section 2.2"),
    "grpo.epochs": Said(1, f"{PAPER}, section 2.2"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
