"""Calls of a user's reward function: its options, and one call of it.

A plain function runs in a thread of its own, so that many of them block side by side; a coroutine
function in the event loop of its caller. `reward` marks a function that wants anything else than
that: a batch at a time, fewer calls under way, more time. Used where a function was lent (`own`)
and in the process of one by name (`own_worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from notepad_jax import functions
from notepad_jax.scoring.reading_record import ReadingRecord

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__notepad_reward__"


@dataclasses.dataclass(frozen=True)
class Calls:
    """The options of a reward: batches, concurrency, time limit."""

    batch: bool = False  # with a list of readings for a list of results
    at_once: int = 32  # calls under way
    seconds: float = 60.0  # on the clock, for a call

    def __post_init__(self) -> None:
        if not isinstance(self.at_once, int) or self.at_once < 1:
            raise ValueError(f"at_once is {self.at_once!r}; at least 1 call is under way")
        if not isinstance(self.seconds, numbers.Real) or not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds!r}; a call needs more than 0 of them")


@dataclasses.dataclass(frozen=True)
class CallResult:
    """The outcome of a call: a value, or an exception."""

    value: float | list[Any] | None  # a number, or numbers in lists; None: neither
    shown: str  # what it returned, for people
    raised: str = ""  # what it raised instead; "": nothing
    problem: BaseException | None = None  # the same, where it was raised in this process


def reward(*, batch: bool = False, at_once: int = 32, seconds: float = 60.0) -> Callable[[F], F]:
    """Decorates a reward function with options of its calls; returns it otherwise unchanged.

    With `batch` it takes a list of readings (those of one question) and returns a list with what
    each is worth. At most `at_once` calls are under way, each for at most `seconds`. Raises
    ValueError for numbers that cannot be.
    """
    calls = Calls(batch, at_once, seconds)

    def marked(function: F) -> F:
        setattr(function, _MARK, calls)
        return function

    return marked


def calls_of(function: Callable[..., Any]) -> Calls:
    """Returns the options of a function's calls."""
    return getattr(function, _MARK, Calls())


def fault(function: Callable[..., Any]) -> str:
    """Returns what keeps a function from being a reward, in words; "" if nothing does."""
    if functions.takes(function, object()):
        return ""
    what = "(readings), a list" if calls_of(function).batch else "(reading)"
    return (
        f"which cannot be called with one argument; a reward takes {what}, and the answer and the "
        f"row are reading.answer and reading.row"
    )


async def called(
    function: Callable[..., Any], argument: ReadingRecord | Sequence[ReadingRecord]
) -> CallResult:
    """Calls a function and returns the outcome; it raises nothing that the function raises."""
    if not functions.is_coroutine(function):
        return await _in_a_thread(lambda: _outcome(function(argument)))
    try:
        return _outcome(await function(argument))
    except asyncio.CancelledError:
        raise
    except BaseException as problem:  # SystemExit, too: it would end the loop
        return _raised(problem)


async def _in_a_thread(call: Callable[[], CallResult]) -> CallResult:
    """Calls it in a thread, which is left behind if no task waits for it any more."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[CallResult] = loop.create_future()

    def settle(outcome: CallResult) -> None:
        if not found.done():
            found.set_result(outcome)

    def work() -> None:
        try:
            outcome = call()
        except BaseException as problem:
            outcome = _raised(problem)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(settle, outcome)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="reward", daemon=True).start()
    return await found


def _raised(problem: BaseException) -> CallResult:
    return CallResult(None, "", f"{type(problem).__name__}: {problem}", problem)


def _outcome(returned: Any) -> CallResult:
    if inspect.iscoroutine(returned):
        returned.close()  # it is not awaited, and Python need not say so as well
    try:
        value = _numbers(returned, 2)
    except TypeError:
        value = None
    return CallResult(value, f"{returned!r:.200}")


def _numbers(returned: Any, depth: int) -> float | list[Any]:
    """Returns a number, or numbers in at most `depth` lists, as Python's own; or TypeError."""
    if isinstance(returned, numbers.Real):
        return float(returned)
    if not depth or isinstance(returned, str | bytes | Mapping):
        raise TypeError
    return [_numbers(one, depth - 1) for one in returned]
