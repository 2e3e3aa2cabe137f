"""User callbacks: functions that are called after every training step, and may end the run.

    def callback(step: int, metrics: dict[str, float]) -> bool | None: ...

They are called when a step is learnt and handed over, in all processes of a run, in their order.
One that returns False or raises `Stop` ends the run there, as its last step would. Above: `api`;
called by train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from notepad_jax import functions
from notepad_jax.parallel import hosts

Callback = Callable[[int, dict[str, float]], Any]


class Stop(Exception):
    """Raised by a callback: the run ends with this step."""


class CallbackFailed(ValueError):
    """A callback raised something else."""


def checked(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks as they came. Raises ValueError for one that could not be called."""
    if not isinstance(callbacks, list | tuple):
        raise ValueError(f"callbacks is {callbacks!r:.80}; give a list, of one function or more")
    for callback in callbacks:
        if not callable(callback):
            raise ValueError(f"the callback {callback!r:.80} is no function; give one")
        name = functions.name_of(callback)
        if functions.is_coroutine(callback):
            raise ValueError(
                f"the callback {name} is a coroutine function, which nobody here awaits; "
                f"give one that is called (def, not async def)"
            )
        if not functions.takes(callback, 0, {}):
            raise ValueError(f"the callback {name} cannot be called with (step, metrics)")
    return list(callbacks)


def go_on(callbacks: Sequence[Callback], step: int, metrics: Mapping[str, float]) -> bool:
    """Calls all callbacks; returns whether the run goes on. One process that does not ends all.

    Raises CallbackFailed, which names the callback; the step is done then, and the run goes on
    from it when it is resumed.
    """
    if not callbacks:
        return True

    def wanted() -> bool:
        return all([_wants_more(callback, step, dict(metrics)) for callback in callbacks])

    return all(hosts.all_gather(wanted))


def _wants_more(callback: Callback, step: int, metrics: dict[str, float]) -> bool:
    try:
        said = callback(step, metrics)
        return not isinstance(said, bool | np.bool_) or bool(said)  # numpy's comparisons, too
    except Stop:
        return False
    except Exception as problem:
        raise CallbackFailed(
            f"the callback {functions.name_of(callback)} failed after step {step}: "
            f"{type(problem).__name__}: {problem}"
        ) from problem
