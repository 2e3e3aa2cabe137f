"""Reinforcement learning in rounds: the quick start's questions, read in parallel.

    notepad-jax warmup --config starter_rounds
    notepad-jax train --config rounds

`python -m benchmarks.rounds` does both and measures them beside a serial reading:
docs/evaluation.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.policy = "runs/starter_rounds"
    # A question of two facts needs two rounds: the second is looked for by what the first says.
    config.reading.update(
        order="parallel", passes=2, max_memory=6, memory_update="overwrite_or_keep"
    )
    # In the last round no chunk at all may forget: with a chapter in five chunks of eight, as the
    # quick start has, that all five are kept over happens once in a thousand readings, and nothing
    # is there to reinforce. A serial reading has it easier: after its last fact few are left.
    config.data.update(chapter_rate=1 / 128)
    # Above 1, slips are many: a name that might be noted is said in every second reading.
    config.rollout.temperature = 1.0
    config.engine.update(row_tokens=544)  # 32 questions of 17
    config.evaluate.update(chunk_size=256, lengths=("2k", "8k", "32k", "128k", "512k"))
    return config
