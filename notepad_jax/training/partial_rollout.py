"""The rollout under way: stopped between two launches, kept in a file, and gone on with.

What is kept are the turns that had ended (`engine.replay`); everything else of a rollout follows
from them and the checkpoint: the draws, the prompts, the memory of every reading, the noise. So
the file lies beside the checkpoints, belongs to one step of one run, and leaves when that step is
done. Where it does not fit, or was damaged, one line says so, and the step is drawn again: what
comes out is the same, it only takes longer. Above: train; below: stopping, engine.journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from notepad_jax import keys
from notepad_jax.engine import journal
from notepad_jax.engine.replay import Given, Replay
from notepad_jax.parallel import hosts
from notepad_jax.setup.stopping import Stop

FILE, OTHERS = "under_way.jsonl", "under_way-{}.jsonl"
# What a run may change and go on with its turns; which policy it is, its content says.
FREE = ("steps", "policy", "start.folder", "checkpoint.folder", "sinks")
BESIDE = "validation."  # what is measured between rollouts changes none of them

T = TypeVar("T")


class UnderWay:
    """What a run keeps of its rollouts; one `rolled` and one `done` a step.

    `settings` are what the turns depend on, beside the step: JSON values, compared by key.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], stop: Stop, say: Callable[[str], None]
    ):
        self.stop = stop
        self.replays: list[Replay] = []  # one an engine
        # A file of its own for each process: it keeps the turns of its own engine.
        self._path = folder / (FILE if hosts.first() else OTHERS.format(hosts.index()))
        self._settings, self._say = settings, say
        self._step: int | None = None  # whose turns the file has; None: there is no file
        self._turns: Mapping[int, Given] = {}  # which it has, until their step comes
        self._header: Mapping[str, Any] = {}
        self._rolling: Mapping[str, Any] | None = None  # the header of the step that is made

    def around(self, executor: Any) -> Replay:
        """Returns the executor through which an engine has to run."""
        self.replays.append(Replay(executor))
        return self.replays[-1]

    @property
    def turns(self) -> Mapping[int, Given]:
        """Of this rollout, by seed, those that have ended."""
        # Copied first, and at once: another thread may ask while turns end (`keep`).
        every = [dict(one.turns) for one in self.replays]
        return {seed: given for turns in every for seed, given in turns.items()}

    @property
    def replayed(self) -> int:
        """Turns that were known when they were asked for."""
        return sum(one.replayed for one in self.replays)

    def take_up(self, saved: int) -> None:
        """Reads what an earlier process kept, if it did; a line says what cannot be used.

        It leaves if its step is among those that are `saved`: when another process is gone, this
        one keeps a rollout whose step the first has just saved, and that may be the run's last.
        """
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
        header["engines"] = len(self.replays)
        known, self._rolling = self._known(header), header
        for one in self.replays:
            one.begin(known)
        rolling = await self.stop.until(rollout)
        if self.stop.number is None or (not rolling.cancelled() and rolling.exception()):
            # Whoever asks from here on lets the step end; should that not be granted, the
            # rollout is kept nevertheless.
            self.stop.keep = self.keep
            return rolling.result()
        self._keep(header)
        ended = len(self.turns)
        self.stop.check(f"in the rollout of step {step}, of which {ended:,} turns are kept")

    def keep(self) -> None:
        """Keeps what has ended of the step that is made, from any thread, if that is possible."""
        if self._rolling is not None:
            with contextlib.suppress(OSError):  # a full disk is no reason to break off the step
                self._keep(self._rolling)

    def done(self, saved: int) -> None:
        """After a step: the file leaves if its step is among those that are `saved`."""
        self.stop.keep = self._rolling = None
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
        # On a host that is not the first's, nobody has made the run's folder.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        journal.write(self._path, {**header, "settings": self._settings}, self.turns)
        self._step = header["step"]
