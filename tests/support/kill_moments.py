"""The moments at which runs are killed, and what lay on disk then.

Some moments are drawn from the clock, evenly over the time that a run takes. The others are
aimed: `Watch` looks at the run's folder every millisecond or two, and the kill comes a random
short time after the n-th time that something critical happened there. What a kill really hit is
said by `place`, from how the folder looked before the process began and after it was killed.
Three aims ask the run to stop, with SIGTERM, and let it end itself: at any time, while it starts,
and within a garbage collection, where what a handler raises is swallowed (`in_a_collection` starts
such a run). Used by `kills`.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen

from notepad_jax import __main__
from notepad_jax.checkpoint import best, fence
from notepad_jax.checkpoint.steps import BASE, steps_in
from notepad_jax.rollout import archive
from notepad_jax.telemetry.metrics import LEDGER, METRICS, TIMINGS
from notepad_jax.training import partial_rollout, record

CLOCK, STOP, START, COLLECTION = "clock", "stop", "start", "collection"
ASKED = (STOP, START, COLLECTION)  # which ask, and let the run end itself
SAVE, COMMIT, REMOVE = "save", "commit", "remove"
LINE, READING, RESUME = "line", "reading", "resume"
# What a kill is aimed at: (weight, seconds after it within which the kill comes, what it is).
AIMS = {
    CLOCK: (5, 0.0, "any time of the run"),
    STOP: (4, 0.0, "any time of the run, by SIGTERM"),
    START: (2, 0.0, "while the run starts, by SIGTERM"),
    COLLECTION: (3, 0.0, "a garbage collection, by SIGTERM from within"),
    SAVE: (3, 0.15, "a checkpoint's temporary folder appeared"),
    COMMIT: (2, 0.05, "a step took its name"),
    REMOVE: (1, 0.002, "a step lost its name, to be removed"),
    LINE: (2, 0.05, "a line was appended to metrics.jsonl"),
    READING: (1, 0.02, "a reading was appended to trajectories.jsonl"),
    RESUME: (2, 0.1, "a resumed run has cut its metrics back"),
}
POLL = 0.001  # seconds between two looks
STARTS = 0.4  # of the time that a run takes: its start
FILES = (METRICS, LEDGER, TIMINGS, archive.FILE)
# What else lies among the steps and stays there.
BESIDE = {best.NAME, BASE, record.BESIDE, fence.FOLDER}

# What a kill can hit, as it is told; each kill is of one kind, the first that is true.
KEPT = "a rollout, of which it kept turns, told to stop or as they ended"
NOTHING_SAVED = "before the first checkpoint"
STARTING = "a resume has begun, and no file has changed yet"
CUT_BACK = "a resume has cut its files back, and no step is new"
SAVING = "a checkpoint is being written"
REMOVING = "a step is being removed"
TORN = "a line is cut in the middle"
UNEVEN = "a step's line is in some files and not in others"
LOGGED = "steps are logged and not saved"
AT_REST = "the newest step is saved, and nothing is newer"
PLACES = (
    KEPT, NOTHING_SAVED, STARTING, CUT_BACK, SAVING, REMOVING, TORN, UNEVEN, LOGGED, AT_REST
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: `seconds` after the process began, or after the n-th time `aim` happened."""

    aim: str
    nth: int
    seconds: float
    process: int = 0  # which of several

    def __str__(self) -> str:
        of = f" to process {self.process}" if self.process else ""
        if self.aim == COLLECTION:
            return f"in a collection{of} after {self.seconds:.3f} s"
        after = f" after {self.aim} {self.nth}" if self.nth else " of the run"
        return f"{self.seconds:.3f} s{after}{of}"


def draw(
    chance: random.Random, seconds: float, steps_left: int, every: int, logged: bool,
    seen: bool = True, processes: int = 1,
) -> Moment:  # fmt: skip
    """Draws when to kill a process.

    `seconds` is what a whole run takes, `steps_left` what this one has to do, of which each
    `every`-th is saved, and `logged` says whether there are files for a resume to cut back; `seen`
    whether its checkpoints lie where a `Watch` looks. One of `processes` is chosen.
    A moment that never comes lets the run end.
    """
    hidden = set() if logged else {RESUME}
    hidden |= set() if seen else {SAVE, COMMIT, REMOVE}
    aims = [aim for aim in AIMS if aim not in hidden]
    aim = chance.choices(aims, [AIMS[aim][0] for aim in aims])[0]
    which = chance.randrange(processes) if processes > 1 else 0
    if aim in (CLOCK, STOP, COLLECTION):
        return Moment(aim, 0, chance.uniform(0, seconds), which)
    if aim == START:
        return Moment(aim, 0, chance.uniform(0, STARTS * seconds), which)
    saves = -(-steps_left // every)
    most = {
        SAVE: saves,
        COMMIT: saves,
        REMOVE: saves,
        LINE: steps_left,
        READING: 4 * steps_left,
        RESUME: 1,
    }[aim]
    nth, after = chance.randint(1, max(1, most)), chance.uniform(0, AIMS[aim][1])
    return Moment(aim, nth, after, which)


def in_a_collection(seconds: float) -> None:
    """Runs the command line, and has SIGTERM come within the first collection after so long."""
    due = time.monotonic() + seconds

    def comes(phase: str, _: dict[str, int]) -> None:
        if phase == "start" and time.monotonic() > due:
            gc.callbacks.remove(comes)
            signal.raise_signal(signal.SIGTERM)

    gc.callbacks.append(comes)
    __main__.main()


def _kind(name: str) -> str:
    """What a name that appears among the checkpoints says: a step, or on the way to or from one."""
    return COMMIT if name.isdigit() else REMOVE if name.endswith(".removed") else SAVE


class Watch:
    """Counts what happens in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = self._checkpoints()
        self._files = {name: self._stat(name) for name in (METRICS, archive.FILE)}

    def look(self) -> list[str]:
        """Returns the aims that happened since the last look."""
        happened = []
        names, before = self._checkpoints(), self._names
        self._names = names
        for name in names - before:
            happened.append(_kind(name))
        for name, aim in ((METRICS, LINE), (archive.FILE, READING)):
            now, was = self._stat(name), self._files[name]
            self._files[name] = now
            if was is None or now is None or now == was:
                continue
            if now[0] != was[0]:
                happened.append(RESUME)  # replaced by a copy without its last lines
            elif now[1] > was[1]:
                happened.append(aim)
        return happened

    def _checkpoints(self) -> set[str]:
        try:
            return set(os.listdir(self._folder / "checkpoints")) - BESIDE
        except OSError:
            return set()

    def _stat(self, name: str) -> tuple[int, int] | None:
        try:
            found = os.stat(self._folder / name)
        except OSError:
            return None
        return found.st_ino, found.st_size


def arrives(
    process: Popen, watch: Watch, moment: Moment | None, longest: float, stop: threading.Event
) -> bool:
    """Waits until the moment has come (True) or the process has ended (False).

    Raises TimeoutError for a process that lives longer than `longest` seconds, and
    InterruptedError when `stop` is set.
    """
    began = time.monotonic()
    due = began + moment.seconds if moment and not moment.nth else None
    left = moment.nth if moment else 0
    while process.poll() is None:
        now = time.monotonic()
        if due is not None and now >= due:
            return True
        if due is None and moment:
            left -= watch.look().count(moment.aim)
            due = now + moment.seconds if left <= 0 else None
        if stop.is_set():
            raise InterruptedError("stopped")
        if now - began > longest:
            raise TimeoutError(f"it had not ended after {now - began:.0f} s")
        time.sleep(POLL)
    return False


# ---------------------------------------------------------------- what was hit


@dataclasses.dataclass(frozen=True)
class Seen:
    """What lies in a run's folder."""

    saved: tuple[int, ...]  # finished steps
    unfinished: tuple[str, ...]  # other names among them, of what is written or removed
    lines: Mapping[str, int]  # finished lines of each of FILES
    torn: tuple[str, ...]  # those of FILES whose last line has no end
    files: tuple[tuple[int, int], ...]  # inode and time of each of FILES
    kept: tuple[int, int]  # the same of the turns of a rollout under way; (0, 0) for none


def see(folder: Path) -> Seen:
    """Looks at a run's folder, which need not be there."""
    checkpoints = folder / "checkpoints"
    names = sorted({*os.listdir(checkpoints)} - BESIDE) if checkpoints.is_dir() else []
    text = {name: _read(folder / name) for name in FILES}
    return Seen(
        tuple(steps_in(checkpoints)),
        tuple(name for name in names if not name.isdigit()),
        {name: found.count(b"\n") for name, found in text.items()},
        tuple(name for name, found in text.items() if found and not found.endswith(b"\n")),
        tuple(_when(folder / name) for name in FILES),
        _when(folder / partial_rollout.FILE),
    )


def place(before: Seen, after: Seen) -> str:
    """Returns which of PLACES a kill hit, from what lay there before and after the process."""
    if any(after.kept) and after.kept != before.kept:
        return KEPT
    if not after.saved:
        return NOTHING_SAVED
    logged = after.lines[METRICS] > after.saved[-1]
    if before.saved == after.saved and before.files == after.files:
        return STARTING
    if before.saved == after.saved and not logged:
        return CUT_BACK
    if after.unfinished:
        return SAVING if SAVE in map(_kind, after.unfinished) else REMOVING
    if after.torn:
        return TORN
    if len({after.lines[name] for name in (METRICS, LEDGER, TIMINGS)}) > 1:
        return UNEVEN
    return LOGGED if logged else AT_REST


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _when(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
