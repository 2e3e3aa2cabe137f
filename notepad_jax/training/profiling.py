"""A profile of some steps of a run: what its devices and threads did, by jax's own profiler.

`--profile STEP` shows where a step's time goes: from the first draw to the last
update, on one time line, with the blocks that `jax.named_scope` names. Python calls are not traced:
a rollout makes millions, and to write them down takes longer than they do. Of several processes the
first records its devices. Only the clock sees it: metrics of a profiled run are those of any other.
Above: train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from notepad_jax.parallel import hosts

FOLDER = "profile"  # in a run's folder
TRACES = "plugins/profile/*/*.trace.json.gz"  # in that, as jax has it


class Profiler:
    """A profiler of the steps `steps`; a context manager around a run's steps.

    `say` is told where the profile lies, or, when the run ends, that none of the steps came.
    """

    def __init__(self, steps: range, folder: Path, say: Callable[[str], None]) -> None:
        self._steps = steps if hosts.first() else range(0)
        self._folder, self._say = folder / FOLDER, say
        self._first = self._last = 0  # of the steps that are recorded so far; 0 before and after

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._first:  # it stopped within them
            self._end()
        elif self._steps:
            self._say(f"no profile: {_named(self._steps)} never came")

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records what is done within, if that is one of the steps."""
        if number not in self._steps:
            yield
            return
        if not self._first:
            self._begin(number)
        self._last = number
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if number == self._steps[-1]:
            self._end()

    def _begin(self, number: int) -> None:
        how = jax.profiler.ProfileOptions()
        how.python_tracer_level = 0
        jax.profiler.start_trace(str(self._folder), profiler_options=how)
        self._first = number

    def _end(self) -> None:
        jax.profiler.stop_trace()
        newest = max(self._folder.glob(TRACES), default=self._folder)
        self._say(
            f"profile of {_named(range(self._first, self._last + 1))}: open {newest} at "
            f"https://ui.perfetto.dev, or with xprof installed: tensorboard --logdir {self._folder}"
        )
        self._steps, self._first = range(0), 0


def _named(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
