"""GSPO: one ratio and one clip for a whole turn, the geometric mean over its tokens.

    notepad-jax train --recipe gspo

Zheng et al. 2025 (arXiv 2507.18071): four optimizer steps a rollout, clips of 3e-4 and 4e-4.
Measured here: on config `mix` with so narrow a clip it learns as well, and more slowly
(docs/results.md).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    config.grpo.update(
        advantage="grpo",
        normaliser="turn_mean",
        ratio="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        kl_weight=0.0,
        minibatches=4,
    )
