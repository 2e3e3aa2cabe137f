"""The task sampler: which ordinals of the stream a round reads, and which it passes over, and why.

Ordinals are walked through in order, so what is drawn follows from the account alone. One whose
task is retired is passed over, and one of a kind of which no more are wanted. Above:
dynamic_sampling.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from notepad_jax.rollout.ledger import Outcome, Place

ANY = ""  # the one kind, where kinds do not matter


@dataclasses.dataclass(frozen=True)
class Stream:
    """The stream of tasks, as far as it is known of an ordinal before it is read."""

    kind: Callable[[int], str]
    retired: Callable[[int], bool]


EVERY = Stream(kind=lambda ordinal: ANY, retired=lambda ordinal: False)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A round's draws, by ordinal."""

    read: Sequence[int]  # ordinals
    passed: Mapping[Outcome, list[Place]]
    next: int  # the ordinal that comes after them
    out: Sequence[int] = ()  # before it, that were not drawn (`ledger.Ledger.out`)


def draw(
    first: int, counts: Mapping[str, int], stream: Stream, questions: int, out: Sequence[int] = ()
) -> Drawn:
    """Samples `counts` documents of each kind, of the ordinals `out` and from `first` on.

    Never ends where a kind has no more tasks: retiring must leave some of each.
    """
    left = dict(counts)
    looks = set(left) != {ANY}
    read: list[int] = []
    passed: dict[Outcome, list[Place]] = {}
    seen, ordinals = 0, itertools.chain(out, itertools.count(first))
    while any(left.values()):
        ordinal, seen = next(ordinals), seen + 1
        kind = stream.kind(ordinal) if looks else ANY
        if stream.retired(ordinal):
            why = Outcome.RETIRED
        elif not left.get(kind):
            why = Outcome.NO_ROOM
        else:
            why = None
            left[kind] -= 1
            read.append(ordinal)
        if why:
            passed.setdefault(why, []).extend((ordinal, q) for q in range(questions))
    return Drawn(read, passed, first + max(0, seen - len(out)), tuple(out[seen:]))
