"""ScaleRL: a capped weight instead of a clip, the batch's spread, a mean over questions.

    notepad-jax train --recipe scalerl --config.grpo.minibatches=4

Khatri et al. 2025 (arXiv 2510.13786), whose trainer was not released: CISPO (MiniMax-M1, arXiv
2506.13585). It tried caps of 4, 5 and 8 without a difference and names none as its own; 5 is that
of TRL's account of it. Groups that teach nothing are dropped and not replaced, and questions that
are answered well are drawn no more. Its data are some steps old; here several optimizer steps a
rollout let the cap act. Measured here: as `dr_grpo`, within
the spread of three seeds, for three quarters of the CPU seconds (docs/results.md, config `mix`).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

PAPER = "arXiv:2510.13786"
TRL = "huggingface/trl@f2cd57710ae345ea6428ae95363267fcf38a3dc8:docs/source/paper_index.md"

SAID = {
    "grpo.advantage": Said("batch_std", f"{PAPER}, section 3.2, advantage normalization"),
    "grpo.normaliser": Said("prompt_mean", f"{PAPER}, section 3.2, loss aggregation"),
    "grpo.ratio": Said("cispo", f"{PAPER}, eq. 4"),
    "grpo.cap": Said(5.0, f"{TRL}#494 epsilon_high"),
    "grpo.kl_weight": Said(0.0, f"{PAPER}, section 2"),
    "rollout.max_rounds": Said(1, f"{PAPER}, section 3.2, zero-variance filtering"),
    "tasks.retire_at": Said(0.9, f"{PAPER}, section 3.2, adaptive prompt filtering"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
