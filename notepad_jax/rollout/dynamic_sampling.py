"""Dynamic sampling: a group whose rewards are all equal teaches nothing, so it is replaced.

A step wants a batch of informative groups. It takes those that waited, draws what is missing, and
while some are still missing draws again: as many documents as are missing divided by the share
of groups that were informative in this step, at most a first round's, for a bounded number of
rounds. What is informative and finds no room waits for the next step, if it may be that old by
then; nothing is dropped without a name (`ledger.Outcome`). Above: programs.train; `collect`
comes in as a function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from notepad_jax.rollout.collector import Failed
from notepad_jax.rollout.groups import GroupStats, measure
from notepad_jax.rollout.ledger import Ledger, Outcome, Place, Waiting
from notepad_jax.types import Group

Collect = Callable[[Sequence[int]], Awaitable[tuple[list[Group], list[Failed]]]]  # of ordinals


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a step asks for."""

    documents: int  # draws of a first round
    questions: int  # of a draw; documents * questions groups make a whole batch
    max_rounds: int  # 1 replaces nothing
    max_staleness: int  # versions between the oldest turn of a group and its update

    def __post_init__(self) -> None:
        for name in ("documents", "questions", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_staleness < 0:
            raise ValueError(
                f"max_staleness is {self.max_staleness}; it must be 0 or more versions"
            )

    @property
    def groups(self) -> int:
        """Groups of a whole batch."""
        return self.documents * self.questions

    def draws(self, missing: int, stats: GroupStats) -> int:
        """Returns how many documents to draw so that about `missing` groups come out of them."""
        if not stats.groups_sampled:
            return math.ceil(missing / self.questions)
        if not stats.groups_informative:
            return self.documents
        # In whole numbers: a share of 1/3 must not draw one document more for its rounding.
        needed = -(-missing * stats.groups_sampled // stats.groups_informative)
        return min(self.documents, math.ceil(needed / self.questions))


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """What a step has to learn from, and the account of it."""

    batch: list[Group]  # those that waited first, then in the order of the draws
    share: float  # of the groups that this batch was chosen from, informative ones
    stats: GroupStats
    failed: list[Failed]
    settled: Mapping[Outcome, list[Place]]
    ledger: Ledger  # if the batch is learnt from; see `without_update`
    # The trainer's logprobs of each turn of the first groups, where it computed them.
    proximal: Sequence[np.ndarray] = ()


async def collect_informative(
    ledger: Ledger, collect: Collect, wanted: Wanted, now: int
) -> Rollout:
    """Samples until there is a whole batch of informative groups, or the rounds are over.

    `now` is the version of the policy that will learn. The batch can be short, or empty:
    nothing to learn from. Raises ValueError for a group that waits and is newer than `now`.
    """
    fresh, old = _by_age(ledger.waiting, now, wanted.max_staleness)
    found, failed, dull = list(fresh), [], []
    stats, first = GroupStats(), ledger.next
    while len(found) < wanted.groups and stats.rounds < wanted.max_rounds:
        count = wanted.draws(wanted.groups - len(found), stats)
        groups, broken = await collect(range(first, first + count))
        first += count
        stats += dataclasses.replace(measure(groups, len(broken)), rounds=1)
        failed += broken
        dull += [group for group in groups if not group.informative]
        found += [Waiting(group, 1.0) for group in groups if group.informative]
    found = fresh + [Waiting(one.group, stats.informative_share) for one in found[len(fresh) :]]
    batch, surplus = found[: wanted.groups], found[wanted.groups :]
    # By the next step the policy is one version on, and who is too old then need not be kept.
    waiting, surplus_old = _by_age(surplus, now + 1, wanted.max_staleness)
    settled = {
        Outcome.TRAINED: [one.group.place for one in batch],
        Outcome.UNINFORMATIVE: [group.place for group in dull],
        Outcome.FAILED: [one.place for one in failed],
        Outcome.STALE: [one.group.place for one in old + surplus_old],
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
        ledger=ledger.after(first, settled, waiting),
    )


def without_update(rollout: Rollout, before: Ledger) -> Rollout:
    """Returns the rollout if nothing was learnt from its batch: it is settled as skipped."""
    settled = dict(rollout.settled)
    settled[Outcome.SKIPPED] = settled.pop(Outcome.TRAINED)
    after = before.after(rollout.ledger.next, settled, rollout.ledger.waiting)
    return dataclasses.replace(rollout, settled=settled, ledger=after)


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
