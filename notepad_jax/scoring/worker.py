"""A worker process that answers requests, one JSON line each, and can be stopped.

For code that may compute for ever: it runs in a program of its own, started when the first
question comes, used by all threads in turn, replaced when it ends. The program greets with a
first line, `{}` or `{"failure": why}`. Asking blocks the caller, so that it works from any thread
and under asyncio. The process ends with this one, however that goes: its stdin does. Above:
symbolic; `own` has a process that is asked many things at once, and takes the greeting from here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any


class DoesNotStart(ValueError):
    """A worker that does not start, in the program's own words."""


class WorkerEnded(Exception):
    """The process ended without an answer; `code` says how, as Popen.returncode does."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


class Worker:
    """A worker process, with its pipes and the lock around them."""

    def __init__(
        self,
        command: Sequence[str],
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`seconds` on the clock are waited for a line; what it complains is dropped."""
        self._how = tuple(command), seconds, dict(environment or {})
        self._begin()
        # A fork starts its own: two processes on the same pipes would read each other's replies.
        there = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: there() and there()._begin())

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply.

        Raises WorkerEnded where the process ended, TimeoutError where it was stopped for taking
        too long, and DoesNotStart; the next question starts another one.
        """
        with self._lock:
            process = self._running()
            try:
                with contextlib.suppress(BrokenPipeError):  # then there is no line to read either
                    process.stdin.write(json.dumps(question).encode() + b"\n")
                    process.stdin.flush()
                reply = _line(process, self._how[1])
            except BaseException:  # Ctrl-C while waiting: the next reply would be the wrong one
                self._stop()
                raise
            if reply is None:
                raise WorkerEnded(self._stop())
            return reply

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process and self._process.poll() is None:
            return self._process
        self._stop()
        command, seconds, environment = self._how
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        try:
            greeting(self._process, seconds)
        except BaseException:
            self._stop()
            raise
        return self._process

    def _stop(self) -> int | None:
        """Ends the process if there is one; returns how it ended, as Popen.returncode does."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        return process.returncode


def greeting(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    """Returns a program's first line. Raises DoesNotStart where it has none, or a failure."""
    try:
        said = _line(process, seconds)
    except TimeoutError:
        said = {"failure": f"it said nothing for {seconds:g} seconds"}
    if said is None or "failure" in said:
        raise DoesNotStart((said or {}).get("failure", "no greeting"))
    return said


def _line(process: subprocess.Popen[bytes], seconds: float) -> dict | None:
    """Returns the process's next line, None if it ended; TimeoutError after so many seconds."""
    until = time.monotonic() + seconds
    watch = select.poll()  # select() itself would end at 1,024 open files
    watch.register(process.stdout, select.POLLIN)
    said = b""
    while not said.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not watch.poll(1000 * left):
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            return None
        said += part
    return json.loads(said)
