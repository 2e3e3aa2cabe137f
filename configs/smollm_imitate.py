"""The first half of configs/smollm.py: the instruct model is taught what good notes look like.

    notepad-jax train --config smollm_imitate --name taught

68 steps of 24 scripted readings, 10,000 tokens each and at the end 18,000: 47 minutes on two cores.
A policy that is right 6 times of 100 cannot be reinforced; after this it can (docs/results.md).
"""

from ml_collections import ConfigDict

from configs import smollm
from configs.recipes import imitate


def get_config() -> ConfigDict:
    config = smollm.get_config()
    config.policy = "policies/smollm2"  # what `make smollm` imports
    imitate.apply(config)
    # Two chunks at first: most facts are found by half of the turns, and 24 readings are 10,000
    # tokens. Then four, in which there is more to leave alone.
    config.data.update(tokens=1920, questions=6)
    config.tasks.curriculum = ("2@0", "4@52")
    # What every other task begins with, finding one fact, comes twice as often.
    config.tasks.stories = ("niah_single_2", "niah_single_3", *config.tasks.stories)
    config.steps = 68
    config.rollout.update(documents=4)
    config.grpo.update(row_length=1408)
    config.optimizer.update(
        learning_rate=2e-3,
        adam_learning_rate=2e-3,  # unused by adamw
        warmup_steps=6,
        decay_from=32,
        decay_steps=68,
    )
    config.checkpoint.update(every=10)
    return config
