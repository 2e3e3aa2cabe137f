"""Finds the shipped starter policy, data/starter, from any working folder.

`policy` beside this file is a link to data/starter in a checkout, and a copy of it in a wheel.
Above: the programs, which read it when a config names it.
"""

from __future__ import annotations

from pathlib import Path

NAME = "data/starter"  # as configs call it, from the repository's root
FOLDER = Path(__file__).parent / "policy"


def found(policy: str) -> str:
    """Returns `policy`; of the starter's name, where there is no such folder, where it lies."""
    if policy.rstrip("/") == NAME and not Path(policy).exists():
        return str(FOLDER.resolve())
    return policy
