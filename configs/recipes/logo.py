"""LoGo-GRPO: of some groups one memory is written again four times, and the four are compared.

    notepad-jax train --recipe logo

Memory-R2 (2026), which found that its curriculum on chunks did more: add
`--config.tasks.curriculum=4@0,8@50,16@100`, in steps of your own. Readings are learnt from as by
recipe `grpo`'s advantage. Measured here: no gain on config
`mix` (docs/results.md).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.rollout.local.update(samples=4, share=0.5, weight=0.5)
    config.grpo.update(
        advantage="grpo",
        normaliser="token_mean",
        ratio="ppo_clip",
        clip_low=0.2,
        clip_high=0.2,
    )
