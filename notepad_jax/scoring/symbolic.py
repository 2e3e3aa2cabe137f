r"""Equality of two formulas, by math-verify in a worker process that can be killed.

math-verify parses LaTeX and compares with sympy, which may compute for ever and whose own
time limits need the main thread's signals. So it runs in `symbolic_worker.py`, a `worker`. Its
limits are the kernel's: MAX_SECONDS of computing for a question, rounded up to its whole seconds
(not seconds on the clock: a busy machine must not change a reward), and MAX_MEMORY. Above:
quantities.
"""

from __future__ import annotations

import atexit
import itertools
import pathlib
import re
import signal
import sys
from collections.abc import Sequence

from notepad_jax.scoring import worker
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
    reply = _asked({"said": said, "golds": list(golds)[:16]})
    if reply is None:
        raise Malformed("too_hard")
    if not reply["readable"]:
        raise Malformed("unreadable_formula")
    return reply["equal"]


def _asked(question: dict[str, object]) -> dict[str, bool] | None:
    """Returns the reply, or None where the limits ended the worker.

    A worker that ended otherwise (it was killed, the memory was out) is asked once more.
    """
    for _ in range(2):
        try:
            return _worker.ask(question)
        except TimeoutError:
            return None
        except worker.WorkerEnded as end:
            if end.code == -signal.SIGXCPU:
                return None
        except worker.DoesNotStart as problem:
            raise ValueError(
                f"an answer is a formula, and math-verify does not start ({problem}); "
                f"pip install math-verify"
            ) from None
    return None


_worker = worker.Worker(
    [sys.executable, "-P", str(WORKER), str(MAX_SECONDS), str(MAX_MEMORY)],
    MAX_WAIT,
    {"PYTHONHASHSEED": "0"},  # sympy orders by hashes here and there
)
atexit.register(_worker.close)
