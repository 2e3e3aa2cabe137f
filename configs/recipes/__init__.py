"""Recipes: published algorithms as changes of any config for training.

    notepad-jax train --config chat --recipe dapo --config.grpo.minibatches=4

A recipe is a file with `apply(config)`, which changes the keys that its paper decides and no
other, and returns nothing. It comes after the config file and before the overrides, which win; it
may look at sizes, as they will be. Optimizer, batch and lengths stay the config's.

A shipped recipe is its sources: `SAID` has every key that it sets with the value and where that
stands, and `put` writes the values into a config. Where a paper and its code differ the code is
taken, unless the file says otherwise, and what neither says is no key of the recipe.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict


class Said(NamedTuple):
    """A published value in our terms, and its source."""

    value: Any  # None: `apply` derives it from the sizes of a config
    # "owner/name@commit:path#lines name", lines by comma; "arXiv:number, place"; or "ours: why".
    at: str


def put(config: ConfigDict, said: Mapping[str, Said]) -> None:
    """Sets the keys whose values were said."""
    values = {key: one.value for key, one in said.items() if one.value is not None}
    config.update_from_flattened_dict(values)
