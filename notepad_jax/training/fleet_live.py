"""A live rollout worker: documents side by side, each turn by the newest published policy.

It takes up as many documents as its engine has slots for, one by one, and puts each when it has
ended. Between two looks it adopts what the trainer has published: turns that run end on the version
they began with, the next ones begin on the new one, and both sets of weights are resident meanwhile
(`EngineService.adopt`). A document may be begun once the reader has a version that its plan lets
read, so no turn is older than that. Which version says a turn depends on the clock, so a document
that is read again comes out otherwise; what is put first is learnt from. Turns that have ended are
put beside every so often (`Progress`), for the reader that goes on with the document: what was said
by a version stays said by it, and the rest is read by the version that it has. Not `engine.replay`,
which repeats launches so that every bit is that of a reader that was not killed: of a live document
no such bits are promised. A reader with room to spare begins what others have begun, once that
takes three times as long as the longest of its own, and drops it for what none has begun. Above:
fleet_reader; below: rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from notepad_jax import waiting
from notepad_jax.checkpoint.handoff import ThroughStorage
from notepad_jax.checkpoint.objects import sealed, unsealed
from notepad_jax.engine.engines import Engines
from notepad_jax.engine.replay import digest
from notepad_jax.engine.service import EngineService
from notepad_jax.rollout import schedule, serialization
from notepad_jax.rollout.collector import Failed
from notepad_jax.rollout.schedule import Bundle
from notepad_jax.setup.stopping import Stop
from notepad_jax.telemetry.identity import IDS, LOGPROBS, array_of, text_of
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training.fleet_batch import Spooled
from notepad_jax.training.fleet_claims import Claims
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import (
    Completer,
    Completion,
    Finish,
    Group,
    Prompt,
    SamplingParams,
    tokens,
)

Made = tuple[list[Group], list[Failed]]


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A bundle that is under way."""

    bundle: Bundle
    since: float
    reading: asyncio.Task[Made]
    progress: Progress
    copy: bool  # another had begun it


@dataclasses.dataclass
class Live:
    """A live reader of a fleet: reads bundles, `room` of them side by side."""

    claims: Claims
    rollouts: Rollouts
    engine: EngineService | Engines
    policies: ThroughStorage
    stop: Stop
    alone: Callable[[], bool]
    screen: Screen
    look: float  # seconds between two looks at what lies there
    room: int  # bundles
    keep_turns: int  # that end between two times that they are put beside; 0: when told to stop
    bundles: int = 0  # read so far
    seconds: float = 0.0  # of reading them, added up
    held: int = -1  # the version that new turns begin on
    begun: dict[str, _Begun] = dataclasses.field(default_factory=dict)  # by name

    async def run(self) -> None:
        """Reads until the run ends; raises Stopped."""
        try:
            while True:
                names = self.claims.objects.names()
                if schedule.ENDED in names or self.alone():
                    return
                begun = self.begun.items()
                await self._let_go(
                    [name for name, one in begun if not schedule.wanted(one.bundle, names)]
                )
                await self._adopt_newest()
                self._put_what_ended()
                await self._take_up(names)
                if self.begun:
                    self.claims.idle_since = None
                elif waits := self.claims.idle(self.held.__ge__):
                    self.screen.say(waits)
                self._keep(self.keep_turns or None)
                if self.stop.number is not None:
                    self._keep(1)
                    kept = sum(one.progress.put for one in self.begun.values())
                    self.stop.check(
                        f"in {len(self.begun)} documents, of which {kept:,} turns are kept"
                    )
                await self._until_next_look()
        finally:
            await self._let_go(list(self.begun))

    async def _adopt_newest(self) -> None:
        newest = self.policies.newest()
        if newest is None or newest <= self.held:
            return
        snapshot = self.policies.adopt()
        if snapshot.version > self.held:
            await self.engine.adopt(snapshot)
            self.held = snapshot.version
            self.screen.say(f"reads on by version {self.held}")

    async def _take_up(self, names: Sequence[str]) -> None:
        """Begins bundles while there is room; one that none has begun takes the place of a copy."""
        while True:
            copies = [name for name, one in self.begun.items() if one.copy]
            full = len(self.begun) >= self.room
            if full and not copies:
                return
            bundle = self.claims.next(names, self.held.__ge__, self.begun, copies=not full)
            if bundle is None:
                return
            if full:
                await self._let_go(copies[:1])
            header = {"terms": self.claims.terms, "bundle": bundle.name}
            there = self.claims.objects.get(f"{schedule.PROGRESS}/{bundle.name}")
            progress = progress_of(header, there)
            reading = asyncio.ensure_future(self._read(bundle, progress))
            one = _Begun(bundle, time.monotonic(), reading, progress, self.claims.copied)
            self.begun[bundle.name] = one

    async def _read(self, bundle: Bundle, progress: Progress) -> Made:
        with contextlib.ExitStack() as stack:
            several = isinstance(self.engine, Engines)
            own = stack.enter_context(self.engine.one()) if several else self.engine
            remembered = functools.partial(Remembered, progress=progress)
            reader = dataclasses.replace(self.rollouts.reader, completer=own, around=remembered)
            rollouts = dataclasses.replace(self.rollouts, reader=reader)
            return await rollouts.read(bundle.chunks, bundle.ordinals, bundle.version)

    def _keep(self, least: int | None) -> None:
        """Puts the turns beside of documents of which so many more have ended; None: of none."""
        for one in self.begun.values() if least else ():
            if len(one.progress.turns) >= one.progress.put + least:
                one.progress.put = len(one.progress.turns)
                self.claims.put(schedule.PROGRESS, one.bundle, one.progress.encoded())

    def _put_what_ended(self) -> None:
        for name in [name for name, one in self.begun.items() if one.reading.done()]:
            one = self.begun.pop(name)
            told = serialization.tell(*one.reading.result())
            # What engines did for others meanwhile is counted here, and not with them.
            stats = dataclasses.asdict(self.engine.take_stats())
            made = Spooled(self.claims.terms, told, stats)
            self.claims.put(schedule.SPOOL, one.bundle, made.encoded())
            took = time.monotonic() - one.since
            self.claims.last = max(took, self.claims.last if self.bundles else 0.0)
            self.bundles, self.seconds = self.bundles + 1, self.seconds + took
            where = f"step {one.bundle.step}, part {one.bundle.number}"
            self.screen.say(f"{where}: read in {took:.1f} s")

    async def _let_go(self, superfluous: Collection[str]) -> None:
        """Ends the reading of bundles that are not wanted any more."""
        left = [self.begun.pop(name) for name in list(self.begun) if name in superfluous]
        await waiting.end(*(one.reading for one in left))

    async def _until_next_look(self) -> None:
        readings = [one.reading for one in self.begun.values()]
        noticed = asyncio.ensure_future(self.stop.noticed.wait())
        try:
            await asyncio.wait(
                [noticed, *readings], timeout=self.look, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            noticed.cancel()


# ---------------------------------------------------------------- turns that have ended


@dataclasses.dataclass
class Progress:
    """The turns of one bundle, by seed: what was asked, and what was said."""

    header: dict[str, str]  # whose they are
    turns: dict[int, tuple[str, Completion]] = dataclasses.field(default_factory=dict)
    put: int = 0  # turns that are put beside

    def encoded(self) -> bytes:
        """The object's content: one line, and its SHA-256 in a second."""
        turns = [_told(seed, *turn) for seed, turn in list(self.turns.items())]
        return sealed({"header": self.header, "turns": turns})


def progress_of(header: dict[str, str], content: bytes | None) -> Progress:
    """Returns the progress that was `encoded`; an empty one for what is damaged, or another's."""
    try:
        said = unsealed(content or b"")
    except ValueError:
        return Progress(header)
    if said["header"] != header:
        return Progress(header)
    turns = {seed: (asked, _completion(rest)) for seed, asked, *rest in said["turns"]}
    return Progress(header, turns, len(turns))


@dataclasses.dataclass(frozen=True)
class Remembered:
    """A `Completer` that replays turns that have ended, and records those that end."""

    inner: Completer
    progress: Progress

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Returns a turn's completion: the recorded one, or the completer's."""
        asked = digest(prompt.shared, prompt.tail, sampling)
        known = self.progress.turns.get(sampling.seed)
        if known is not None and known[0] == asked:
            return known[1]
        said = await self.inner.complete(prompt, sampling)
        if said.finish is not Finish.CANCELLED:
            self.progress.turns[sampling.seed] = asked, said
        return said


def _told(seed: int, asked: str, said: Completion) -> list[Any]:
    ids, logprobs = text_of([said.tokens], IDS), text_of([said.behaviour_logprobs], LOGPROBS)
    return [seed, asked, said.policy_version, said.finish.value, ids, logprobs]


def _completion(rest: list[Any]) -> Completion:
    version, finish, ids, logprobs = rest
    ids, logprobs = tokens(array_of(ids, IDS)), array_of(logprobs, LOGPROBS)
    return Completion(ids, logprobs, Finish(finish), version)
