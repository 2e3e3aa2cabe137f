"""GoLongRL: each kind of reward has a scale of its own, and what is rare weighs more.

    notepad-jax train --recipe golongrl --config chat --config.policy=path/to/model \
        --config.tasks.files=golongrl.jsonl

TMN-Reweight, for training on nine kinds of reward at once; `notepad-jax build golongrl` converts
their rows. Each answer is judged by its task's own metric, which is its reward type. Measured
here: as `dr_grpo` within a point, on a mix of four rewards (docs/results.md).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.tasks.reward = ""
    config.grpo.update(
        advantage="tmn_reweight",
        normaliser="token_mean",
        ratio="ppo_clip",
        clip_low=0.2,
        clip_high=0.2,
        kl_weight=0.0,
    )
