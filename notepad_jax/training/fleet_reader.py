"""A rollout worker (a fleet's reader): samples what a trainer planned, bundle by bundle.

Reader and trainer meet in one folder (`fleet`), and everything that a reader has to know is there:
the config, which policy the run began with, what is planned, the versions. A reader comes and goes
as it likes. What it reads of a bundle follows from plan and weights; the turns that have ended are
put beside it every so often, and a reader that goes on with the bundle is given them again
(`engine.replay`), so that the bits are those of a reader that was never killed.

A reader with nothing else to do begins what another has begun, if that takes much longer than a
bundle of its own did: the other may be dead. Above: commands.rollout; below: rollouts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from notepad_jax import keys, waiting
from notepad_jax.checkpoint import bucket
from notepad_jax.checkpoint.handoff import ThroughStorage
from notepad_jax.checkpoint.objects import Objects
from notepad_jax.engine import journal
from notepad_jax.engine.engines import Engines
from notepad_jax.engine.metered import Metered
from notepad_jax.engine.replay import Given, Replays
from notepad_jax.engine.service import EngineService
from notepad_jax.rollout import schedule, serialization
from notepad_jax.rollout.schedule import Bundle
from notepad_jax.setup import builders, learner, process, provenance, task_stream
from notepad_jax.setup.config.whole import Training
from notepad_jax.setup.stopping import Stop
from notepad_jax.telemetry.metrics import CONFIG
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import base_fingerprint, fleet, record, rollout_settings
from notepad_jax.training.fleet import Terms
from notepad_jax.training.fleet_batch import Spooled
from notepad_jax.training.fleet_claims import Claims
from notepad_jax.training.fleet_live import Live
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import PolicySnapshot


@dataclasses.dataclass(frozen=True)
class Read:
    """A summary of a reader's work."""

    run: str
    bundles: int
    seconds: float  # of reading them


def read(run: str, me: str, policy: str | None, screen: Screen, alone: Callable[[], bool]) -> Read:
    """Runs a rollout worker for the run in the folder, or under the URL, `run` until that ends.

    `me` is the reader's name: one that is started again under the same goes on with what it had
    begun. `policy` is where the run's first policy lies here, if that is elsewhere. It also ends
    when `alone` says that its parent is gone. Raises ValueError for a folder without a run
    and for a policy, task files or code other than the run's, and `stopping.Stopped` when it is
    told to stop; then the turns that have ended are kept.
    """
    stop = Stop()
    with stop.watching():
        return waiting.run(_read(run, me, policy, screen, alone, stop))


async def _read(
    run: str, me: str, policy: str | None, screen: Screen, alone: Callable[[], bool], stop: Stop
) -> Read:
    place = bucket.path(run)
    there = Objects(place / fleet.FOLDER)
    terms = await _terms(there, place, screen, alone)
    reader = _prepared(place, there, terms, policy, me, screen, stop, alone)
    with stop.patiently():
        async with reader.engine:
            await reader.run()
    return Read(run, reader.bundles, reader.seconds)


async def _terms(
    there: Objects, place: Path | epath.Path, screen: Screen, alone: Callable[[], bool]
) -> Terms:
    """Waits for a trainer to begin. Raises ValueError where none can, and for damaged terms."""
    if bucket.is_bucket(place):
        screen.say(f"looking into {place}")  # which may take minutes to say that it cannot
    elif not Path(place).is_dir():
        raise ValueError(
            f"there is no run {place}; name the folder of a run that trains with readers "
            f"(--config.fleet.apart=true), or the one in its checkpoint.folder"
        )
    said, mend = False, "train --resume writes it anew"
    while (terms := there.parsed(schedule.TERMS, fleet.terms_of, mend)) is None:
        if not said:
            said = True
            screen.say(f"waiting for a trainer with readers (fleet.apart) to begin in {place}")
            if without := _without_readers(place):
                screen.warn(without)
        if alone():
            raise ValueError(f"no trainer has begun in {place}")
        waiting.look()
        await asyncio.sleep(fleet.look(place))
    return terms


def _without_readers(place: Path | epath.Path) -> str:
    """Returns a line for a run on a disk that trains without readers so far; "" for others."""
    if bucket.is_bucket(place) or not (Path(place) / CONFIG).is_file():
        return ""
    if record.config_of(Path(place)).fleet.on:
        return ""
    return f"{place} was begun without readers; train --resume --config.fleet.apart=true has them"


def _prepared(
    place: Path | epath.Path, there: Objects, terms: Terms, policy_here: str | None, me: str,
    screen: Screen, stop: Stop, alone: Callable[[], bool],
) -> PinnedReader | Live:  # fmt: skip
    """Loads what reads. Raises ValueError for what is not the run's."""
    if (ours := provenance.commit()) != terms.code:
        raise ValueError(
            f"{place} is trained by {terms.code}, and this is {ours}; a reader needs the same code"
        )
    config = keys.read(Training, terms.config)
    config = keys.changed(config, {"policy": policy_here or config.policy})
    process.prepared(config)
    policy = builders.load_policy(
        config.policy, config.dtype, builders.to_read(config.engine), screen.warn
    )
    base_fingerprint.compare(terms.start, base_fingerprint.content(policy), place)
    stream = task_stream.opened(config, policy.tokenizer, screen, terms.rows)
    stream.records.check(terms.stream)
    template = builders.template(config.reading, policy)
    rules = builders.rules(config.reading, policy.tokenizer)
    replays = Replays()
    around = (lambda runs: runs) if config.fleet.live else replays.around  # nothing is replayed
    engine = builders.service(
        config.engine, policy, rules, template, PolicySnapshot(-1, None),
        lambda executor: around(Metered(executor, screen.work)),
    )  # fmt: skip
    wanted = builders.adopted(config, policy.config)
    frozen, _ = learner.partition(config.grpo.lora, policy.config, policy.params, config.seed)
    claims = Claims(there, terms.agreed, me)
    rollouts = rollout_settings.rollouts(config, stream, engine, policy.tokenizer, template, rules)
    policies = ThroughStorage(place / fleet.POLICY, wanted, base=frozen)
    look = fleet.look(place)
    if config.fleet.live:
        slots = config.engine.slots * builders.engines(config.engine)
        room = max(1, slots // (config.rollout.group_size * stream.questions))
        return Live(
            claims, rollouts, engine, policies, stop, alone, screen, look, room,
            config.checkpoint.keep_turns,
        )  # fmt: skip
    return PinnedReader(
        claims, rollouts, engine, replays, policies, config.checkpoint.keep_turns, stop, alone,
        screen, look,
    )  # fmt: skip


@dataclasses.dataclass
class PinnedReader:
    """A reader of pinned bundles: one after another, each by its policy version."""

    claims: Claims
    rollouts: Rollouts
    engine: EngineService | Engines
    replays: Replays
    policies: ThroughStorage
    keep_turns: int  # that end between two times that they are put beside
    stop: Stop
    alone: Callable[[], bool]
    screen: Screen
    look: float  # seconds between two looks at what lies there
    bundles: int = 0  # read so far
    seconds: float = 0.0  # of reading them
    held: int | None = None  # the version that the engine has

    async def run(self) -> None:
        """Reads until the run ends."""
        while bundle := await self.next():
            await self.take(bundle)

    async def next(self) -> Bundle | None:
        """Waits for and returns the next bundle to read; None when the run has ended."""
        while True:
            names = self.claims.objects.names()
            if schedule.ENDED in names or self.alone():
                return None
            there = set(self.policies.versions())
            if bundle := self.claims.next(names, there.__contains__):
                return bundle
            if waits := self.claims.idle(there.__contains__):
                self.screen.say(waits)
            self.stop.check("between two bundles")
            await asyncio.sleep(self.look)

    # ------------------------------------------------------------ one bundle

    async def take(self, bundle: Bundle) -> None:
        """Reads a bundle and puts it, unless another reader has by then; raises Stopped."""
        began, what = time.monotonic(), f"step {bundle.step}, part {bundle.number}"
        draws = f"{len(bundle.ordinals)} draws by version {bundle.version}"
        self.screen.say(f"{what}: {draws}")
        self.replays.begin(self._kept(bundle))  # first: a stop keeps these, too
        reading = await self.stop.until(self._bundle(bundle))
        if self.stop.number is not None and (reading.cancelled() or not reading.exception()):
            self._keep(bundle)
            self.stop.check(f"in {what}, of which {self.replays.ended:,} turns are kept")
        made = reading.result()
        if made is None:
            self.screen.say(f"{what}: another reader has it")
            return
        self.claims.put(schedule.SPOOL, bundle, made.encoded())
        self.claims.last = took = time.monotonic() - began
        self.bundles, self.seconds = self.bundles + 1, self.seconds + took
        self.screen.say(f"{what}: read in {took:.1f} s")

    async def _bundle(self, bundle: Bundle) -> Spooled | None:
        """Returns what a bundle came to; None where another reader was quicker."""
        try:
            await self._hold(bundle.version)
        except (OSError, KeyError, ValueError):
            if self._superfluous(bundle):
                return None  # versions that only settled steps were read by are let go of
            raise
        self.engine.take_stats()
        reading = asyncio.ensure_future(
            self.rollouts.read(bundle.chunks, bundle.ordinals, bundle.version)
        )
        try:
            while not reading.done():
                await asyncio.wait((reading,), timeout=self.look)
                if not reading.done() and self._superfluous(bundle):
                    return None
        finally:
            await waiting.end(reading)
        told = serialization.tell(*reading.result())
        return Spooled(self.claims.terms, told, dataclasses.asdict(self.engine.take_stats()))

    def _superfluous(self, bundle: Bundle) -> bool:
        """Puts turns beside, if enough have ended; returns whether the bundle is not wanted."""
        if self.keep_turns and self.replays.ended >= self._put + self.keep_turns:
            self._keep(bundle)
        return self.alone() or not schedule.wanted(bundle, self.claims.objects.names())

    async def _hold(self, version: int) -> None:
        """Has the engine hold a version, and nothing of what it read."""
        if version == self.held:
            self.engine.rest()
            return
        self.engine.rest(weights=True)
        self.held = None
        await self.engine.adopt(self.policies.adopt(version), drain=True)
        self.held = version

    # ------------------------------------------------------------ turns that have ended

    def _header(self, bundle: Bundle) -> dict[str, Any]:
        told = {"terms": self.claims.terms, "bundle": bundle.name, "version": bundle.version}
        return {**told, "engines": len(self.replays.each)}

    def _kept(self, bundle: Bundle) -> Mapping[int, Given]:
        """Returns the turns that a reader before has put beside a bundle."""
        self._put = 0
        content = self.claims.objects.get(f"{schedule.PROGRESS}/{bundle.name}")
        if not content:
            return {}
        try:
            header, turns = journal.decoded(content)
        except ValueError:
            return {}  # damaged: it is read anew
        if header != self._header(bundle):
            return {}
        self._put = len(turns)
        if turns:
            self.screen.say(f"goes on with the {len(turns):,} turns that had ended")
        return turns

    def _keep(self, bundle: Bundle) -> None:
        turns = self.replays.turns
        self._put = len(turns)
        content = journal.encoded(self._header(bundle), turns)
        self.claims.put(schedule.PROGRESS, bundle, content)
