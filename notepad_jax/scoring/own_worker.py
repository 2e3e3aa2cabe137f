"""Calls a user's reward in a process of its own: run as a file, not imported.

`own` starts it with the function's name and the working folder, then writes questions to its
stdin, one JSON line each (`answer`, `row`), and reads one JSON line each from its stdout
(`value` and `shown`, or `raised`). A first line says that it is ready, or why not. What the
function prints goes to standard error. A thread ends the process when its stdin does: then
nobody is left to read an answer, and `own` ends it when it takes too long.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import numbers
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def found(name: str) -> Callable[..., Any]:
    """Returns the function of `module:function` or `file.py:function`; ValueError in one line."""
    module, _, path = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            here = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(here)
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


def answered(function: Callable[..., Any], question: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(question["answer"], question["row"])
    except BaseException as problem:
        return {"raised": f"{type(problem).__name__}: {problem}"}
    number = float(value) if isinstance(value, numbers.Real) else None
    return {"value": number, "shown": repr(value)[:200]}


def listen(questions: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        questions.put(line)
    os._exit(0)


def main() -> None:
    name, folder = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    sys.path[0] = folder  # in the place of this file's own
    replies, sys.stdout = sys.stdout, sys.stderr  # what the function prints is no reply
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(questions,), daemon=True).start()
    try:
        function, greeting = found(name), {}
    except ValueError as problem:
        function, greeting = None, {"failure": str(problem)}
    print(json.dumps(greeting), file=replies, flush=True)
    while True:
        print(json.dumps(answered(function, json.loads(questions.get()))), file=replies, flush=True)


if __name__ == "__main__":
    main()
