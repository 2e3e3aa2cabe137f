"""Where the steps of a run stand, and what makes one count: a folder on a disk, or in a bucket.

On a disk a step is a folder named by its number. It appears by one rename, when all of it is
written and the `manifest` is in it, and it vanishes by one; whatever a kill leaves has another
name. A bucket has no renames: there a step is written under its number from the start and counts
from the moment its manifest, one object, is there; it vanishes with its manifest. So on a disk a
step that is saved again stays until the new one is whole, and in a bucket it is gone meanwhile;
the older ones stay in both. Before anything is changed a shelf looks whether a later life of the
trainer has taken the folder over. Above: `steps`; below: `fence`, `manifest`, `bucket`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Protocol

from etils import epath

from notepad_jax.checkpoint import bucket, manifest
from notepad_jax.checkpoint.fence import Life
from notepad_jax.telemetry.identity import sync_folder

STEP = re.compile(r"0|[1-9]\d*")
SET_ASIDE = re.compile(r"\d+\.set-aside")
LEFT_OVER = re.compile(r"\.\d+\.(writing|removed).*|\d+\.orbax-checkpoint-tmp.*")
ASIDE = manifest.NAME + ".set-aside"


class Shelf(Protocol):
    """The steps of one folder. One process at a time changes it.

    Where a higher life than its own is there, all but `steps` and `under_way` raise
    `fence.Superseded` and change nothing.
    """

    def steps(self) -> list[int]:
        """Returns the steps that count, ascending; a save that was cut off does not."""

    def begin(self, step: int) -> None:
        """Makes room for a step that is about to be written at `under_way`."""

    def under_way(self, step: int) -> Path | epath.Path:
        """Returns where a step lies until it counts."""

    def finish(self, step: int, content: bytes) -> None:
        """Makes a step count, with this manifest, in place of it and of later ones."""

    def remove(self, step: int) -> None:
        """Makes a step count no longer, then deletes it."""

    def set_aside(self, step: int) -> None:
        """Makes a step count no longer; what it was stays until the next save is done."""

    def sweep(self, aside: bool) -> None:
        """Deletes what was begun or removed and never finished; or what was set `aside`."""


def at(folder: str | Path | epath.Path, life: Life | None = None) -> Shelf:
    """Returns the steps in `folder` for `life`; without one, for whoever never took it over."""
    place = bucket.path(folder)
    life = life or Life(place)
    return InBucket(place, life) if bucket.is_bucket(place) else OnDisk(place, life)


class OnDisk:
    def __init__(self, folder: Path, life: Life) -> None:
        self._folder, self._life = folder, life

    def steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        found = (path for path in self._folder.iterdir() if STEP.fullmatch(path.name))
        return sorted(int(path.name) for path in found if path.is_dir())

    def begin(self, step: int) -> None:
        self._life.check()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sweep(aside=False)

    def under_way(self, step: int) -> Path:
        # Each life writes in a place of its own: an earlier one may be writing still.
        return self._folder / f".{step}.writing-{self._life.number}"

    def finish(self, step: int, content: bytes) -> None:
        manifest.write(self.under_way(step), content)
        self._life.check()
        for later in reversed([found for found in self.steps() if found >= step]):
            self.remove(later)
        os.rename(self.under_way(step), self._folder / str(step))
        sync_folder(self._folder)

    def remove(self, step: int) -> None:
        self._life.check()
        gone = self._folder / f".{step}.removed"
        os.rename(self._folder / str(step), gone)
        shutil.rmtree(gone, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        self._life.check()
        aside = self._folder / f"{step}.set-aside"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(self._folder / str(step), aside)

    def sweep(self, aside: bool) -> None:
        self._life.check()
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if (SET_ASIDE if aside else LEFT_OVER).fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


class InBucket:
    def __init__(self, folder: epath.Path, life: Life) -> None:
        self._folder, self._life = folder, life

    def steps(self) -> list[int]:
        return sorted(step for step, found in self._found().items() if manifest.NAME in found)

    def begin(self, step: int) -> None:
        self.remove(step)
        self.sweep(aside=False)

    def under_way(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def finish(self, step: int, content: bytes) -> None:
        for later in reversed([found for found in self.steps() if found > step]):
            self.remove(later)
        self._life.check()
        manifest.write(self.under_way(step), content)

    def remove(self, step: int) -> None:
        self._life.check()
        (self._folder / str(step) / manifest.NAME).unlink(missing_ok=True)
        bucket.remove(self._folder / str(step))

    def set_aside(self, step: int) -> None:
        self._life.check()
        named = self._folder / str(step) / manifest.NAME
        (self._folder / str(step) / ASIDE).write_bytes(named.read_bytes())
        named.unlink()

    def sweep(self, aside: bool) -> None:
        self._life.check()
        for step, found in self._found().items():
            if manifest.NAME not in found and (ASIDE in found) == aside:
                self.remove(step)

    def _found(self) -> dict[int, set[str]]:
        """Returns the names right in each folder that is called as a step is."""
        found: dict[int, set[str]] = {}
        for name in bucket.names(self._folder):
            first, _, below = name.partition("/")
            if below and STEP.fullmatch(first):
                found.setdefault(int(first), set()).add(below)
        return found
