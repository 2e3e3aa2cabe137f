"""Partial rollouts: one that was stopped or killed is resumed from a file of its finished turns.

What is kept are the turns that had ended (`engine.replay`); everything else of a rollout follows
from them and the checkpoint: the draws, the prompts, the memory of every reading, the noise. So
the file lies beside the checkpoints, belongs to one step of one run, and leaves when that step is
done. Where it does not fit, or was damaged, one line says so, and the step is drawn again: what
comes out is the same, it only takes longer.

A run that is told to stop writes all turns that have ended. A kill gives no notice, so turns are
written as they end as well, so many at a time, in a thread of its own: no launch waits for a disk.
Above: train; below: stopping, engine.journal.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from notepad_jax import keys
from notepad_jax.engine import journal
from notepad_jax.engine.replay import Given, Replay, Replays
from notepad_jax.parallel import hosts
from notepad_jax.setup.stopping import Stop
from notepad_jax.telemetry.identity import half_written

FILE, OTHERS = "under_way.jsonl", "under_way-{}.jsonl"
# What a run may change and go on with its turns; which policy it is, its content says.
FREE = (
    "steps", "policy", "start.folder", "checkpoint.folder", "checkpoint.keep_turns", "sinks"
)  # fmt: skip
BESIDE = "validation."  # what is measured between rollouts changes none of them

T = TypeVar("T")


class UnderWay:
    """Keeps the turns of the rollout under way in a file; one `rolled` and one `done` a step.

    `settings` are what the turns depend on, beside the step: JSON values, compared by key. Turns
    are kept in segments of `keep_turns`; with 0 only when the run is told to stop.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], stop: Stop, say: Callable[[str], None],
        keep_turns: int = 0,
    ):  # fmt: skip
        self.stop = stop
        self.replays = Replays(self._ended)
        # A file of its own for each process: it keeps the turns of its own engine.
        self._path = folder / (FILE if hosts.first() else OTHERS.format(hosts.index()))
        self._settings, self._say = settings, say
        self._step: int | None = None  # whose turns the file has; None: there is no file
        self._turns: Mapping[int, Given] = {}  # which it has, until their step comes
        self._header: Mapping[str, Any] = {}
        self._rolling: Mapping[str, Any] | None = None  # the header of the step that is made
        self._keep_turns = keep_turns
        self._new: dict[int, Given] = {}  # ended, and in no segment yet
        self._counting = threading.Lock()  # over what is new: engines have threads of their own
        self._writing = threading.Lock()  # over the file, and which rollout it has
        self._file: Mapping[str, Any] | None = None  # the header of the rollout it was begun for
        self._unkept: str | None = None  # why a segment could not be written
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "keeps turns")

    def around(self, executor: Any) -> Replay:
        """Returns the executor through which an engine has to run."""
        return self.replays.around(executor)

    def take_up(self, saved: int) -> None:
        """Reads what an earlier process kept, if it did; a line says what cannot be used.

        It leaves if its step is among those that are `saved`: when another process is gone, this
        one keeps a rollout whose step the first has just saved, and that may be the run's last.
        """
        half_written(self._path).unlink(missing_ok=True)  # of a process that was killed
        if not self._path.exists():
            return
        self._step = 0  # of no use to any step, until it proves to be
        try:
            header, turns = journal.read(self._path)
        except ValueError as problem:
            self._say(f"{problem}; its rollout is made anew")
            return
        theirs, ours = keys.flat(header["settings"]), keys.flat(self._settings)
        for key in sorted(theirs.keys() | ours.keys()):
            if key in FREE or key.startswith(BESIDE):
                continue
            if theirs.get(key) != ours.get(key):
                self._say(
                    f"{self._path} was kept with {key} = {theirs.get(key)!r}, and now it is "
                    f"{ours.get(key)!r}; its rollout is made anew"
                )
                return
        self._step, self._header, self._turns = header["step"], header, turns
        self.done(saved)

    async def rolled(
        self, step: int, version: int, draw: int, rollout: Coroutine[Any, Any, T]
    ) -> T:
        """Awaits the rollout of `step`, by policy `version`, from ordinal `draw` on.

        If the run is asked to stop meanwhile, the turns that have ended are kept, and Stopped is
        raised; those that run are begun again. Raises what `rollout` raises.
        """
        header = {"step": step, "version": version, "draw": draw, "processes": hosts.count()}
        header["engines"] = len(self.replays.each)
        known, self._rolling, self._new = self._known(header), header, {}
        self.replays.begin(known)
        rolling = await self.stop.until(rollout)
        if self.stop.number is None or (not rolling.cancelled() and rolling.exception()):
            # A request to stop from here on lets the step end; should that not be granted, the
            # rollout is kept nevertheless.
            self.stop.keep = self.keep
            result = rolling.result()
            self._rolled(header)
            return result
        self._keep(header)
        ended = len(self.replays.turns)
        self.stop.check(f"in the rollout of step {step}, of which {ended:,} turns are kept")

    def keep(self) -> None:
        """Keeps what has ended of the step that is made, from any thread, if that is possible."""
        if self._rolling is not None:
            with contextlib.suppress(OSError):  # a full disk is no reason to break off the step
                self._keep(self._rolling)

    def done(self, saved: int) -> None:
        """After a step: the file leaves if its step is among those that are `saved`."""
        self.stop.keep = self._rolling = None
        with self._writing:
            if self._step is not None and self._step <= saved:
                for path in self._leaving():
                    path.unlink(missing_ok=True)
                self._step = None

    def _leaving(self) -> list[Path]:
        """The files that a step that is done leaves behind: of more processes than now, too."""
        return [self._path, *self._path.parent.glob(OTHERS.format("*"))]

    def _known(self, header: Mapping[str, Any]) -> Mapping[int, Given]:
        if self._step != header["step"]:
            return {}
        turns, self._turns = self._turns, {}
        for name, value in header.items():
            if self._header.get(name) != value:
                self._say(
                    f"{self._path} begins with {name} {self._header.get(name)}, and this step "
                    f"with {value}; its rollout is made anew"
                )
                return {}
        self._say(f"step {header['step']} goes on with the {len(turns):,} turns that had ended")
        return turns

    def _keep(self, header: Mapping[str, Any]) -> None:
        with self._writing:
            self._begin(header)

    def _begin(self, header: Mapping[str, Any]) -> None:
        # On a host that is not the first's, the run's folder was not made yet.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        journal.begin(self._path, {**header, "settings": self._settings}, self.replays.turns)
        self._step, self._file = header["step"], header

    # ------------------------------------------------------------ in segments

    def _ended(self, seed: int, given: Given) -> None:
        """Notes a turn of the rollout; when a segment is full, it is written meanwhile."""
        # The file may have the turns of a later step, which a run killed there comes back to.
        # What is validated between two rollouts is of none.
        if not self._keep_turns or self._turns or self._rolling is None:
            return
        with self._counting:
            self._new[seed] = given
            if len(self._new) < self._keep_turns:
                return
            segment, self._new = self._new, {}
        self._thread.submit(self._append, self._rolling, segment)

    def _rolled(self, header: Mapping[str, Any]) -> None:
        """Has the last turns of a rollout kept, if there is a file of it; says what was not."""
        if self._new and self._file is header:
            self._thread.submit(self._append, header, self._new)
        if self._unkept is not None:
            self._say(
                f"{self._path} cannot be written ({self._unkept}); if the run is killed, what "
                f"was not written is computed again"
            )
            self._unkept = None

    def _append(self, header: Mapping[str, Any], segment: Mapping[int, Given]) -> None:
        with self._writing:
            if header is not self._rolling:  # its step is done
                return
            try:
                if self._file is header:
                    journal.append(self._path, segment)
                else:
                    self._begin(header)
            except (OSError, ValueError) as problem:
                self._file = None  # the next segment begins the file anew
                self._unkept = getattr(problem, "strerror", None) or str(problem)
