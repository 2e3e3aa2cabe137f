"""The trainer's side of asynchronous rollouts: plans steps, collects bundles, publishes policies.

A fleet is this trainer and readers (`fleet_reader`), which meet in one folder, on a disk or in a
bucket. A step goes like this: its draws were planned when an older version was published; readers
have read them, bundle by bundle; the trainer learns from them as from its own, publishes the new
version and plans what that allows. Nothing is kept in memory that a restart would lose: plans and
bundles stand until the step that learnt from them is saved, and are made again bit by bit where
one of them is damaged. The decisions are `rollout.schedule`'s. Above: train; below: rollouts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from notepad_jax import keys
from notepad_jax.checkpoint import bucket
from notepad_jax.checkpoint.fence import Life
from notepad_jax.checkpoint.handoff import ThroughStorage
from notepad_jax.checkpoint.objects import Objects
from notepad_jax.engine.metered import EngineStats
from notepad_jax.parallel import hosts
from notepad_jax.rollout import schedule
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.rollout.schedule import Bundle, Plan
from notepad_jax.rollout.task_sampler import Drawn
from notepad_jax.setup import provenance
from notepad_jax.setup.config.whole import Training
from notepad_jax.training import partial_rollout
from notepad_jax.training.fleet_batch import Arrivals, Spooled, added
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import PolicySnapshot

# In a run's folder: what is said, versions, and what steps learnt from (`fleet.keep`), which lies
# apart so that nobody who looks for work lists it.
FOLDER, POLICY, KEPT = "fleet", "policy", "kept"
NEAR, FAR = 0.1, 2.0  # seconds between two looks at a disk, and at a bucket
# What a run may change, beside `partial_rollout.FREE`, while readers go on with what is planned.
FREE = (*partial_rollout.FREE, "fleet.readers", "fleet.apart", "fleet.keep")


def look(place: Path | epath.Path) -> float:
    """Returns the seconds between two looks at what lies there."""
    return FAR if bucket.is_bucket(place) else NEAR


@dataclasses.dataclass(frozen=True)
class Terms:
    """Settings that trainer and readers have to agree on, or a bundle would have other bits."""

    config: Mapping[str, Any]  # of the run, as sections
    start: Mapping[str, str]  # the policy that it began with, by content
    stream: Mapping[str, Any]  # identity of what is drawn from
    rows: Mapping[str, Any]  # of its files: what the run leaves out
    code: str  # commit or version
    since: int = 0  # the version with which the fleet began, or began anew: none before it is there
    begun: int = 0  # of a live fleet, the life of the trainer that began it so

    @property
    def agreed(self) -> str:
        """The digest of these terms, which plans and bundles carry.

        Versions of a live fleet that began anew have other weights under their numbers.
        """
        return f"{self.digest}-{self.begun}" if self.begun else self.digest

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
    """Returns the terms of a run, which its readers need."""
    policy = Path(start["folder"])
    named = {"policy": str(policy.absolute()) if policy.exists() else start["folder"]}
    named["fleet.bundles"] = config.fleet.parts(config.rollout.documents)
    whole = keys.plain(keys.changed(config, named))
    return Terms(whole, start, json.loads(json.dumps(stream)), rows, provenance.commit())


def terms_of(content: bytes) -> Terms:
    """Returns the terms that were `encoded`. Raises ValueError for anything else."""
    try:
        return Terms(**json.loads(content))
    except (ValueError, TypeError):
        raise ValueError("is cut off, or was changed") from None


class Fleet:
    """The trainer's handle on its readers: plans, published policies, spooled bundles; one a run.

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
        self._objects, self._settled, self._life = Objects(run / FOLDER), Objects(run / KEPT), life
        self._terms, self._rollouts = terms, rollouts
        self._handoff, self._say = handoff, say
        said = terms.config["fleet"]
        self._lead, self._parts, self._slack = said["lead"], said["bundles"], said["slack"]
        self._last, self.live = terms.config["steps"], bool(said["live"])
        self._keep = bool(said["keep"])
        self.arrivals = Arrivals(self._objects, life, say, look(run))
        self._chosen: tuple[int, list[tuple[Bundle, Spooled]]] = 0, []  # of which step
        self._stats = EngineStats()

    def begin(self, step: int, anew: bool) -> None:
        """Takes up what lies there of the run, of which `step` steps are done.

        What was planned on other terms is forgotten, and what a run that went further had planned
        where this one begins `anew` at an earlier step.
        """
        since, begun = hosts.broadcast(lambda: self._begin(step, anew))
        self._terms = dataclasses.replace(self._terms, since=since, begun=begun)
        self.arrivals.agreed = self._terms.agreed

    def publish(self, snapshot: PolicySnapshot, ledger: Ledger, saved: int) -> None:
        """Publishes a version, plans the steps that may be read for now, and tidies up.

        `ledger` is the account after its step; no run goes back to before step `saved`.
        """
        self._handoff.publish(snapshot)
        hosts.broadcast(lambda: self._plan(snapshot.version, ledger))
        hosts.broadcast(lambda: self._tidy(saved))

    def end(self) -> None:
        """Tells readers that there is nothing more to read."""
        hosts.broadcast(lambda: self._objects.replace(schedule.ENDED, b""))

    async def drawn(self, step: int, ledger: Ledger) -> Drawn | None:
        """Returns which draws `step` learns from, when they are read; None: the next ones."""
        if not self.live:
            return None
        found = await self.arrivals.chosen(step, ledger.has, self._slack)
        self._chosen = step, found
        read = sorted(ordinal for bundle, _ in found for ordinal in bundle.ordinals)
        if not self._slack:
            return None
        behind = max(ledger.next, read[-1] + 1)
        left = {*ledger.out, *range(ledger.next, behind)} - set(read)
        return Drawn(read, {}, behind, tuple(sorted(left)))

    async def read(self, step: int, ordinals: Sequence[int]) -> list[Mapping[str, Any]]:
        """Returns readers' groups of the draws of `step`, when they are read: `rollouts.Apart`."""
        found = await (self._of_choice if self.live else self._of_plan)(step, ordinals)
        for one in found if hosts.first() else ():
            self._stats = added(self._stats, one.engine)
        return [one.told for one in found]

    async def _of_choice(self, step: int, ordinals: Sequence[int]) -> list[Spooled]:
        of, found = self._chosen
        draws = sorted(ordinal for bundle, _ in found for ordinal in bundle.ordinals)
        if of != step or draws != sorted(ordinals):
            raise RuntimeError(f"step {step} draws {ordinals}, and {draws} were chosen")
        oldest = min(bundle.version for bundle, _ in found)
        assert step - 1 - oldest <= self._lead + self._slack, "a turn may be older than it may be"
        return [one for _, one in found]

    async def _of_plan(self, step: int, ordinals: Sequence[int]) -> list[Spooled]:
        name = _name(schedule.PLAN, step)
        plan = self._objects.parsed(name, schedule.parsed, schedule.AGAIN)
        if plan is None:
            self._life.check()  # its successor is past the step, and has tidied up
            raise ValueError(
                f"{self._objects.folder}/{name} is gone; train --resume makes it again"
            )
        if plan.ordinals != sorted(ordinals):
            raise RuntimeError(f"step {step} draws {ordinals}, and {plan.ordinals} were planned")
        return await self.arrivals.pinned(plan)

    def take_stats(self) -> EngineStats:
        """Returns the summed stats of readers' engines for the bundles since the last call."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    # ------------------------------------------------------------ what lies there

    def _begin(self, step: int, anew: bool) -> tuple[int, int]:
        self._life.check()
        kept = self._kept()
        if kept and (anew or kept.digest != self._terms.digest or not self._go_on(step, kept)):
            kept = None
            self._say(f"what readers had begun after step {step} is of no use now: it is read anew")
        for name in self._settled.names():  # of steps that are made again, they are kept anew
            if kept is None or (schedule.step_of(name) or 0) > step:
                self._settled.remove(name)
        if kept is None:
            for name in self._objects.names():
                if schedule.step_of(name) is not None:
                    self._objects.remove(name)
            self._handoff.forget(step - 1)  # `step` itself may have been in another dtype
        since, begun = (step, self._life.number) if kept is None else (kept.since, kept.begun)
        begun = begun if self.live else 0
        terms = dataclasses.replace(self._terms, since=since, begun=begun)
        self._objects.replace(schedule.TERMS, terms.encoded())
        self._objects.remove(schedule.ENDED)
        return since, begun

    def _kept(self) -> Terms | None:
        """Returns the terms on which there are plans, if any, and none that are damaged."""
        try:
            return self._objects.parsed(schedule.TERMS, terms_of, "it is written anew")
        except ValueError as problem:
            self._say(str(problem))
            return None

    def _go_on(self, step: int, kept: Terms) -> bool:
        """Whether the versions are there that read for the steps to come."""
        if self.live:
            return True  # the newest reads, and that is the trainer's
        steps = schedule.open_steps(step, self._lead, self._last)
        needed = {schedule.reads(one, self._lead, kept.since) for one in steps} - {step}
        return needed <= set(self._handoff.versions())

    def _plan(self, done: int, ledger: Ledger) -> None:
        self._life.check()
        # With slack a draw may be in the account before its step: what is planned stands.
        planned = self.arrivals.planned(done + 1 - self._slack) if self._slack else []
        first, out = schedule.unplanned(planned, ledger.next, ledger.out)
        for step in schedule.open_steps(done, self._lead, self._last):
            if any(plan.step == step for plan in planned):
                continue
            drawn = self._rollouts.draws(ledger, first, out)
            chunks = self._rollouts.chunks(step - 1)
            bundles = self._rollouts.bundles(chunks, drawn.read, self._parts)
            plan = Plan(
                step=step,
                version=schedule.reads(step, self._lead, self._terms.since),
                chunks=chunks,
                bundles=tuple(tuple(each) for each in bundles if each),
                terms=self._terms.agreed,
            )
            name = _name(schedule.PLAN, step)
            put = self._objects.put(name, plan.encoded())
            if not put and self._objects.parsed(name, schedule.parsed, schedule.AGAIN) != plan:
                raise ValueError(
                    f"{self._objects.folder}/{name} was planned otherwise, by another trainer or "
                    f"another version of the code; remove {self._objects.folder}, and go on"
                )
            first, out = drawn.next, drawn.out

    def _tidy(self, saved: int) -> None:
        self._life.check()
        slack = 0 if saved == self._last else self._slack
        plans_first = (schedule.PLAN,), schedule.OF_STEPS  # `Claims.put` says why
        for kinds in plans_first:
            for name in schedule.settled(self._objects.names(), saved, slack):
                if not name.startswith(kinds):
                    continue
                learnt_from = self._keep and name.startswith(schedule.LEARNT_FROM)
                if learnt_from and (content := self._objects.get(name)) is not None:
                    self._settled.put(name, content)  # what came later was not learnt from
                self._objects.remove(name)


def _name(kind: str, step: int) -> str:
    return f"{kind}/{step}"
