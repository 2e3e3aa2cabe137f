"""Lookup by name with spelling suggestions: the known word nearest to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the word that comes nearest, or "" where none is as like as `cutoff`, of 0 to 1."""
    return next(iter(difflib.get_close_matches(word, sorted(known), 1, cutoff)), "")


def meant(word: str, known: Iterable[str], otherwise: str) -> str:
    """Returns "did you mean X?" for the nearest one, or what to say where none is near."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near else otherwise


def named(what: str, choices: Mapping[str, T], name: str) -> T:
    """Returns the choice called `name`; ValueError, naming its neighbour, if there is none."""
    if name not in choices:
        near = nearest(name, choices)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"no {what} is called {name!r}; {hint}known: {', '.join(choices)}")
    return choices[name]
