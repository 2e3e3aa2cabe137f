"""ScaleRL: a capped weight instead of a clip, the batch's spread, a mean over questions.

    notepad-jax train --recipe scalerl --config.grpo.minibatches=4

Khatri et al. 2025 (arXiv 2510.13786): CISPO (MiniMax-M1, arXiv 2506.13585) with caps of 4 to 8.
Its data are some steps old; here several optimizer steps a rollout let the cap act. Questions
that are answered well are drawn no more. Measured here: as `dr_grpo` within a point
(docs/results.md, config `mix`).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.tasks.retire_at = 0.9
    config.grpo.update(
        advantage="batch_std",
        normaliser="prompt_mean",
        ratio="cispo",
        cap=4.0,
        kl_weight=0.0,
    )
