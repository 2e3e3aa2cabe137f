"""The starter policy of config `mix`, which knows questions of four kinds.

    notepad-jax warmup --config starter_mix

Expected: about 7 minutes of one core; runs/starter_mix/ (1.1 MB), which finds all facts in chunks
of 64 tokens (slip .0007), with the bad habits of the quick start's starter: a score of .47 on
the documents of `mix`, where saying "nothing" to all is .20.
"""

from ml_collections import ConfigDict

from configs import starter


def get_config() -> ConfigDict:
    config = starter.get_config()
    config.folder = "runs/starter_mix"
    config.reads_as = "mix"
    config.mixed = True
    config.noise = 0.0
    config.first_window = 0
    # To note a thing behind others takes a look at two of them, one at the chunk and one at
    # the question: four heads.
    config.policy.update(heads=4, kv_heads=2, rope_theta=1e6)
    config.steps = 1500
    config.drill_steps = 0
    config.lessons = (ConfigDict(dict(chunks=16, chunk_size=64, tails=12, share=1.0, notes=False)),)
    config.optimizer.update(decay_from=400, decay_steps=1500)
    return config
