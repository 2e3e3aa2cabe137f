"""Lookup by name in the tables of an algorithm's choices (advantages, ratios, ...).

Above: advantages, normalisers, ratios, objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from notepad_jax.near import nearest

T = TypeVar("T")


def named(what: str, choices: Mapping[str, T], name: str) -> T:
    """Returns the choice called `name`; ValueError, naming its neighbour, if there is none."""
    if name not in choices:
        near = nearest(name, choices)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"no {what} is called {name!r}; {hint}known: {', '.join(choices)}")
    return choices[name]
