r"""Are two formulas equal? Asked of math-verify, in a worker process that can be killed.

math-verify parses LaTeX and compares with sympy, which may compute for ever and whose own
time limits need the main thread's signals. So it runs in `symbolic_worker.py`: one process,
started when the first formula comes, used by all threads in turn, replaced when it dies.
The worker's limits are the kernel's: MAX_SECONDS of computing for a question, rounded up
to its whole seconds (not seconds on the clock: a busy machine must not change a reward),
and MAX_MEMORY. It ends itself when this process is gone, however that went. Asking blocks
the caller, so that it works from any thread and under asyncio. Above: quantities.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from notepad_jax.scoring.extraction import Malformed

WORKER = pathlib.Path(__file__).parent / "symbolic_worker.py"
MAX_SECONDS = 2  # of computing for one answer, all gold answers together; 3 at the most
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_WAIT = 60  # seconds on the clock, for a machine that is busy with other things
MAX_CHARACTERS = 300  # of a formula
MAX_DEPTH = 12  # of brackets; the parser's time grows like 1.4 to their power

_MATHEMATICS = re.compile(r"[A-Za-z0-9\s+\-*/^_=<>|!%.,;:'&(){}\[\]\\πθφ√∞±×÷·≤≥≠∪∩°]+")
_SIGN = re.compile(r"[0-9\\+*/^=√π∞]")
_WORD = re.compile(r"\\[A-Za-z]+|[A-Za-z]{3,}")
_FUNCTIONS = frozenset("sqrt sin cos tan cot log exp sec csc arcsin arccos arctan abs inf".split())


def formula(text: str) -> bool:
    """Whether it is worth asking: short, shallow, of mathematical signs, no words in it."""
    if len(text) > MAX_CHARACTERS or not _MATHEMATICS.fullmatch(text) or not _SIGN.search(text):
        return False
    words = (word for word in _WORD.findall(text) if not word.startswith("\\"))
    depth = itertools.accumulate((c in "([{") - (c in ")]}") for c in text)
    return max(depth) <= MAX_DEPTH and _FUNCTIONS.issuperset(words)


def equal(said: str, golds: Sequence[str]) -> bool:
    """Whether `said` equals one of the gold formulas (at most 16 are asked about).

    Floats are compared to six decimals. Raises Malformed: `unreadable_formula`, or
    `too_hard` where the worker's limits ended it.
    """
    reply = _worker.ask({"said": said, "golds": list(golds)[:16]})
    if reply is None:
        raise Malformed("too_hard")
    if not reply["readable"]:
        raise Malformed("unreadable_formula")
    return reply["equal"]


class Worker:
    """Owns the process, its pipes and the lock around them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def ask(self, question: dict[str, object]) -> dict[str, bool] | None:
        """Returns the reply, or None where the limits ended the worker.

        A worker that ended otherwise (somebody killed it, the memory was out) is replaced
        and asked once more.
        """
        with self._lock:
            try:
                for _ in range(2):
                    reply = self._exchange(question)
                    if reply is not None:
                        return reply
                    if self._stop() == -signal.SIGXCPU:
                        break
                return None
            except TimeoutError:
                self._stop()
                return None
            except BaseException:  # Ctrl-C while waiting: the next reply would be the wrong one
                self._stop()
                raise

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _exchange(self, question: dict[str, object]) -> dict[str, bool] | None:
        process = self._running()
        with contextlib.suppress(BrokenPipeError):  # then there is no line to read either
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        return _line(process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process and self._process.poll() is None:
            return self._process
        self._stop()
        limits = [str(MAX_SECONDS), str(MAX_MEMORY)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy orders by hashes here and there
        )
        greeting = _line(self._process)
        if greeting is None or "failure" in greeting:
            self._stop()
            raise ValueError(
                "an answer is a formula, and math-verify does not start "
                f"({(greeting or {}).get('failure', 'no greeting')}); pip install math-verify"
            )
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


def _line(process: subprocess.Popen[bytes]) -> dict | None:
    """Returns the worker's next line, None if it ended; TimeoutError after MAX_WAIT seconds."""
    until = time.monotonic() + MAX_WAIT
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


_worker = Worker()
atexit.register(_worker.close)
# A fork starts its own: two processes on the same pipes would read each other's replies.
os.register_at_fork(after_in_child=_worker.__init__)
