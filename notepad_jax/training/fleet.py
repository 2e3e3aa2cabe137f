"""The trainer's side of a fleet: what it plans, waits for, publishes and tidies up.

A fleet is this trainer and readers (`fleet_reader`), which meet in one folder, on a disk or in a
bucket. A step goes like this: its draws were planned when an older version was published; readers
have read them, bundle by bundle; the trainer learns from them as from its own, publishes the new
version and plans what that allows. Nothing is kept in memory that a restart would lose: plans and
bundles stand until the step that learnt from them is saved, and are made again bit by bit where
one of them is damaged. The decisions are `rollout.schedule`'s. Above: train; below: rollouts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from notepad_jax import keys
from notepad_jax.checkpoint import bucket
from notepad_jax.checkpoint.fence import Life
from notepad_jax.checkpoint.handoff import ThroughStorage
from notepad_jax.checkpoint.objects import Objects
from notepad_jax.engine.stats import EngineStats
from notepad_jax.parallel import hosts
from notepad_jax.rollout import schedule
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.rollout.schedule import Bundle, Plan
from notepad_jax.setup import learner, provenance
from notepad_jax.setup.config.whole import Training
from notepad_jax.training import partial_rollout
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import PolicySnapshot

FOLDER, POLICY = "fleet", "policy"  # in a run's folder: what is said, and versions
NEAR, FAR = 0.1, 2.0  # seconds between two looks at a disk, and at a bucket
# What a run may change, beside `partial_rollout.FREE`, while readers go on with what is planned.
FREE = (*partial_rollout.FREE, "fleet.readers", "fleet.apart")
LONELY = 10.0  # seconds after which a trainer says that it waits for a reader
TRIES = 3  # times that a bundle may arrive damaged


@dataclasses.dataclass(frozen=True)
class Terms:
    """What trainer and readers have to agree on, or a bundle would have other bits."""

    config: Mapping[str, Any]  # of the run, as sections
    start: Mapping[str, str]  # the policy that it began with, by content
    stream: Mapping[str, Any]  # identity of what is drawn from
    rows: Mapping[str, Any]  # of its files: what the run leaves out
    code: str  # commit or version
    since: int = 0  # the version with which the fleet began, or began anew: none before it is there

    @property
    def digest(self) -> str:
        flat = {
            key: value
            for key, value in keys.flat(self.config).items()
            if key not in FREE and not key.startswith(partial_rollout.BESIDE)
        }
        content = {n: v for n, v in self.start.items() if n != "folder"}
        told = json.dumps([flat, content, self.stream, self.rows, self.code], sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()

    def encoded(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode()


def terms(
    config: Training, start: Mapping[str, str], stream: Mapping[str, Any], rows: Mapping[str, Any]
) -> Terms:
    """Returns what readers of a run have to know."""
    policy = Path(start["folder"])
    named = {"policy": str(policy.absolute()) if policy.exists() else start["folder"]}
    named["fleet.bundles"] = config.fleet.parts
    whole = keys.plain(keys.changed(config, named))
    return Terms(whole, start, json.loads(json.dumps(stream)), rows, provenance.commit())


def terms_of(content: bytes) -> Terms:
    """Returns the terms that were `encoded`. Raises ValueError for anything else."""
    try:
        return Terms(**json.loads(content))
    except (ValueError, TypeError):
        raise ValueError("the terms of the run are cut off, or were changed") from None


@dataclasses.dataclass(frozen=True)
class Spooled:
    """What a reader made of a bundle."""

    terms: str  # digest of `Terms`
    told: Mapping[str, Any]  # groups and failures, as `serialization.tell` has them
    engine: Mapping[str, float]  # `EngineStats` of its reading

    def encoded(self) -> bytes:
        """One line, and its SHA-256 in a second."""
        line = (json.dumps(dataclasses.asdict(self)) + "\n").encode()
        return line + hashlib.sha256(line).hexdigest().encode() + b"\n"


def spooled(content: bytes, bundle: Bundle, terms: str) -> Spooled:
    """Returns what was `encoded`.

    Raises ValueError for what is cut or changed, was made on other terms, or is not the bundle's:
    of other draws, or by another version.
    """
    line, _, digest = content.partition(b"\n")
    if hashlib.sha256(line + b"\n").hexdigest().encode() != digest.strip():
        raise ValueError("is cut off, or was changed")
    found = Spooled(**json.loads(line))
    if found.terms != terms:
        raise ValueError("was read with other settings, or by other code")
    groups, failed = found.told["groups"], found.told["failed"]
    drawn = {one["place"][0] for one in groups} | {one[0] for one in failed}
    versions = {turn[2] for one in groups for said in one["readings"] for turn in said["turns"]}
    if drawn != set(bundle.ordinals) or versions - {bundle.version}:
        raise ValueError("is of other draws, or by another version of the policy")
    return found


def check(config: Training) -> None:
    """Raises ValueError for what a run cannot have whose readers are apart."""
    if not config.fleet.on:
        return
    r, g, lead = config.rollout, config.grpo, config.fleet.lead
    if r.max_rounds > 1:
        raise ValueError(
            f"rollout.max_rounds is {r.max_rounds}, and a fleet reads what was planned, and "
            f"replaces nothing; set it to 1 (grpo.full_rate_at scales a step that is short)"
        )
    if r.local.samples:
        raise ValueError(
            f"rollout.local.samples is {r.local.samples}, which are of turns that a step has "
            f"chosen, and its readers are apart; set it to 0"
        )
    if not lead:
        return
    if config.tasks.retire_at:
        raise ValueError(
            f"tasks.retire_at is {config.tasks.retire_at:g}, by which a step's draws depend on the "
            f"one before, and fleet.lead={lead} plans ahead of it; set one of them to 0"
        )
    plan, settings, _ = learner.settings_of(config)
    unbounded = plan.needs_proximal(settings) or settings.proximal == "interpolated"
    if unbounded and not settings.tis_cap and g.ratio != "likelihood":
        raise ValueError(
            f"fleet.lead is {lead}, and nothing bounds what is learnt from turns that are so old: "
            f"the ratio is to the trainer's own logprobs; set grpo.tis_cap (2 is usual), or "
            f"fleet.lead=0"
        )


class Fleet:
    """What a trainer says to its readers, and hears of them; one a run.

    Whatever changes something raises `fence.Superseded` once another trainer took the run over.
    """

    def __init__(
        self,
        run: Path | epath.Path,
        life: Life,
        terms: Terms,
        rollouts: Rollouts,
        handoff: ThroughStorage,
        say: Callable[[str], None],
    ) -> None:
        self._objects, self._life = Objects(run / FOLDER), life
        self._terms, self._rollouts = terms, rollouts
        self._handoff, self._say = handoff, say
        self._wait = FAR if bucket.is_bucket(run) else NEAR
        self._lead, self._parts = terms.config["fleet"]["lead"], terms.config["fleet"]["bundles"]
        self._last = terms.config["steps"]
        self._stats, self._said = EngineStats(), False
        self.look: Callable[[int], None] = lambda step: None  # called while it waits for a step

    def begin(self, step: int, anew: bool) -> None:
        """Takes up what lies there of the run, of which `step` steps are done.

        What was planned on other terms is forgotten, and what a run that went further had planned
        where this one begins `anew` at an earlier step.
        """
        since = hosts.broadcast(lambda: self._begin(step, anew))
        self._terms = dataclasses.replace(self._terms, since=since)

    def publish(self, snapshot: PolicySnapshot, ledger: Ledger, saved: int) -> None:
        """Publishes a version, plans the steps that may be read for now, and tidies up.

        `ledger` is the account after its step; up to step `saved` nobody goes back.
        """
        self._handoff.publish(snapshot)
        hosts.broadcast(lambda: self._plan(snapshot.version, ledger))
        hosts.broadcast(lambda: self._tidy(saved))

    def end(self) -> None:
        """Tells readers that there is nothing more to read."""
        hosts.broadcast(lambda: self._objects.replace(schedule.ENDED, b""))

    async def read(self, step: int, ordinals: Sequence[int]) -> list[Mapping[str, Any]]:
        """Returns what readers made of the draws of `step`, when they have: `rollouts.Apart`."""
        content = self._objects.get(_name(schedule.PLAN, step))
        if content is None:
            self._life.check()  # its successor is past the step, and has tidied up
        plan = schedule.parsed(content or b"")
        if plan.ordinals != sorted(ordinals):
            raise RuntimeError(f"step {step} draws {ordinals}, and {plan.ordinals} were planned")
        found = [await self._arrived(bundle) for bundle in plan.each()]
        for one in found if hosts.first() else ():
            self._stats = added(self._stats, one.engine)
        return [one.told for one in found]

    def take_stats(self) -> EngineStats:
        """Returns what readers' engines did for the bundles since it was asked last."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    # ------------------------------------------------------------ what lies there

    def _begin(self, step: int, anew: bool) -> int:
        self._life.check()
        kept = self._kept()
        if kept and (anew or kept.digest != self._terms.digest or not self._go_on(step, kept)):
            kept = None
            self._say(f"what readers had begun after step {step} is of no use now: it is read anew")
        if kept is None:
            for name in self._objects.names():
                if schedule.step_of(name) is not None:
                    self._objects.remove(name)
            self._handoff.forget(step - 1)  # `step` itself may have been in another dtype
        since = step if kept is None else kept.since
        terms = dataclasses.replace(self._terms, since=since)
        self._objects.replace(schedule.TERMS, terms.encoded())
        self._objects.remove(schedule.ENDED)
        return since

    def _kept(self) -> Terms | None:
        """Returns the terms on which there are plans, if any, and none that are damaged."""
        there = self._objects.get(schedule.TERMS)
        try:
            return terms_of(there) if there else None
        except ValueError as problem:
            self._say(f"{self._objects.folder}/{schedule.TERMS}: {problem}")
            return None

    def _go_on(self, step: int, kept: Terms) -> bool:
        """Whether the versions are there that read for the steps to come."""
        steps = schedule.open_steps(step, self._lead, self._last)
        needed = {schedule.reads(one, self._lead, kept.since) for one in steps} - {step}
        return needed <= set(self._handoff.versions())

    def _plan(self, done: int, ledger: Ledger) -> None:
        self._life.check()
        first = ledger.next
        for step in schedule.open_steps(done, self._lead, self._last):
            drawn = self._rollouts.draws(ledger, first)
            chunks = self._rollouts.chunks(step - 1)
            bundles = self._rollouts.bundles(chunks, drawn.read, self._parts)
            plan = Plan(
                step=step,
                version=schedule.reads(step, self._lead, self._terms.since),
                chunks=chunks,
                bundles=tuple(tuple(each) for each in bundles if each),
                terms=self._terms.digest,
            )
            name, content = _name(schedule.PLAN, step), plan.encoded()
            if not self._objects.put(name, content) and self._objects.get(name) != content:
                raise ValueError(
                    f"{self._objects.folder}/{name} was planned otherwise, by another trainer or "
                    f"another version of the code; remove {self._objects.folder}, and go on"
                )
            first = drawn.next

    def _tidy(self, saved: int) -> None:
        self._life.check()
        for name in schedule.settled(self._objects.names(), saved):
            self._objects.remove(name)

    async def _arrived(self, bundle: Bundle) -> Spooled:
        name, refused, began = f"{schedule.SPOOL}/{bundle.name}", 0, time.monotonic()
        while True:
            if content := self._objects.get(name):
                try:
                    return spooled(content, bundle, self._terms.digest)
                except (ValueError, KeyError, TypeError, IndexError) as problem:
                    refused += 1
                    line = f"{self._objects.folder}/{name} {problem}"
                    if refused == TRIES:
                        said = f"{line}, {TRIES} times; nothing is learnt from it"
                        raise ValueError(said) from None
                    if hosts.first():
                        self._say(f"{line}; it is read again")
                        self._objects.remove(name)
            self._life.check()
            self.look(bundle.step)
            if not self._said and time.monotonic() - began > LONELY:
                self._said = True
                if not schedule.claimed(self._objects.names(schedule.CLAIM)):
                    self._say(
                        f"step {bundle.step} waits for a reader, and none has come; start one: "
                        f"notepad-jax rollout {self._objects.folder.parent}"
                    )
            await asyncio.sleep(self._wait)


def added(stats: EngineStats, more: Mapping[str, float]) -> EngineStats:
    """Returns the sums of what two engines did."""
    counts = dataclasses.asdict(stats)
    return EngineStats(**{name: count + more[name] for name, count in counts.items()})


def _name(kind: str, step: int) -> str:
    return f"{kind}/{step}"
