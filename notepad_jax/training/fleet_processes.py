"""Reader processes on the trainer's own machine: started, restarted when they die, ended.

What a cluster does for readers elsewhere (Kubernetes restarts a pod, and its name stays), for a
laptop and for tests. Each is a process of `notepad-jax rollout`, in a session of its own, so that
Ctrl-C reaches the trainer alone, which then tells them to stop. A reader looks whether its parent
is there, so none is left behind by a trainer that was killed. Above: train.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from notepad_jax.parallel import hosts
from notepad_jax.training import fleet_batch
from notepad_jax.training.run import Run

FOLDER = "readers"  # in a run's folder: what each says
IN_A_ROW = 3  # deaths of one reader in one step, after which the run ends
LAST_LINES = 400  # bytes of a reader's file in which its last line is looked for
LEAVING = 5.0  # seconds in which a reader sees that the run has ended
ENDING = 20.0  # seconds that a reader has to keep its turns


@contextlib.contextmanager
def beside(run: Run, folder: Path) -> Iterator[None]:
    """A context in which the readers run that the config wants on this machine, if any."""
    count = run.config.fleet.readers
    if not count or not hosts.first():
        yield
        return
    readers = Readers(str(run.checkpoints.folder.parent), count, folder, run.screen.say)
    with readers.running():
        arrivals = run.fleet.arrivals
        arrivals.look, arrivals.lonely = readers.look, fleet_batch.PATIENT  # they load a policy
        yield


class ReadersFailed(ValueError):
    """A reader process ends again and again."""


class Readers:
    """`count` reader processes for the run at `where`; what they say goes to files in `folder`."""

    def __init__(self, where: str, count: int, folder: Path, say: Callable[[str], None]) -> None:
        self._where, self._folder, self._say = where, folder / FOLDER, say
        self._running: list[subprocess.Popen[bytes]] = []
        self._step, self._deaths = 0, [0] * count

    def begin(self) -> None:
        """Starts the processes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._running = [self._started(number) for number in range(len(self._deaths))]
        some = "a reader reads" if len(self._running) == 1 else f"{len(self._running)} readers read"
        self._say(f"{some} beside; what they say is in {self._folder}")

    def look(self, step: int) -> None:
        """Restarts processes that have ended while `step` is waited for.

        Raises ReadersFailed where that does not help.
        """
        if step != self._step:
            self._step, self._deaths = step, [0] * len(self._deaths)
        for number, one in enumerate(self._running):
            if one.poll() is None:
                continue
            self._deaths[number] += 1
            # A process that was killed has said nothing of it.
            said = (one.returncode >= 0 and self._last_line(number)) or f"exit {one.returncode}"
            if self._deaths[number] == IN_A_ROW:
                raise ReadersFailed(f"reader {number} ended {IN_A_ROW} times: {said}")
            self._say(f"reader {number} ended and is started again: {said}")
            self._running[number] = self._started(number)

    def end(self) -> None:
        """Tells the processes to stop, and waits until they have kept what has ended."""
        for one in self._running:
            with contextlib.suppress(OSError):
                one.terminate()
        for one in self._running:
            try:
                one.wait(ENDING)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[Readers]:
        """A context in which the processes run; where it ends well, so do they."""
        try:
            self.begin()
            yield self
            self._leave()
        finally:
            self.end()

    def _leave(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            for one in self._running:
                one.wait(LEAVING)

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        me, parent = f"reader-{number}", str(os.getpid())
        words = ["rollout", self._where, "--as", me, "--beside", parent]
        with self._file(number).open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "notepad_jax", *words],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.log"

    def _last_line(self, number: int) -> str:
        with self._file(number).open("rb") as file:
            return _last(file)


def _last(file: IO[bytes]) -> str:
    file.seek(0, 2)
    file.seek(max(0, file.tell() - LAST_LINES))
    lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
