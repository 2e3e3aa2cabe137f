"""The starter policy of config `rounds`: that of the quick start, in a language that merges.

    notepad-jax warmup --config starter_rounds

Expected: about 7 minutes of one core; runs/starter_rounds/ (0.9 MB), which notes facts, leaves the
memory as it is and merges notes side by side (starter/rounds_lessons.py), each with bad habits.
"""

from ml_collections import ConfigDict

from configs import starter


def get_config() -> ConfigDict:
    config = starter.get_config()
    config.folder = "runs/starter_rounds"
    config.reads_as = "rounds"
    config.rounds = True
    # Where nothing is to be noted one time of ten something is, and of notes that matter a third
    # is dropped.
    config.habits.update(keep=0.9, merge=0.65)
    # Chunks of 256 tokens at every length: of four notes and of sixteen, side by side, too.
    config.lessons = (
        ConfigDict(dict(chunks=16, chunk_size=64, tails=12, share=0.30, notes=False)),
        ConfigDict(dict(chunks=6, chunk_size=256, tails=24, share=0.35, notes=False)),
        ConfigDict(dict(chunks=16, chunk_size=15, tails=12, share=0.15, notes=True)),
        ConfigDict(dict(chunks=8, chunk_size=63, tails=16, share=0.20, notes=True)),
    )
    return config
