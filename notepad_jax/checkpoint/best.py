"""The mark of the best checkpoint on held-out tasks: one small file beside the steps.

Retention keeps that step (`steps.retain`, the neighbour above), and `runs/NAME@best` names it.
It says nothing that a checkpoint of the run does not know: a run that goes on writes it anew.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from etils import epath

from notepad_jax.checkpoint import bucket
from notepad_jax.telemetry.identity import write_whole

NAME = "best.json"


@dataclasses.dataclass(frozen=True)
class Best:
    """A step, and what it scored."""

    step: int
    score: float


def read(folder: str | Path | epath.Path) -> Best | None:
    """Returns the best step under `folder`; None where none was marked, or the mark is damaged.

    Raises OSError for a mark that cannot be read: retention would take it for none, and delete.
    """
    try:
        said = json.loads((bucket.path(folder) / NAME).read_text(encoding="utf-8"))
        return Best(int(said["step"]), float(said["score"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def mark(folder: str | Path | epath.Path, best: Best | None) -> None:
    """Marks a step as the best, at once or not at all; with None there is none any more."""
    place, text = bucket.path(folder), ""
    if best is None:
        (place / NAME).unlink(missing_ok=True)
    elif read(folder) != best:
        text = json.dumps(dataclasses.asdict(best)) + "\n"
    if text and bucket.is_bucket(place):  # whose objects are whole or not there
        (place / NAME).write_text(text)
    elif text:
        write_whole(Path(place / NAME), text.encode())
