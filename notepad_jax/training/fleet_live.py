"""A live reader: documents side by side, each turn by the newest policy that is published.

It takes up as many documents as its engine has slots for, one by one, and puts each when it has
ended. Between two looks it adopts what the trainer has published: turns that run end on the version
they began with, the next ones begin on the new one, and both sets of weights are resident meanwhile
(`EngineService.adopt`). A document may be begun once the reader has a version that its plan lets
read, so no turn is older than that. Which version says a turn depends on the clock, so a document
that is read again comes out otherwise; whoever puts first is learnt from. A reader that is killed
or told to stop loses the documents that it had begun. One with room to spare begins what others
have begun, once that takes three times as long as the longest of its own, and lets go of it for
what nobody has begun. Above: fleet_reader; below: rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from notepad_jax.checkpoint.handoff import ThroughStorage
from notepad_jax.engine.engines import Engines
from notepad_jax.engine.service import EngineService
from notepad_jax.rollout import schedule, serialization
from notepad_jax.rollout.collector import Failed
from notepad_jax.rollout.schedule import Bundle
from notepad_jax.setup.stopping import Stop
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training.fleet_batch import Spooled
from notepad_jax.training.fleet_claims import Claims
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import Completers, Group

Made = tuple[list[Group], list[Failed]]


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A bundle that is under way."""

    bundle: Bundle
    since: float
    reading: asyncio.Task[Made]
    copy: bool  # another had begun it


@dataclasses.dataclass
class Live:
    """Reads bundles, `room` of them side by side."""

    claims: Claims
    rollouts: Rollouts
    engine: EngineService | Engines
    policies: ThroughStorage
    stop: Stop
    alone: Callable[[], bool]
    screen: Screen
    look: float  # seconds between two looks at what lies there
    room: int  # bundles
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
                await self._let_go(self._superfluous(names))
                await self._adopt_newest()
                self._put_what_ended()
                await self._take_up(names)
                self.stop.check(f"with {len(self.begun)} documents begun, which are read anew")
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
        """Begins bundles while there is room; what nobody has begun takes the place of a copy."""
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
            reading = asyncio.ensure_future(self._read(bundle))
            one = _Begun(bundle, time.monotonic(), reading, self.claims.copied)
            self.begun[bundle.name] = one

    async def _read(self, bundle: Bundle) -> Made:
        with contextlib.ExitStack() as stack:
            rollouts = self.rollouts
            if isinstance(self.engine, Engines):
                own: Completers = stack.enter_context(self.engine.one())
                reader = dataclasses.replace(rollouts.reader, completer=own)
                rollouts = dataclasses.replace(rollouts, reader=reader)
            return await rollouts.read(bundle.chunks, bundle.ordinals, bundle.version)

    def _put_what_ended(self) -> None:
        for name in [name for name, one in self.begun.items() if one.reading.done()]:
            one = self.begun.pop(name)
            told = serialization.tell(*one.reading.result())
            # What engines did for others meanwhile is counted here, and not with them.
            stats = dataclasses.asdict(self.engine.take_stats())
            made = Spooled(self.claims.terms, told, stats)
            self.claims.objects.put(f"{schedule.SPOOL}/{name}", made.encoded())
            took = time.monotonic() - one.since
            self.claims.took(max(took, self.claims.last if self.bundles else 0.0))
            self.bundles, self.seconds = self.bundles + 1, self.seconds + took
            where = f"step {one.bundle.step}, part {one.bundle.number}"
            self.screen.say(f"{where}: read in {took:.1f} s")

    def _superfluous(self, names: Sequence[str]) -> list[str]:
        """Returns the bundles that others have read meanwhile, or whose step is over."""
        read = set(schedule.of_kind(names, schedule.SPOOL))
        steps = set(schedule.of_kind(names, schedule.PLAN))
        return [
            name
            for name, one in self.begun.items()
            if name in read or str(one.bundle.step) not in steps
        ]

    async def _let_go(self, superfluous: Collection[str]) -> None:
        """Ends the reading of bundles that nobody wants."""
        left = [self.begun.pop(name) for name in list(self.begun) if name in superfluous]
        for one in left:
            one.reading.cancel()
        await asyncio.gather(*(one.reading for one in left), return_exceptions=True)

    async def _until_next_look(self) -> None:
        readings = [one.reading for one in self.begun.values()]
        noticed = asyncio.ensure_future(self.stop.noticed.wait())
        try:
            await asyncio.wait(
                [noticed, *readings], timeout=self.look, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            noticed.cancel()
