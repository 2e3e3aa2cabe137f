"""The first half of configs/smollm.py: the instruct model is taught what good notes look like.

    notepad-jax train --config smollm_imitate --name taught

40 steps of 32 scripted readings, 22,000 tokens each, about 130 CPU seconds a step. A policy that
is right 3 times of 16 cannot be reinforced; after this it can.
"""

from ml_collections import ConfigDict

from configs import smollm
from configs.recipes import imitate


def get_config() -> ConfigDict:
    config = smollm.get_config()
    config.policy = "policies/smollm2"  # what `make smollm` imports
    imitate.apply(config)
    config.data.update(questions=4)
    config.steps = 40
    config.rollout.update(documents=8)
    config.optimizer.update(
        learning_rate=1e-3,
        adam_learning_rate=1e-3,
        warmup_steps=4,
        decay_from=10,
        decay_steps=40,
    )
    return config
