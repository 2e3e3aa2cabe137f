"""The starter policy of config `exits`: it notes facts, keeps them, and may leave a document early.

    notepad-jax warmup --config starter_exits

Expected: about 7 minutes of one core; runs/starter_exits/ (0.9 MB). Its worst habit is to leave
before it has what is asked (starter/rounds_lessons.py).
"""

from ml_collections import ConfigDict

from configs import starter_rounds


def get_config() -> ConfigDict:
    config = starter_rounds.get_config()
    config.folder = "runs/starter_exits"
    config.reads_as = "exits"
    config.habits.update(leave=0.4, stay=0.8)
    return config
