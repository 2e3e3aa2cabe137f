"""The trainer's intake of a fleet's bundles: waited for, verified, chosen for a step.

Readers put what they read of a bundle under its name (`Spooled`); the trainer takes what came, and
has it read again where it is damaged. In a live fleet what came depends on which reader was quick,
so the trainer's first process puts the step's choice beside it before anything is learnt: a trainer
that goes on after a kill, and every other process, learns from that. The rule is
`rollout.schedule`'s. Above: fleet.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from notepad_jax.checkpoint.fence import Life
from notepad_jax.checkpoint.objects import Objects, sealed, unsealed
from notepad_jax.engine.metered import EngineStats
from notepad_jax.parallel import hosts
from notepad_jax.rollout import schedule
from notepad_jax.rollout.schedule import Bundle, Choice, Plan

# Seconds after which a trainer says that no reader has come, and that those are slow that have.
LONELY, PATIENT = 10.0, 120.0
TRIES = 3  # times that a bundle may arrive damaged


@dataclasses.dataclass(frozen=True)
class Spooled:
    """A bundle's groups and engine stats, as a reader spooled them."""

    terms: str  # digest of `Terms`
    told: Mapping[str, Any]  # groups and failures, as `serialization.tell` has them
    engine: Mapping[str, float]  # `EngineStats` of its reading

    def encoded(self) -> bytes:
        """The object's content: one line, and its SHA-256 in a second."""
        return sealed(dataclasses.asdict(self))


def spooled(content: bytes, bundle: Bundle, terms: str, newest: int) -> Spooled:
    """Decodes a spooled bundle that was `encoded`, and verifies it.

    Raises ValueError for what is cut or changed, was made on other terms, or is not the bundle's:
    of other draws, or by a version that is older than the bundle's, or newer than `newest`.
    """
    found = Spooled(**unsealed(content))
    if found.terms != terms:
        raise ValueError("was read with other settings, or by other code")
    groups, failed = found.told["groups"], found.told["failed"]
    drawn = {one["place"][0] for one in groups} | {one[0] for one in failed}
    versions = {turn[2] for one in groups for said in one["readings"] for turn in said["turns"]}
    if drawn != set(bundle.ordinals) or versions - set(range(bundle.version, newest + 1)):
        raise ValueError("is of other draws, or by another version of the policy")
    return found


class Arrivals:
    """The spool of bundles that readers have put, as a trainer takes them; one a run.

    `agreed` is what plans and bundles have to carry, `wait` the seconds between two looks, `lonely`
    those after which it says that no reader has come.
    """

    def __init__(
        self, objects: Objects, life: Life, say: Callable[[str], None], wait: float
    ) -> None:
        self.agreed, self.lonely = "", LONELY
        self.look: Callable[[int], None] = lambda step: None  # called while it waits for a step
        self._objects, self._life, self._say, self._wait = objects, life, say, wait
        self._taken: dict[str, tuple[str, Spooled]] = {}  # by bundle: its digest, and it
        self._refused: collections.Counter[str] = collections.Counter()
        self._waits = (0, 0.0)  # for which step, since when
        self._said = False

    def planned(self, first: int) -> list[Plan]:
        """Returns the plans that lie there, of steps from `first` on."""
        names = self._objects.names(schedule.PLAN)
        found = [
            self._objects.parsed(name, schedule.parsed, schedule.AGAIN)
            for name in names
            if schedule.step_of(name) >= first
        ]
        return [plan for plan in found if plan is not None]

    async def pinned(self, plan: Plan) -> list[Spooled]:
        """Returns all spooled bundles of a plan, when they are there."""
        found = []
        for bundle in plan.each():
            while self._arrived(bundle, bundle.version) is None:
                await self._waited(bundle.step)
            found.append(self._taken.pop(bundle.name)[1])
        return found

    async def chosen(
        self, step: int, settled: Callable[[int], bool], slack: int
    ) -> list[tuple[Bundle, Spooled]]:
        """Returns the bundles that a step learns from, when there are enough: chosen once for all.

        Raises ValueError where what was chosen is not there any more.
        """
        choice, newest = await self._choice(step, settled, slack), step - 1
        plans = self.planned(step - slack)  # what is older is settled
        bundles = {one.name: one for plan in plans for one in plan.each()}
        found = []
        for name, digest in choice.read.items():
            there = self._arrived(bundles[name], newest, keep=True) if name in bundles else None
            if there is None or there[0] != digest:
                raise ValueError(
                    f"{self._objects.folder}/{schedule.SPOOL}/{name} is not what step {step} has "
                    f"learnt from before; go on from an earlier step (--resume --step)"
                )
            found.append((bundles[name], there[1]))
        for name in choice.read:
            del self._taken[name]
        return found

    async def _choice(self, step: int, settled: Callable[[int], bool], slack: int) -> Choice:
        name = f"{schedule.CHOICE}/{step}"
        read = functools.partial(self._objects.parsed, name, schedule.choice_of, schedule.AGAIN)
        while (choice := read()) is None:
            made = self._choose(step, settled, slack) if hosts.first() else None
            if made is None:
                await self._waited(step)
            else:
                self._life.check()
                self._objects.put(name, made.encoded())
        return choice

    def _choose(self, step: int, settled: Callable[[int], bool], slack: int) -> Choice | None:
        plans, names = self.planned(step - slack), set(self._objects.names(schedule.SPOOL))
        there = {
            one.name
            for plan in plans
            for one in plan.each()
            if f"{schedule.SPOOL}/{one.name}" in names
            and not all(map(settled, one.ordinals))
            and self._arrived(one, step - 1)
        }
        if not any(plan.step == step for plan in plans):
            self._life.check()  # its successor is past the step, and has tidied up
            raise ValueError(f"{self._objects.folder}/{schedule.PLAN}/{step} is gone")
        bundles = schedule.batch(step, plans, there, settled, slack)
        if bundles is None:
            return None
        return Choice(step, {one.name: self._taken[one.name][0] for one in bundles})

    def _arrived(
        self, bundle: Bundle, newest: int, keep: bool = False
    ) -> tuple[str, Spooled] | None:
        """Returns (digest, it) of a bundle; None where it has not come.

        What is damaged is removed, to be read again, unless it is to be kept: ValueError after
        TRIES times.
        """
        name = f"{schedule.SPOOL}/{bundle.name}"
        if bundle.name in self._taken:
            return self._taken[bundle.name]
        if (content := self._objects.get(name)) is None:
            return None
        try:
            found = spooled(content, bundle, self.agreed, newest)
        except (ValueError, KeyError, TypeError, IndexError) as problem:
            if not keep:
                self._refuse(name, f"{self._objects.folder}/{name} {problem}")
            return None
        self._taken[bundle.name] = hashlib.sha256(content).hexdigest(), found
        return self._taken[bundle.name]

    def _refuse(self, name: str, line: str) -> None:
        self._refused[name] += 1
        if self._refused[name] == TRIES:
            raise ValueError(f"{line}, {TRIES} times; nothing is learnt from it")
        if hosts.first():
            self._say(f"{line}; it is read again")
            self._objects.remove(name)

    async def _waited(self, step: int) -> None:
        """Waits until the next look."""
        self._life.check()
        self.look(step)
        if self._waits[0] != step:
            self._waits = step, time.monotonic()
        waited = time.monotonic() - self._waits[1]
        claims = not self._said and waited > self.lonely and self._objects.names(schedule.CLAIM)
        if not self._said and waited > (PATIENT if claims else self.lonely):
            self._said = True
            why = "those that began to read are slow, or gone" if claims else "none has come"
            self._say(
                f"step {step} waits for a reader, and {why}; start one: "
                f"notepad-jax rollout {self._objects.folder.parent}"
            )
        await asyncio.sleep(self._wait)


def added(stats: EngineStats, more: Mapping[str, float]) -> EngineStats:
    """Returns the summed stats of two engines."""
    counts = dataclasses.asdict(stats)
    return EngineStats(**{name: count + more[name] for name, count in counts.items()})
