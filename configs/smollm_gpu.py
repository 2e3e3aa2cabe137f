"""The second half of SmolLM2's training on one GPU: four times the readings a step.

    make smollm-train SMOLLM_CONFIG=smollm_gpu
    notepad-jax train --config smollm_gpu --name smollm    # the second half alone

data/smollm2 was made with it, on one H100: 18 steps of 576 readings, some ten seconds each. As
configs/smollm.py, which says why; what is different is what two cores have no time for.
"""

from ml_collections import ConfigDict

from configs import smollm


def get_config() -> ConfigDict:
    config = smollm.get_config()
    config.steps = 18
    config.rollout.update(documents=6, group_size=16)
    config.optimizer.update(decay_from=8, decay_steps=18)
    config.engine.slots = 512  # 576 readings at once, nearly
    config.checkpoint.every = 3
    return config
