"""Groups waiting for the update, and the gate that keeps old ones out.

A group is as stale as its oldest turn: now - the smallest policy version that wrote any
of its completions. Groups staler than `max_staleness` (eta) are dropped and counted, on
the way in and again on the way out, because the policy moves on while they wait. With
everything in step (`max_staleness` 0) the buffer passes groups straight through.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from notepad_jax.types import Group


def oldest_version(group: Group) -> int:
    """Returns the smallest policy version among all turns of all members."""
    return min(trajectory.oldest_version for trajectory in group.trajectories)


class GroupBuffer:
    """First in, first out; `dropped_stale` counts what the gate refused."""

    def __init__(self, max_staleness: int) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}; it must be 0 or more versions")
        self.max_staleness = max_staleness
        self.dropped_stale = 0
        self._waiting: collections.deque[Group] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, groups: Iterable[Group], now: int) -> None:
        """Takes groups in; `now` is the version of the policy that will learn next."""
        self._waiting.extend(group for group in groups if self._fresh(group, now))

    def take(self, count: int, now: int) -> list[Group]:
        """Returns up to `count` fresh groups, the longest waiting first."""
        taken: list[Group] = []
        while self._waiting and len(taken) < count:
            group = self._waiting.popleft()
            if self._fresh(group, now):
                taken.append(group)
        return taken

    def _fresh(self, group: Group, now: int) -> bool:
        age = now - oldest_version(group)
        if age < 0:
            raise ValueError(
                f"group of task {group.task.id!r} was written by policy version {now - age}, "
                f"which is newer than the learner's {now}; give the buffer the current version"
            )
        self.dropped_stale += age > self.max_staleness
        return age <= self.max_staleness
