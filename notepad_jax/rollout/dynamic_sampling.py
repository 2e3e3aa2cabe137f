"""Dynamic sampling: groups whose rewards are all equal carry no signal and are replaced.

A step wants a batch of informative groups. It takes those that waited, draws what is missing, and
while some are still missing draws again: as many documents as are missing divided by the share
of groups that were informative in this step, at most a first round's, for a bounded number of
rounds. What is informative and finds no room waits for the next step, if it may be that old by
then; nothing is dropped without a name (`ledger.Outcome`). Where a batch has equal numbers of
each kind of task, every kind has room, missing groups and a share of its own. Above:
training.train; `collect` comes in as a function; below: task_sampler.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from notepad_jax.rollout import task_sampler
from notepad_jax.rollout.collector import Failed
from notepad_jax.rollout.groups import GroupStats, measure
from notepad_jax.rollout.ledger import Ledger, Outcome, Place, Waiting
from notepad_jax.rollout.task_sampler import ANY, EVERY, Drawn, Stream
from notepad_jax.types import Group

Collect = Callable[[Sequence[int]], Awaitable[tuple[list[Group], list[Failed]]]]  # of ordinals


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The batch that a step asks for, and how long it samples for it."""

    documents: int  # draws of a first round
    questions: int  # of a draw; documents * questions groups make a whole batch
    max_rounds: int  # 1 replaces nothing
    max_staleness: int  # versions between the oldest turn of a group and its update
    kinds: tuple[str, ...] = ()  # of tasks, each with an equal part of a batch; (): any
    imitates: bool = False  # then a group without contrast teaches, too, if it is worth anything

    def __post_init__(self) -> None:
        for name in ("documents", "questions", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_staleness < 0:
            raise ValueError(
                f"max_staleness is {self.max_staleness}; it must be 0 or more versions"
            )
        if self.kinds and self.documents % len(self.kinds):
            raise ValueError(
                f"{self.documents} documents a step cannot be {len(self.kinds)} equal parts, one "
                f"for each of {', '.join(self.kinds)}; use a multiple (rollout.documents)"
            )

    @property
    def groups(self) -> int:
        """How many groups a whole batch has."""
        return self.documents * self.questions

    @property
    def rooms(self) -> dict[str, int]:
        """How many groups a whole batch has, by kind."""
        kinds = self.kinds or (ANY,)
        return {kind: self.groups // len(kinds) for kind in kinds}

    def draws(self, missing: int, stats: GroupStats) -> int:
        """Returns how many documents to draw so that about `missing` groups come out of them.

        Of one kind, where there are kinds; `stats` are of that kind.
        """
        if missing <= 0:
            return 0
        if not stats.groups_sampled:
            return math.ceil(missing / self.questions)
        most = self.documents // max(1, len(self.kinds))
        if not stats.groups_informative:
            return most
        # In whole numbers: a share of 1/3 must not draw one document more for its rounding.
        needed = -(-missing * stats.groups_sampled // stats.groups_informative)
        return min(most, math.ceil(needed / self.questions))


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """A step's rollout: the batch to learn from, and the ledger after it."""

    batch: list[Group]  # those that waited first, then in the order of the draws
    share: float  # of the groups that this batch was chosen from, informative ones
    stats: GroupStats
    failed: list[Failed]
    settled: Mapping[Outcome, list[Place]]
    ledger: Ledger  # if the batch is learnt from; see `without_update`
    # The trainer's logprobs of each turn of the first groups, where it computed them.
    proximal: Sequence[np.ndarray] = ()


async def collect_informative(
    ledger: Ledger, collect: Collect, wanted: Wanted, now: int, stream: Stream = EVERY,
    chosen: Drawn | None = None,
) -> Rollout:  # fmt: skip
    """Samples until there is a whole batch of informative groups, or the rounds are over.

    `now` is the version of the policy that will learn; `stream` says what is passed over; where
    draws were `chosen` already, those are collected, in one round. The batch can be short (of the
    kinds of which too few were informative), or empty: nothing to learn from. Raises ValueError
    for a group that waits and is newer than `now`.
    """
    fresh, old = _by_age(ledger.waiting, now, wanted.max_staleness)
    found, failed, dull = list(fresh), [], []
    stats, first, rooms = GroupStats(), ledger.next, wanted.rooms
    imitated = wanted.imitates
    out: Sequence[int] = ledger.out
    of_kind = dict.fromkeys(rooms, stats)
    passed: dict[Outcome, list[Place]] = {}

    def kind(one: Group | Failed) -> str:
        return stream.kind(one.ordinal) if wanted.kinds else ANY

    while stats.rounds < wanted.max_rounds:
        have = collections.Counter(kind(one.group) for one in found)
        missing = {name: room - have[name] for name, room in rooms.items()}
        if max(missing.values()) <= 0:
            break
        counts = {name: wanted.draws(count, of_kind[name]) for name, count in missing.items()}
        drawn = chosen or task_sampler.draw(first, counts, stream, wanted.questions, out)
        groups, broken = await collect(drawn.read)
        first, out = drawn.next, drawn.out
        stats += dataclasses.replace(measure(groups, len(broken), imitated), rounds=1)
        for name in rooms:
            own = [group for group in groups if kind(group) == name]
            of_kind[name] += measure(own, sum(kind(one) == name for one in broken), imitated)
        for outcome, places in drawn.passed.items():
            passed.setdefault(outcome, []).extend(places)
        read = {one.place for one in (*groups, *broken)}
        asked = itertools.product(drawn.read, range(wanted.questions))
        if untaught := [place for place in asked if place not in read]:
            passed.setdefault(Outcome.UNTAUGHT, []).extend(untaught)
        failed += broken
        dull += [group for group in groups if not group.teaches(imitated)]
        found += [Waiting(group, 1.0) for group in groups if group.teaches(imitated)]
    found = fresh + [
        Waiting(one.group, of_kind[kind(one.group)].informative_share)
        for one in found[len(fresh) :]
    ]
    batch, surplus = _into(rooms, found, kind)
    # By the next step the policy is one version on, and what is too old then need not be kept.
    waiting, surplus_old = _by_age(surplus, now + 1, wanted.max_staleness)
    settled = {
        Outcome.TRAINED: [one.group.place for one in batch],
        Outcome.UNINFORMATIVE: [group.place for group in dull],
        Outcome.FAILED: [one.place for one in failed],
        Outcome.STALE: [one.group.place for one in old + surplus_old],
        **passed,
    }
    stats += GroupStats(
        groups_kept=len(batch), groups_waiting=len(waiting), groups_stale=len(old + surplus_old)
    )
    return Rollout(
        batch=[one.group for one in batch],
        share=_share(batch),
        stats=stats,
        failed=failed,
        settled=settled,
        ledger=ledger.after(first, settled, waiting, out),
    )


def without_update(rollout: Rollout, before: Ledger) -> Rollout:
    """Returns the rollout if nothing was learnt from its batch: it is settled as skipped."""
    settled = dict(rollout.settled)
    settled[Outcome.SKIPPED] = settled.pop(Outcome.TRAINED)
    after = before.after(rollout.ledger.next, settled, rollout.ledger.waiting, rollout.ledger.out)
    return dataclasses.replace(rollout, settled=settled, ledger=after)


def _into(
    rooms: Mapping[str, int], found: Sequence[Waiting], kind: Callable[[Group], str]
) -> tuple[list[Waiting], list[Waiting]]:
    """Returns (batch, surplus), both in the order in which they were found."""
    left = dict(rooms)
    batch: list[Waiting] = []
    surplus: list[Waiting] = []
    for one in found:
        name = kind(one.group)
        left[name] -= 1
        (batch if left[name] >= 0 else surplus).append(one)
    return batch, surplus


def _by_age(
    waiting: Sequence[Waiting], now: int, max_staleness: int
) -> tuple[list[Waiting], list[Waiting]]:
    """Returns (fresh, stale): a group is as old as its oldest turn."""
    fresh: list[Waiting] = []
    stale: list[Waiting] = []
    for one in waiting:
        age = now - one.group.oldest_version
        if age < 0:
            raise ValueError(
                f"group of task {one.group.task.id!r} was written by policy version {now - age}, "
                f"which is newer than the learner's {now}"
            )
        (fresh if age <= max_staleness else stale).append(one)
    return fresh, stale


def _share(batch: Sequence[Waiting]) -> float:
    """The share of informative groups among those that a batch was chosen from.

    Each group stands for 1 / share sampled ones. Surplus is not in it: that a step found more
    than it had room for says nothing against what it found.
    """
    return len(batch) / sum(1 / one.share for one in batch) if batch else 0.0
