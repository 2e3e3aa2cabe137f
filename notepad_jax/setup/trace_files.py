"""Finds trace files of finished readings: in folders of runs and evaluations, or named ones.

Above: `notepad-jax trace`, the server's pages, and a run that imitates them; below: reading.trace.
"""

from __future__ import annotations

from pathlib import Path

from notepad_jax.data.sources import is_remote
from notepad_jax.eval.readings import READINGS
from notepad_jax.reading.trace import check
from notepad_jax.rollout import archive

NAMES = (archive.FILE, READINGS)
MEND = f"name a run (runs/NAME), the folder of an evaluation, or a {' or '.join(NAMES)}"


class NothingRead(ValueError):
    """The error for a folder in which no reading is kept."""


def existing(path: str) -> Path:
    """Returns what was named, also as NAME for runs/NAME; ValueError if there is no such thing."""
    if is_remote(path):
        raise ValueError(
            f"{path} lies in a bucket, and a page is made of files here; copy its "
            f"{' and '.join(NAMES)} (gcloud storage cp) and name the copy"
        )
    for there in (Path(path), Path("runs") / path):
        if there.exists():
            return there
    runs = sorted(folder.name for folder in Path("runs").glob("*") if folder.is_dir())
    known = f"; in runs there are {', '.join(runs[:8])}" if runs else ""
    raise ValueError(f"there is no {path}; {MEND}{known}")


def files(path: Path, several: bool) -> dict[Path, str]:
    """Returns the trace files of what was named, and what each is called on the page.

    By its place in the folder; where `several` were named, with the folder's name before it.
    """
    if path.is_file():
        check_file(path)
        return {path: path.parent.name + "/" + path.stem if several else path.stem}
    found = sorted(file for name in NAMES for file in path.rglob(name))
    if not found:
        raise NothingRead(
            f"{path} has no {' and no '.join(NAMES)}: nothing was read there yet, or (a training "
            f"run with rollout.archive=0) nothing was kept; {MEND}"
        )
    # Training comes first, then evaluations by the number of their step.
    found.sort(key=lambda file: (file.name != NAMES[0], len(str(file)), str(file)))
    for file in found:
        check_file(file)
    return {file: _label(path, file, several) for file in found}


def _label(folder: Path, file: Path, several: bool) -> str:
    place = file.parent.relative_to(folder)
    if place.parts[:1] == ("readings",) and len(place.parts) > 1:
        place = place.relative_to("readings")  # where a run keeps its measurements
    inside = file.stem if place == Path(".") else str(place)
    return f"{folder.resolve().name}/{inside}" if several else inside


def check_file(path: Path) -> None:
    """Raises ValueError if a file is no trace, by its first bytes."""
    try:
        check(path)
    except ValueError as error:
        raise ValueError(f"{error}; {MEND}") from None
