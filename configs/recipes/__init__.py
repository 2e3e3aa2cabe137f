"""How a run learns: published algorithms as changes of any config for training.

    notepad-jax train --config chat --recipe dapo --config.grpo.minibatches=4

A recipe is a file with `apply(config)`, which changes the keys that its paper decides and no
other, and returns nothing. It comes after the config file and before the overrides, which win; it
may look at sizes, as they will be. Optimizer, batch and lengths stay the config's.
"""
