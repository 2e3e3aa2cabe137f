"""Spelling suggestions: the known word that comes nearest to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the word that comes nearest, or "" where none is as like as `cutoff`, of 0 to 1."""
    return next(iter(difflib.get_close_matches(word, sorted(known), 1, cutoff)), "")


def meant(word: str, known: Iterable[str], otherwise: str) -> str:
    """Returns "did you mean X?" for the nearest one, or what to say where none is near."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near else otherwise
