"""The worker process that compares formulas with math-verify: run as a file, not imported.

`symbolic` starts it with two limits, seconds of computing for one question and bytes of
memory, then writes questions to its stdin, one JSON line each (`said`, `golds`), and reads
one JSON line each from its stdout (`readable`, `equal`). A first line says that it is
ready, or why not. The kernel ends the process where a question costs more, and a thread
ends it when its stdin does: then no process is left to read an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from typing import Any

try:
    import math_verify
    from math_verify.parser import LatexExtractionConfig

    FAILURE = ""
except ImportError as error:
    FAILURE = str(error)


def formulas(text: str) -> list[Any]:
    """Returns what math-verify reads in one formula, by its LaTeX grammar alone.

    Its other reader hands the text to Python's `eval`.
    """
    return math_verify.parse(
        f"${text}$",
        [LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def answer(question: dict[str, Any]) -> dict[str, bool]:
    said = formulas(question["said"])
    equal = bool(said) and any(
        math_verify.verify(formulas(gold), said, timeout_seconds=None) for gold in question["golds"]
    )
    return {"readable": bool(said), "equal": equal}


def limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit of memory
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def listen(questions: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        questions.put(line)
    os._exit(0)


def main() -> None:
    seconds, memory = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, memory)
    replies, sys.stdout = sys.stdout, sys.stderr  # what the libraries print is no reply
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(questions,), daemon=True).start()
    print(json.dumps({"failure": FAILURE} if FAILURE else {}), file=replies, flush=True)
    while True:
        question = json.loads(questions.get())
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
        try:
            reply = answer(question)
        except Exception:  # sympy may raise anything at all, MemoryError included
            reply = {"readable": False, "equal": False}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
