"""A pool of child processes for work that may kill them: a compiler that crashes or runs out.

`run` has a few children answer questions about items, each in a process of its own that is
started afresh and begins with `begin`; the worker that this returns lives in the child. An item
whose child dies has the answer `Died`, its place is taken by a new child, and the others' work
goes on. Exceptions travel back and end the work. Above: `cost_analysis`; below: `child`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from notepad_jax.child import Child, Died, sendable
from notepad_jax.waiting import ended_by, look


class InChild(Protocol):
    """The interface of a worker, which lives in a child process."""

    def key(self, item: int) -> str:
        """Prepares an item; equal keys have equal answers."""

    def answer(self, item: int) -> Any:
        """Returns the answer for the item whose key was asked for last."""


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

    desks = [_Desk(begin) for _ in range(min(workers, len(items)))]
    pool = concurrent.futures.ThreadPoolExecutor(max(1, len(desks)))
    try:
        with ended_by(lambda: [desk.kill() for desk in desks]):
            for one in concurrent.futures.as_completed([pool.submit(serve, d) for d in desks]):
                look()
                one.result()
    finally:
        stopped.set()
        for desk in desks:
            desk.kill()
        pool.shutdown()
        for desk in desks:
            desk.close()
    return found


class _Desk:
    """A slot of the pool, one child at a time; asked by one thread, and closed by any."""

    def __init__(self, begin: Callable[[], InChild]) -> None:
        self._begin = begin
        self._closing = threading.Lock()
        self._closed = False
        self._child: Child | None = None

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
        if self._child is None:
            self._start()
        self._child.send((question, item))
        answer = self._child.receive()
        if isinstance(answer, Died):
            child, self._child = self._child, None
            child.close()
        elif isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> None:
        with self._closing:
            self._child = Child(functools.partial(_work, self._begin))
            if self._closed:
                self._child.kill()

    def kill(self) -> None:
        with self._closing:
            self._closed, child = True, self._child
            if child is not None:
                child.kill()

    def close(self) -> None:
        """Waits until its process is gone, once it was killed and no thread asks any more."""
        if self._child is not None:
            self._child.close()


# ---------------------------------------------------------------- in a child


def _work(begin: Callable[[], InChild], pipe: Connection) -> None:
    worker = functools.cache(begin)
    while True:
        question, item = pipe.recv()
        try:
            answer = worker().key(item) if question == "key" else worker().answer(item)
        except Exception as error:  # the parent gets all there is to know
            answer = sendable(error)
        pipe.send(answer)
