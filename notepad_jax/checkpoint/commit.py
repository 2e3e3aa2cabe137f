"""Atomic commit of checkpoints: what makes a step count in a folder on a disk, or in a bucket.

On a disk a step is a folder named by its number. It appears by one rename, when all of it is
written and the `manifest` is in it, and it vanishes by one; whatever a kill leaves has another
name. A bucket has no renames: there a step is written under its number from the start, by each
life of the trainer in a folder of its own (`5/life-2`), since an earlier one that was frozen may
write on; it counts from the moment a manifest, one object, is there, the highest life's, and
vanishes with its manifests. So on a disk a step that is saved again stays until the new one is
whole, and in a bucket it is gone meanwhile; the older ones stay in both. Before anything is changed
a shelf looks whether a later life of the trainer has taken the folder over. Above: `steps`; below:
`fence`, `manifest`, `bucket`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
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
LIFE = re.compile(r"life-(\d+)")  # in a bucket, of a step: the life that wrote it


class Shelf(Protocol):
    """The checkpoint steps of one folder. One process at a time changes it.

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
    """Returns the steps in `folder` for `life`; without one, for a process that took none over."""
    place = bucket.path(folder)
    life = life or Life(place)
    return InBucket(place, life) if bucket.is_bucket(place) else OnDisk(place, life)


def place(folder: str | Path | epath.Path, step: int) -> Path | epath.Path:
    """Returns where the files of a step lie; on a disk also of one that is a bucket's copy."""
    there = bucket.path(folder) / str(step)
    if bucket.is_bucket(there):
        lives = [name.removesuffix(f"/{manifest.NAME}") for name in bucket.names(there)]
    else:
        lives = [path.parent.name for path in there.glob(f"*/{manifest.NAME}")]
    numbers = [int(found[1]) for life in lives if (found := LIFE.fullmatch(life))]
    return there / f"life-{max(numbers)}" if numbers else there


class OnDisk:
    def __init__(self, folder: Path, life: Life) -> None:
        self._folder, self._life = folder, life

    def steps(self) -> list[int]:
        found = (path for path in self._folder.glob("*") if STEP.fullmatch(path.name))
        return sorted(int(path.name) for path in found if path.is_dir())

    def begin(self, step: int) -> None:
        self._life.check()
        # Orbax's threads wait for minutes for a folder that it could not make: so we try.
        self.under_way(step).mkdir(parents=True, exist_ok=True)
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
        for path in self._folder.glob("*"):
            if (SET_ASIDE if aside else LEFT_OVER).fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


class InBucket:
    def __init__(self, folder: epath.Path, life: Life) -> None:
        self._folder, self._life = folder, life

    def steps(self) -> list[int]:
        return sorted({step for step, _ in self._manifests()})

    def begin(self, step: int) -> None:
        self.remove(step)
        self.sweep(aside=False)

    def under_way(self, step: int) -> epath.Path:
        return self._folder / str(step) / f"life-{self._life.number}"

    def finish(self, step: int, content: bytes) -> None:
        for later in reversed([found for found in self.steps() if found > step]):
            self.remove(later)
        self._life.check()
        manifest.write(self.under_way(step), content)

    def remove(self, step: int) -> None:
        self._life.check()
        for _, named in self._manifests(step):
            named.unlink(missing_ok=True)
        bucket.remove(self._folder / str(step))

    def set_aside(self, step: int) -> None:
        self._life.check()
        for _, named in self._manifests(step):
            (named.parent / ASIDE).write_bytes(named.read_bytes())
            named.unlink()

    def sweep(self, aside: bool) -> None:
        self._life.check()
        for (step, life), found in self._found().items():
            if manifest.NAME not in found and (ASIDE in found) == aside:
                bucket.remove(self._folder / str(step) / life)

    def _manifests(self, only: int | None = None) -> Iterator[tuple[int, epath.Path]]:
        """Yields the manifests of steps that count, or of one."""
        for (step, life), names in self._found().items():
            if manifest.NAME in names and only in (None, step):
                yield step, self._folder / str(step) / life / manifest.NAME

    def _found(self) -> dict[tuple[int, str], set[str]]:
        """Returns the names in each life's folder of what is called as a step is.

        One without any is a disk's, which was copied: of no life, "".
        """
        found: dict[tuple[int, str], set[str]] = {}
        for name in bucket.names(self._folder):
            first, _, below = name.partition("/")
            life, _, rest = below.partition("/")
            if not LIFE.fullmatch(life):
                life, rest = "", below
            if rest and STEP.fullmatch(first):
                found.setdefault((int(first), life), set()).add(rest)
        lived = {step for step, life in found if life}
        return {key: names for key, names in found.items() if key[1] or key[0] not in lived}
