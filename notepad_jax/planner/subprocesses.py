"""A pool of child processes for work that may kill them: a compiler that crashes or runs out.

`run` has a few children answer questions about items, each in a process of its own that is
started afresh and begins with `begin`; the worker that this returns lives in the child. An item
whose child dies has the answer `Died`, its place is taken by a new child, and the others' work
goes on. Exceptions travel back and end the work. A child's standard error is kept from the
screen and read when it has died. Above: `cost_analysis`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import queue
import re
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from notepad_jax.waiting import ended_by, look

CONTEXT = multiprocessing.get_context("spawn")  # a fork of a process with jax in it may hang
# Of all that a dying process writes, the line that says why.
TELLING = re.compile(r"Check fail|RET_CHECK|overflow|Fatal|\] F\d|^F\d{4}|bad_alloc|\*\*\* SIG")
LONGEST = 300  # characters of it


class InChild(Protocol):
    """The interface of a worker, which lives in a child process."""

    def key(self, item: int) -> str:
        """Prepares an item; equal keys have equal answers."""

    def answer(self, item: int) -> Any:
        """Returns the answer for the item whose key was asked for last."""


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


def run(
    begin: Callable[[], InChild],
    items: Sequence[int],
    workers: int,
    known: dict[str, Any],
    done: Callable[[int], None],
) -> Mapping[int, Any]:
    """Returns every item's answer, or how its process ended.

    Args:
      begin: called in each child; must be picklable.
      items: what is asked for, in this order.
      workers: children at work at once.
      known: answers by key; what is there is not looked for again, what is found is put there.
      done: called after each item, by one thread at a time.
    Raises:
      what a worker raises; the children are then ended.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    found: dict[int, Any] = {}
    stopped, lock = threading.Event(), threading.Lock()

    def serve(desk: _Desk) -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            answer = desk.answer(item, known)
            with lock:
                found[item] = answer
                done(item)

    with tempfile.TemporaryDirectory() as folder:
        desks = [_Desk(begin, Path(folder, str(n))) for n in range(min(workers, len(items)))]
        pool = concurrent.futures.ThreadPoolExecutor(max(1, len(desks)))
        try:
            with ended_by(lambda: [desk.close() for desk in desks]):
                for one in concurrent.futures.as_completed([pool.submit(serve, d) for d in desks]):
                    look()
                    one.result()
        finally:
            stopped.set()
            for desk in desks:
                desk.close()
            pool.shutdown()
            for desk in desks:
                desk.wait()
    return found


class _Desk:
    """A slot of the pool, one child at a time; asked by one thread, and closed by any."""

    def __init__(self, begin: Callable[[], InChild], said: Path) -> None:
        self._begin, self._said = begin, said
        self._closing = threading.Lock()
        self._closed = False
        self._process: Any = None
        self._pipe: Any = None

    def answer(self, item: int, known: dict[str, Any]) -> Any:
        key = self._ask("key", item)
        if isinstance(key, Died):
            return key
        if key not in known:
            answer = self._ask("answer", item)
            if isinstance(answer, Died):
                return answer
            known[key] = answer
        return known[key]

    def _ask(self, question: str, item: int) -> Any:
        try:
            if self._process is None:
                self._start()
            self._pipe.send((question, item))
            answer = self._pipe.recv()
        except (EOFError, OSError):  # no process is at the other end
            process, self._process = self._process, None
            process.join()
            return Died(process.exitcode, _telling(self._said))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> None:
        self._said.write_bytes(b"")
        self._pipe, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=_work, args=(theirs, self._begin, str(self._said)), daemon=True
        )
        with self._closing:
            process.start()
            if self._closed:
                process.kill()
            self._process = process
        theirs.close()

    def close(self) -> None:
        with self._closing:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def wait(self) -> None:
        """Waits until its process is gone, once it is closed and no thread asks any more."""
        if self._process is not None:
            self._process.join()
            self._pipe.close()


def _telling(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    lines = [" ".join(line.split()) for line in lines if line.strip()]
    told = next((line for line in lines if TELLING.search(line)), lines[-1] if lines else "")
    return told[:LONGEST]


# ---------------------------------------------------------------- in a child


def _work(pipe: Connection, begin: Callable[[], InChild], said: str) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    worker = functools.cache(begin)
    while True:
        try:
            question, item = pipe.recv()
        except EOFError:  # no process is left to ask
            return
        try:
            answer = worker().key(item) if question == "key" else worker().answer(item)
        except Exception as error:  # the parent gets all there is to know
            error.add_note(traceback.format_exc())
            answer = error
        pipe.send(answer)
