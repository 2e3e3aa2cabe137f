"""The ledger of all draws and what became of each, which a checkpoint carries.

The stream of tasks is endless and each draw has an ordinal, its place in it (`types.Draw`). A
question of a draw makes a group, and every group is settled exactly once: learnt from
(`trained`), or dropped for one of seven named reasons, three of which spare its readings (it
is passed over); until then it waits here. So the groups drawn are always the groups settled and
the groups waiting, whatever was interrupted, and the position in the stream is one number. Readers
of a fleet with slack end in any order: draws before that number that are unfinished are named. A
`Ledger` is a value: a step makes the next one, and a step that is not kept is forgotten with it.
Above: dynamic_sampling and train; beside: serialization, which writes the waiting groups down.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from notepad_jax.rollout.pass_rates import PassRates
from notepad_jax.types import Group

Place = tuple[int, int]  # (ordinal, question)


class Outcome(enum.Enum):
    """The outcome of a group: learnt from, or why it was dropped."""

    TRAINED = "trained"
    UNINFORMATIVE = "uninformative"  # all rewards equal
    FAILED = "failed"  # a reading failed
    STALE = "stale"  # informative, and too old before there was room in a batch
    SKIPPED = "skipped"  # its step's updates were not finite
    RETIRED = "retired"  # passed over: its task is answered well (`pass_rates`)
    NO_ROOM = "no_room"  # passed over: a batch wanted no more of its kind of task
    UNTAUGHT = "untaught"  # passed over: the teacher that is imitated knows nothing of it


PASSED = (Outcome.RETIRED, Outcome.NO_ROOM, Outcome.UNTAUGHT)  # these were not read


@dataclasses.dataclass(frozen=True, eq=False)
class Waiting:
    """An informative group that waits, since no batch had room for it yet."""

    group: Group
    share: float  # of the groups sampled with it that were informative, in (0, 1]


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The account of all draws after a step, immutable."""

    next: int = 0  # the ordinal that is drawn next
    groups: int = 0  # drawn so far
    settled: Mapping[Outcome, int] = dataclasses.field(default_factory=dict)  # groups
    waiting: tuple[Waiting, ...] = ()  # the longest waiting first
    rates: PassRates = PassRates()  # of tasks, where well answered ones retire
    out: tuple[int, ...] = ()  # ordinals before `next` that are not drawn yet: they are read still

    def __post_init__(self) -> None:
        if self.groups != sum(self.settled.values()) + len(self.waiting):
            raise ValueError(
                f"{self.groups} groups were drawn, {sum(self.settled.values())} are settled and "
                f"{len(self.waiting)} wait; the ledger of this step does not add up"
            )

    def after(
        self,
        next: int,
        settled: Mapping[Outcome, Iterable[Place]],
        waiting: Iterable[Waiting],
        out: Iterable[int] = (),
    ) -> Ledger:
        """Returns the account after a step that drew up to ordinal `next`, all but `out`.

        `settled` and `waiting` must be those that waited before and those that were drawn, each
        once; ValueError otherwise.
        """
        out = tuple(sorted(out))
        waiting = tuple(waiting)
        places = [one.group.place for one in waiting]
        places += [place for group in settled.values() for place in group]
        known = {one.group.place for one in self.waiting}
        new = [place for place in places if place not in known]
        if len(set(places)) != len(places) or not known <= set(places):
            raise ValueError("a group was settled twice, or one that waited was forgotten")
        left = {*self.out, *range(self.next, next)}
        if {ordinal for ordinal, _ in new} != left - set(out) or not left.issuperset(out):
            raise ValueError(f"the draws {self.next} to {next - 1} are not those that were settled")
        counts = dict(self.settled)
        for outcome, group in settled.items():
            counts[outcome] = counts.get(outcome, 0) + len(list(group))
        return Ledger(next, self.groups + len(new), counts, waiting, self.rates, out)

    def has(self, ordinal: int) -> bool:
        """Whether a draw is in the account."""
        return ordinal < self.next and ordinal not in self.out
