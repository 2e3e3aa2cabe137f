"""Which step of a folder did best on held-out tasks: one small file beside the steps.

Retention keeps that step (`steps.retain`, the neighbour above), and `runs/NAME@best` names it.
It says nothing that a checkpoint of the run does not know: a run that goes on writes it anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

NAME = "best.json"


@dataclasses.dataclass(frozen=True)
class Best:
    """A step, and what it scored."""

    step: int
    score: float


def read(folder: str | Path) -> Best | None:
    """Returns the best step under `folder`; None where none was marked, or the mark is damaged."""
    try:
        said = json.loads((Path(folder) / NAME).read_text(encoding="utf-8"))
        return Best(int(said["step"]), float(said["score"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mark(folder: str | Path, best: Best | None) -> None:
    """Marks a step as the best, at once or not at all; with None there is none any more."""
    path = Path(folder) / NAME
    if best is None:
        path.unlink(missing_ok=True)
    elif read(folder) != best:
        temporary = path.with_name(f".{NAME}.writing")
        temporary.write_text(json.dumps(dataclasses.asdict(best)) + "\n", encoding="utf-8")
        os.replace(temporary, path)
