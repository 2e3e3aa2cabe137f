"""Pass rates: how well each task of the files was answered so far, and which are retired.

No positive resampling (ScaleRL 2025): a task whose running pass rate is high teaches nothing
any more, and is retired. The rate is the mean of what all its readings were judged: for rewards
of 0 and 1 the share that was right. Of no source more than half
retires: what is left would be read again and again, and those few are the ones that the policy
cannot answer. A value, part of the ledger: what a step learnt of rates is forgotten with it.
Above: ledger and serialization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from notepad_jax.types import Group

Key = tuple[str, int]  # source, number of the task in it


@dataclasses.dataclass(frozen=True)
class PassRates:
    """The summed rewards and counts of tasks that were read, and which of these are retired."""

    known: Mapping[Key, tuple[float, int]] = dataclasses.field(default_factory=dict)  # sum, count
    retired: frozenset[Key] = frozenset()
    kept: frozenset[Key] = frozenset()  # would be retired, if that were not half of their source

    def after(
        self, read: Iterable[tuple[Key, Group]], retire_at: float, tasks: Mapping[str, int]
    ) -> PassRates:
        """Returns the rates after more readings; tasks of at least `retire_at` are retired.

        In the order of `read`, as long as they are at most half of the `tasks` of their source.
        """
        known, retired, kept = dict(self.known), set(self.retired), set(self.kept)
        room = {source: count // 2 for source, count in tasks.items()}
        for source, _ in retired:
            room[source] -= 1
        for key, group in read:
            earned, count = known.get(key, (0.0, 0))
            judged = [one.judged for one in group.trajectories]
            earned, count = earned + sum(judged), count + len(judged)
            known[key] = earned, count
            kept.discard(key)
            if key in retired or earned < retire_at * count:
                continue
            if room[key[0]] > 0:
                room[key[0]] -= 1
                retired.add(key)
            else:
                kept.add(key)
        return PassRates(known, frozenset(retired), frozenset(kept))

    def encoded(self) -> dict[str, Any]:
        """Returns the rates as JSON values; `decoded` makes them again."""
        said: dict[str, Any] = {}
        for (source, number), (earned, count) in self.known.items():
            key = source, number
            place = "retired" if key in self.retired else "kept" if key in self.kept else "drawn"
            said.setdefault(source, []).append([number, earned, count, place])
        return said


def decoded(said: Mapping[str, Any]) -> PassRates:
    """Returns the rates that `PassRates.encoded` wrote."""
    rows = [((source, row[0]), *row[1:]) for source, rows in said.items() for row in rows]
    return PassRates(
        known={key: (earned, count) for key, earned, count, _ in rows},
        retired=frozenset(key for key, _, _, place in rows if place == "retired"),
        kept=frozenset(key for key, _, _, place in rows if place == "kept"),
    )
