"""A choice of an algorithm by its name, out of the table that its room keeps.

Above: advantages, normalisers, ratios, objective.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def named(what: str, choices: Mapping[str, T], name: str) -> T:
    """Returns the choice called `name`; ValueError, naming its neighbour, if there is none."""
    if name not in choices:
        near = difflib.get_close_matches(name, choices, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no {what} is called {name!r}; {hint}known: {', '.join(choices)}")
    return choices[name]
