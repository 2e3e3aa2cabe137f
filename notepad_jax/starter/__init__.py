"""The synthetic language of the quick start: vocabulary, documents, lessons.

Here: where the policy that is shipped of it lies, data/starter, from any working folder. `policy`
beside this file is a link to it in a checkout, and a copy of it in a wheel.
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
