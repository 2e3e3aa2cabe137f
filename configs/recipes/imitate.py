"""Imitation: a teacher's turns are learnt as they are, before reinforcement learning begins.

    notepad-jax train --config smollm --recipe imitate

Supervised learning through the rows, kernels and masters of GRPO: advantage 1 for what is right, no
ratio, a group of one reading. The teacher is the script of tasks that have one (tasks.stories), or
readings that were kept: rollout.teacher names a run or an evaluation whose turns were archived,
this policy's or a stronger one's, of which the right ones are learnt (rejection sampling).
Measured here: SmolLM2-135M on two cores (docs/results.md, config `smollm`).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.rollout.update(
        teacher="script",
        group_size=1,
        temperature=1.0,  # of the likelihood
        max_rounds=1,
        max_staleness=0,
    )
    config.grpo.update(
        advantage="imitation",
        ratio="likelihood",
        normaliser="token_mean",
        kl_weight=0.0,
        minibatches=1,
        epochs=1,
        full_rate_at=0.0,
    )
