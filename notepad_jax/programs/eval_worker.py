"""One worker process of an evaluation: it loads the policy, and makes the readings it is asked for.

What it tells goes through its pipe: ("loaded", fingerprint of the weights), ("turns", share, how
many), ("result", result, memories, turns if kept), ("ended", share), ("failure", error) of a first
reading that fails, ("broken", error) of itself, ("work", tokens, turns, seconds) of its engine,
("compiling", 1 or -1).
Above: eval_workers, which deals out and writes down; below: measuring.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from notepad_jax.child import sendable
from notepad_jax.eval.measure import REFRESH, Item, Result
from notepad_jax.eval.readings import OpenTraces
from notepad_jax.programs import measuring, subjects
from notepad_jax.programs.beside import fingerprint_of
from notepad_jax.programs.measuring import Measured
from notepad_jax.reading.loop import first_failure
from notepad_jax.reading.rules import Rules
from notepad_jax.setup import compiled, process
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import SilentScreen


@dataclasses.dataclass(frozen=True)
class Share:
    """The readings of one document, which a worker is asked for."""

    number: int
    limits: Rules
    at_once: int  # readings
    items: tuple[Item, ...]
    whole: tuple[Item, ...]  # those of them of which every turn is kept


def work(config: Config, pipe: Connection) -> None:
    """Reads with `config.policy` for the process at the other end of `pipe`, until it is gone."""
    process.prepared(config)
    said = _Said(pipe)
    try:
        asyncio.run(_serve(config, pipe, said))
    except Exception as error:
        said.send("broken", sendable(error))


async def _serve(config: Config, pipe: Connection, said: _Said) -> None:
    loop, asked = asyncio.get_running_loop(), asyncio.Queue[Share]()
    threading.Thread(target=_listen, args=(pipe, loop, asked, said), daemon=True).start()
    subject = subjects.named(config, said)
    said.send("loaded", fingerprint_of(subject.policy))
    limits: tuple[Rules, int] | None = None
    with first_failure():
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            while True:
                share = await asked.get()
                if (share.limits, share.at_once) != limits:  # then nothing is under way
                    await stack.aclose()
                    opened = measuring.here(
                        config, subject, said, said.failed, share.at_once, share.limits
                    )
                    measured = await stack.enter_async_context(opened)
                    limits = share.limits, share.at_once
                    turns = measuring.turns_of(config, subject, share.limits)
                said.keep_turns(share.whole, turns)
                group.create_task(_read(share, measured, said))


async def _read(share: Share, measured: Measured, said: _Said) -> None:
    await measured(share.items, lambda now: said.send("turns", share.number, now.turns))
    said.tell()
    said.send("ended", share.number)


def _listen(
    pipe: Connection, loop: asyncio.AbstractEventLoop, asked: asyncio.Queue[Share], said: _Said
) -> None:
    while True:
        try:
            share = pipe.recv()
        except (EOFError, OSError):  # no process is left to read for
            os._exit(0)
        except Exception as error:  # what was sent cannot be understood here
            said.send("broken", sendable(error))
            return
        loop.call_soon_threadsafe(asked.put_nowait, share)


class _Said(SilentScreen, OpenTraces):
    """What a worker tells: its readings (`measuring.Keeps`), and what its engine does."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe, self._alone = pipe, threading.Lock()
        self._worked = (0, 0, 0.0)  # tokens, turns and seconds of engines, not told yet
        self._busy, self._compiling = compiled.watched(), 0
        self._failed = False
        threading.Thread(target=self._tell_on, daemon=True).start()

    def send(self, what: str, *told: Any) -> None:
        with self._alone:
            self._pipe.send((what, *told))

    def add(self, result: Result) -> None:
        trace = self.ended(result)
        self.send("result", result, trace.memories, trace.kept())

    def failed(self, failure: Exception) -> None:
        if not self._failed:  # the first is all that is wanted, and what a document's others have
            self._failed = True
            self.send("failure", sendable(failure))

    def warn(self, text: str) -> None:
        """Says nothing: what there is to say of a policy was said where it was loaded first."""

    def work(self, tokens: int, turns: int, seconds: float) -> None:
        with self._alone:
            a, b, c = self._worked
            self._worked = a + tokens, b + turns, c + seconds

    def tell(self) -> None:
        """Tells what engines did since the last time, and whether jax compiles now."""
        with self._alone:
            worked, self._worked = self._worked, (0, 0, 0.0)
            change = bool(self._busy()) - self._compiling
            self._compiling += change
        if any(worked):
            self.send("work", *worked)
        if change:
            self.send("compiling", change)

    def _tell_on(self) -> None:
        while True:
            time.sleep(REFRESH)
            self.tell()
