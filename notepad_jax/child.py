"""A child process: a python started afresh, for work that may kill it or wants cores of its own.

A fork of a process with jax in it may hang, and `multiprocessing` starts a child by running the
user's script once more. A child here runs nothing but its work, which gets one end of a pipe; the
other end is its `Child`'s. It leaves when it asks and no process is at that end, and leaves signals
(Ctrl-C, a SIGTERM to all) to that process. What it prints is kept from the screen, and read when it
has died. Above: planner's `subprocesses` and programs' `eval_workers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from notepad_jax.types import CompleterFailed

# Of all that a dying process writes, the line that says why.
TELLING = re.compile(r"Check fail|RET_CHECK|overflow|Fatal|\] F\d|^F\d{4}|bad_alloc|\*\*\* SIG")
LONGEST = 300  # characters of it
BEGIN = "from notepad_jax.child import begin; begin()"


@dataclasses.dataclass(frozen=True)
class Died:
    """The result in place of an answer: the process that looked for it ended."""

    code: int  # of its exit; negative: the signal that ended it
    said: str  # its telling line; "" where it ended without a word

    @property
    def killed(self) -> bool:
        """Whether it was killed: by a user, or by a system that ran out of memory."""
        return self.code == -signal.SIGKILL

    @property
    def words(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else signal.Signals(-self.code).name
        return how + (f": {self.said}" if self.said else "")


class Child:
    """A process that runs `work(pipe)`, which must be picklable, from the beginning on.

    `cores` are those that it may use (default: this process's), where the system can say so;
    `environment` are variables beside this process's.
    """

    def __init__(
        self, work: Callable[[Connection], None], cores: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._said = tempfile.TemporaryFile()
        self._pipe, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(os.fspath(place) or os.getcwd() for place in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                # -P: its path is this process's, and begins with no folder of its own.
                [sys.executable, "-P", "-c", BEGIN, str(theirs.fileno()), *map(str, cores)],
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {}), "PYTHONPATH": path},
            )  # fmt: skip
        try:
            self.send(work)
        except BaseException:  # it cannot be pickled
            self.close()
            raise

    def send(self, what: Any) -> None:
        """Sends an object; one that has died does not get it, and `receive` says so."""
        packed = pickle.dumps(what)
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(packed)

    def receive(self) -> Any:
        """Waits for what the child sends next; `Died` where it ended instead."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):  # no process is at the other end
            return Died(self._process.wait(), self._telling())

    def kill(self) -> None:
        """Ends the process, from any thread; who waits in `receive` gets `Died`."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and waits until it is gone; no thread may wait in `receive`."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._said.close()

    def _telling(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        lines = [" ".join(line.split()) for line in lines if line.strip()]
        told = next((line for line in lines if TELLING.search(line)), lines[-1] if lines else "")
        return told[:LONGEST]


# ---------------------------------------------------------------- in a child


def begin() -> None:
    """Does the work of this process, a child, which `Child` has started."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    fd, *cores = map(int, sys.argv[1:])
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # before any library counts them
    # They are raised where no process is left to work for.
    with Connection(fd) as pipe, contextlib.suppress(EOFError, BrokenPipeError):
        pipe.recv()(pipe)


def sendable(error: Exception) -> Exception:
    """Returns an error of this process as another one can have it, with its traceback as a note.

    One of a class that cannot be sent is of the nearest that can and that programs tell apart.
    """
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:  # its class is made with other arguments than it has, or is nowhere to find
        nearest = (k for k in (CompleterFailed, ValueError, OSError) if isinstance(error, k))
        sent = next(nearest, RuntimeError)(f"{type(error).__name__}: {error}")
    sent.__notes__ = ["".join(traceback.format_exception(error))]  # and none of those it has
    return sent
