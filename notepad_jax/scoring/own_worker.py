"""The worker process that calls a user's reward: run as a file, not imported.

`own` starts it with the function's name and the working folder, then writes questions to its
stdin, one JSON line each (`number`, `readings`), and reads replies from its stdout, one JSON line
each as they come (`number`, and a CallResult's fields). A first line says how the function is
called, or why it cannot be. What the function prints, and what it starts, goes to standard error.
A thread ends the process when its stdin does: then no process is left to read an answer, and
`own` ends it when it takes too long. A function that never lets go of the interpreter (some regular
expressions) keeps that thread waiting, too; then a limit on CPU time ends what `own` has left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parents[2]  # where the package lies, which it may not be found without
# CPU seconds of each core, beside a call's limit ten times, in which no other thread came to run
SPARE = 60.0


def found(name: str) -> Callable[..., Any]:
    """Returns the function of `module:function` or `file.py:function`; ValueError in one line."""
    module, _, path = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            here = functions.executed(spec)
        else:
            here = importlib.import_module(module)
    except BaseException as problem:  # SystemExit, too: a module may do anything
        raise ValueError(
            f"which cannot be imported: {type(problem).__name__}: {problem}"
        ) from problem
    for part in path.split("."):
        here = getattr(here, part, None)
    if not callable(here):
        raise ValueError(f"but {module} has no function {path}")
    return here


async def answer(function: Callable[..., Any], line: bytes, replies: IO[str]) -> None:
    question = json.loads(line)
    readings = [reading_record.understood(fields) for fields in question["readings"]]
    batch = own_calls.calls_of(function).batch
    outcome = await own_calls.called(function, readings if batch else readings[0])
    said = {"value": outcome.value, "shown": outcome.shown, "raised": outcome.raised}
    print(json.dumps({"number": question["number"], **said}), file=replies, flush=True)


async def serve(function: Callable[..., Any], replies: IO[str]) -> None:
    loop, running = asyncio.get_running_loop(), set()

    def begin(line: bytes) -> None:
        task = loop.create_task(answer(function, line, replies))
        running.add(task)  # a loop alone does not hold on to its tasks
        task.add_done_callback(running.discard)

    def listen() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(begin, line)
        os._exit(0)

    def wind() -> None:
        """Sets the limit anew for as long as threads come to run; its signal needs none."""
        while True:
            seconds = 10 * own_calls.calls_of(function).seconds + SPARE
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds * (os.cpu_count() or 1))
            time.sleep(0.1)

    for work in (listen, wind):
        threading.Thread(target=work, daemon=True).start()
    await asyncio.Event().wait()


def main() -> None:
    name, folder = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        function = found(name)
        if fault := own_calls.fault(function):
            raise ValueError(fault)
        greeting = dataclasses.asdict(own_calls.calls_of(function))
    except ValueError as problem:
        function, greeting = None, {"failure": str(problem)}
    print(json.dumps(greeting), file=replies, flush=True)
    if function is not None:
        asyncio.run(serve(function, replies))


if __name__ == "__main__":
    sys.path[0] = sys.argv[2]  # the working folder, in the place of this file's own
    sys.path.append(str(HERE))
    from notepad_jax import functions
    from notepad_jax.scoring import own_calls, reading_record

    main()
