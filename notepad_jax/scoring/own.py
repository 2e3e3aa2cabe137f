"""Rewards that a user wrote: a function of the answer and its row, worth a number from 0 to 1.

    def reward(answer: str, row: dict) -> float: ...

`row` has id, question, answers, source, metric and the row's own further columns. A function by
name runs in a process of its own (`own_worker.py`, a `worker`); one that was lent as an object
(`functions`) runs in a thread here. Either has `MAX_SECONDS` on the clock for an answer. Whatever
is not a number from 0 to 1 ends in one line that names the function: a reward that fails is a
mistake to mend, and no answer's fault. Above: rollout.rewards; below: worker and functions.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from notepad_jax import functions
from notepad_jax.scoring import worker

WORKER = pathlib.Path(__file__).parent / "own_worker.py"
MAX_SECONDS = 60.0  # on the clock, for one answer
START = 300.0  # seconds in which a module has to be imported

Judge = Callable[[str, Mapping[str, Any]], float]  # (answer, row) -> worth, from 0 to 1


class RewardFailed(ValueError):
    """A reward that is no number from 0 to 1."""


def named(name: str, key: str) -> Judge:
    """Returns the reward of a name that `key` of a config holds, ready to judge.

    Raises ValueError, in one line, where there is none. The judge raises RewardFailed.
    """
    function = functions.lent(name)
    if function is not None:
        return functools.partial(_here, name, function)
    if name.startswith("__main__:"):
        functions.named(name, key)  # says where it can be found
    process = worker.Worker([sys.executable, str(WORKER), name, os.getcwd()], START, quiet=False)
    try:
        process.start()
    except worker.DoesNotStart as problem:
        raise ValueError(f"{key} is {name!r}, {problem}") from None
    return functools.partial(_there, name, process)


def _here(name: str, function: functions.Function, answer: str, row: Mapping[str, Any]) -> float:
    """Calls a function in a thread, which is left behind if it does not come back."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(function(answer, dict(row)))
        except BaseException as problem:
            found.append(_Raised(problem))

    thread = threading.Thread(target=call, name=f"reward {name}", daemon=True)
    thread.start()
    thread.join(MAX_SECONDS)
    if not found:
        raise _failed(name, row, f"had not answered after {MAX_SECONDS:g} s")
    if isinstance(found[0], _Raised):
        problem = found[0].problem
        raise _failed(name, row, f"raised {type(problem).__name__}: {problem}") from problem
    return _checked(name, row, found[0], repr(found[0]))


def _there(name: str, process: worker.Worker, answer: str, row: Mapping[str, Any]) -> float:
    """Asks the process, which is ended if it does not reply."""
    try:
        reply = process.ask({"answer": answer, "row": dict(row)}, MAX_SECONDS)
    except TimeoutError:
        late = f"had not answered after {MAX_SECONDS:g} s, and was stopped"
        raise _failed(name, row, late) from None
    except worker.Ended as end:
        raise _failed(name, row, f"ended its process (code {end.code})") from None
    if "raised" in reply:
        raise _failed(name, row, f"raised {reply['raised']}")
    return _checked(name, row, reply["value"], reply["shown"])


class _Raised:
    def __init__(self, problem: BaseException) -> None:
        self.problem = problem


def _checked(name: str, row: Mapping[str, Any], value: Any, shown: str) -> float:
    if not isinstance(value, numbers.Real) or math.isnan(value) or not 0 <= value <= 1:
        raise _failed(name, row, f"returned {shown:.80}; a reward is a number from 0 to 1")
    return float(value)


def _failed(name: str, row: Mapping[str, Any], what: str) -> RewardFailed:
    return RewardFailed(f"the reward {name} {what} (row {row.get('id')!r})")
