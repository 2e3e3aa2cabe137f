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
    # Ten questions share a document: 28,000 tokens for 40 readings, a quarter of them prefixes.
    config.data.update(tokens=2048, questions=10)
    # What every other task begins with, finding one fact, comes twice as often.
    config.tasks.stories = ("niah_single_2", "niah_single_3", *config.tasks.stories)
    config.steps = 72
    config.rollout.update(documents=3)
    config.optimizer.update(
        learning_rate=2e-3,
        adam_learning_rate=2e-3,  # unused by adamw
        warmup_steps=5,
        decay_from=40,
        decay_steps=72,
    )
    return config
