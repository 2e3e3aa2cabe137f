"""QwenLong-L1.5: rewards over the spread of their task in the batch.

    notepad-jax train --recipe qwenlong

Shen et al. 2025 (arXiv 2512.12967), eq. 7. Its batches have equal numbers of each kind of task
(`tasks.balanced`, for a `rollout.documents` that they divide), and its entropy gate is
`grpo.entropy_high` and `entropy_low`; the bounds are yours to choose. Measured here: as
`dr_grpo` within a point, on a mix of four rewards (docs/results.md).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.grpo.update(
        advantage="task_std",
        normaliser="token_mean",
        ratio="ppo_clip",
        clip_low=0.2,
        clip_high=0.2,
        kl_weight=0.0,
    )
