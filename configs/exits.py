"""Reinforcement learning of when to leave: the quick start's questions, read serially.

    notepad-jax warmup --config starter_exits
    notepad-jax train --config exits

The reward is the answer's alone. It teaches to stay while something is missing, and to leave then:
each chunk that is still read is one that may be noted wrongly.
"""

from ml_collections import ConfigDict

from configs import rounds


def get_config() -> ConfigDict:
    config = rounds.get_config()
    config.policy = "runs/starter_exits"
    config.reading.update(order="serial", passes=1, exits=True)
    config.data.update(chapter_rate=1 / 32)
    config.rollout.temperature = 1.3  # as the quick start
    return config
