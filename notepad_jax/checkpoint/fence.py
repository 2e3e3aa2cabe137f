"""Fencing of trainers: only the one that took a folder of steps over last may write there.

A trainer that is cut off from the world, frozen or on a host out of reach, is still alive,
and its successor has gone on; when it comes back it would save an old step in place of newer
ones. On one machine the lock of the run's folder prevents that; in a bucket there is no lock that
ends with its owner. So each trainer puts an object `trainer/LIFE` beside the steps, of the next
number, and before it changes something there it looks (`commit`) whether a higher one is there.

A look and the change after it are two things. What a trainer that is frozen between them does when
it thaws: on a disk it ends one rename that it had begun; in a bucket it writes the rest of the one
step that it was saving, in a folder that is its life's alone: what a later life saves of that step
stays as it is, and counts.
Neighbours above: `commit`, `training_state`; below: `objects`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import uuid
from pathlib import Path

from etils import epath

from notepad_jax.checkpoint.objects import Objects

FOLDER = "trainer"


class Superseded(ValueError):
    """Another trainer took the folder over."""


@dataclasses.dataclass(frozen=True)
class Life:
    """A fencing token: the `number`-th trainer of the steps in `folder`; 0: it never took over."""

    folder: Path | epath.Path
    number: int = 0

    def check(self) -> None:
        """Raises Superseded, in one line, if a higher life is there; OSError as `Objects` does."""
        if (highest := newest(self.folder)) > self.number:
            who = _who(self.folder, highest)
            raise Superseded(
                f"{self.folder} was taken over by life {highest} of the trainer ({who}), and this "
                f"is life {self.number}: it writes there no more, and the other goes on"
            )


def take(folder: Path | epath.Path) -> Life:
    """Returns the next life of a trainer of the steps in `folder`; earlier ones are over."""
    ours = {"host": platform.node(), "pid": os.getpid(), "token": uuid.uuid4().hex}
    content, objects = json.dumps(ours).encode(), Objects(folder)
    while True:
        number = newest(folder) + 1
        name = f"{FOLDER}/{number}"
        # Where an answer of a bucket was lost, the name may have been taken by ourselves.
        if objects.put(name, content) or objects.get(name) == content:
            return Life(folder, number)


def newest(folder: Path | epath.Path) -> int:
    """Returns the highest life of a trainer of the steps in `folder`; 0 where there was none."""
    names = (name.partition("/")[2] for name in Objects(folder).names(FOLDER))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _who(folder: Path | epath.Path, number: int) -> str:
    try:
        said = json.loads(Objects(folder).get(f"{FOLDER}/{number}") or b"")
        return f"process {said['pid']} of {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which says nothing of itself"
