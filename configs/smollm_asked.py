"""SmolLM2's third lesson: free questions, beside what it knows by then.

    make smollm-train                                   # all three, from the published model on
    notepad-jax train --config smollm_asked --name asked    # the third alone, from data/smollm2

24 scripted readings a step, three minutes on two cores. Imitation and GRPO teach it thirteen ways
of asking; asked another, it says `none`. Half of the questions here are free
(`tasks.comprehension`). `make smollm-train` begins with 15 steps of short documents alone: its
words for that are in the Makefile (`SHORT`).
"""

from ml_collections import ConfigDict

from configs import smollm_imitate


def get_config() -> ConfigDict:
    config = smollm_imitate.get_config()
    config.policy = "data/smollm2"  # of configs/smollm_gpu.py
    # One chunk. Of two, half of the turns have nothing to write down, and a policy that learns that
    # leaves texts alone that are not like these: after eight such steps it said "not stated" to 32
    # of 40 questions (docs/results.md). So chunks are long, and texts of many lengths: taught long
    # ones alone, it says `none` of short ones.
    config.reading.chunk_size = 2048
    config.evaluate.chunk_size = 2048
    config.data.update(tokens=1900, questions=3)
    config.tasks.min_tokens = 480
    config.tasks.curriculum = ()
    known = tuple(dict.fromkeys(config.tasks.stories))
    config.tasks.stories = ("niah_single_2", "niah_single_3", *known, *("comprehension",) * 10)
    config.steps = 10
    config.rollout.documents = 8
    config.grpo.row_length = 2560
    config.optimizer.update(
        learning_rate=1e-3,
        adam_learning_rate=1e-3,  # unused by adamw
        warmup_steps=2,
        decay_from=4,
        decay_steps=10,
    )
    config.checkpoint.every = 5
    return config
