"""Provenance of a page's numbers: date, commit, hardware, and what to do next.

Every page has one below its title (`templates/frame.html`); `setup.provenance` makes it.
It is no part of report.json, which says the same whenever it is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Next:
    """A suggested command, and its purpose."""

    purpose: str  # "ask it about a file of yours"
    command: str


@dataclasses.dataclass(frozen=True)
class Origin:
    """The provenance of a page. Empty words leave their part out."""

    date: str  # "2026-11-22 16:05 UTC"
    commit: str  # "d3ee518", or the version where there is no checkout
    hardware: str  # "1 NVIDIA H200"
    next: Sequence[Next] = ()


@dataclasses.dataclass(frozen=True)
class SettingsChange:
    """Settings that were changed when a run was resumed."""

    step: int  # done by then
    date: str
    commit: str
    settings: Sequence[tuple[str, str, str]]  # key, what it was, what it is from then on
