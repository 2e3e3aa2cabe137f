"""The schedule of asynchronous rollouts: a step's draws, their policy version, the next bundle.

A fleet is a trainer and readers that say everything in objects under names (`checkpoint.objects`).
Here are the names, and every decision as a pure function of what lies there: no clock, no message,
no process declared alive or dead. Step s makes policy version s; its draws are **pinned** to
one version, `reads(s, lead)`, so that their bits follow from plan and weights, whichever reader
reads them and however often. A step's draws are dealt into **bundles**: one engine reads a bundle
alone, from an empty cache.

A reader may begin what is planned, and a step is planned when its version is published. So at most
`lead` + 1 steps are under way at once, and no turn is older than `lead` when it is learnt from.
What a reader begins that another had begun does no harm: of two results of a bundle the first
stands.

In a **live** fleet the version of a plan is the oldest that may read for it: each turn is read by
the newest that a reader has. Which result a step learnt from no longer follows from the plan, so it
is written down before the update (`Choice`) and used again after a kill. With `slack` S a step
learns from what has ended first: it owes the bundles of steps up to its own - S, and is filled with
others. So no turn is older than lead + S, nothing is dropped for its age, and at most (lead + 1)
steps' draws are under way or wait in the spool. Above: training.fleet, training.fleet_reader.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

PLAN, CLAIM, PROGRESS, SPOOL, CHOICE = "plan", "claim", "progress", "spool", "choice"  # kinds
OF_STEPS = (PLAN, CLAIM, PROGRESS, SPOOL, CHOICE)
LEARNT_FROM = (PLAN, SPOOL, CHOICE)
TERMS, ENDED = "terms", "ended"  # objects of a run: what readers have to agree on, and its end
# What becomes of an object that is damaged.
AGAIN = "remove it, and train --resume makes it again"

_NAME = re.compile(r"(\w+)/(\d+)(?:-(\d+))?(?:-(\d+))?")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Draws of a step that one engine reads together."""

    step: int  # that learns from them; it makes the policy of this version
    number: int  # among those of the step
    version: int  # of the policy that reads them; the oldest, in a live fleet
    chunks: int  # of their documents at most; 0: no limit
    ordinals: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its objects, behind their kind."""
        return f"{self.step}-{self.number}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a step's rollout: its draws in bundles, and the policy version to read them."""

    step: int
    version: int
    chunks: int
    bundles: tuple[tuple[int, ...], ...]  # ordinals of each
    terms: str  # digest of what readers have to agree on

    @property
    def ordinals(self) -> list[int]:
        """The draws of all bundles, in the order of the stream."""
        return sorted(ordinal for each in self.bundles for ordinal in each)

    def each(self) -> Iterator[Bundle]:
        """Yields its bundles."""
        for number, ordinals in enumerate(self.bundles):
            yield Bundle(self.step, number, self.version, self.chunks, ordinals)

    def encoded(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self)) + "\n").encode()


def parsed(content: bytes) -> Plan:
    """Returns the plan that was `encoded`. Raises ValueError for anything else."""
    try:
        said = json.loads(content)
        bundles = tuple(tuple(map(int, each)) for each in said.pop("bundles"))
        return Plan(**said, bundles=bundles)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("is cut off, or was changed") from None


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which bundles a step learns from."""

    step: int
    read: Mapping[str, str]  # by the bundle's name, the digest of what was spooled of it

    def encoded(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self)) + "\n").encode()


def choice_of(content: bytes) -> Choice:
    """Returns the choice that was `encoded`. Raises ValueError for anything else."""
    try:
        said = json.loads(content)
        return Choice(said["step"], {str(name): str(one) for name, one in said["read"].items()})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("is cut off, or was changed") from None


# ---------------------------------------------------------------- the rule


def reads(step: int, lead: int, since: int = 0) -> int:
    """Returns the version that reads for a step: `lead` steps older than the one that learns.

    None older than `since`, with which the fleet began.
    """
    return max(since, step - 1 - lead)


def open_steps(done: int, lead: int, last: int) -> range:
    """Returns the steps that may be read for once version `done` is published, `last` at most."""
    return range(done + 1, min(done + 1 + lead, last) + 1)


def unplanned(
    plans: Iterable[Plan], next: int, out: Iterable[int]
) -> tuple[int, list[int]]:  # fmt: skip
    """Returns where planning goes on: an ordinal, and those before it that no plan has.

    `next` and `out` are the account's (`ledger.Ledger`).
    """
    taken = {ordinal for plan in plans for ordinal in plan.ordinals}
    return max([next, *(one + 1 for one in taken)]), [one for one in out if one not in taken]


def batch(
    step: int, plans: Iterable[Plan], there: Collection[str], settled: Callable[[int], bool],
    slack: int = 0,
) -> list[Bundle] | None:  # fmt: skip
    """Returns the bundles that a step learns from; None where it has to wait for some.

    `there` are names of bundles that are read, `settled` says of an ordinal whether it is in the
    account. All bundles of steps up to `step` - `slack` are owed, at most as many as a plan has;
    others that are read fill the batch up to that, the earliest first.
    """
    plans = sorted(plans, key=lambda plan: plan.step)
    size = max(len(plan.bundles) for plan in plans if plan.step == step)
    left = [one for plan in plans for one in plan.each() if not all(map(settled, one.ordinals))]
    owed = [one for one in left if one.step <= step - slack]
    assert len(owed) <= size, f"step {step} owes {len(owed)} bundles, and a batch has {size}"
    others = [one for one in left if one.step > step - slack and one.name in there]
    chosen = owed + others[: size - len(owed)]
    return chosen if len(chosen) == size and all(one.name in there for one in owed) else None


def settled(names: Iterable[str], saved: int, slack: int = 0) -> list[str]:
    """Returns the objects that are not needed again once step `saved` is: of what is settled."""
    until = dict.fromkeys(OF_STEPS, saved - slack) | {CHOICE: saved}
    return [
        name
        for name in names
        if (step := step_of(name)) is not None and step <= until[name.partition("/")[0]]
    ]


def step_of(name: str) -> int | None:
    """Returns the step that an object is of; None for one that is of none."""
    found = _NAME.fullmatch(name)
    return int(found[2]) if found and found[1] in OF_STEPS else None


# ---------------------------------------------------------------- what a reader takes up


def chosen(
    plans: Sequence[Plan], spooled: Collection[str], claims: Mapping[str, Sequence[str]], me: str
) -> Bundle | None:
    """Returns the bundle that reader `me` reads next; None where all that may be read are read.

    `spooled` are names of bundles that are read, `claims` which readers began which, in order.
    First what it began itself, before it was killed; then what none began, of the earliest step;
    then what others began, fewest of them first: their reader may be dead, or slow.
    """
    left = [one for plan in plans for one in plan.each() if one.name not in spooled]

    def order(one: Bundle) -> tuple[bool, int, int, int]:
        by = claims.get(one.name, ())
        return (not (by and by[-1] == me), len(by), one.step, one.number)

    return min(left, key=order, default=None)


def claimed(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the claims on each bundle, in order, of the names of all objects."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        said = _NAME.fullmatch(name)
        if said and said[1] == CLAIM and said[4] is not None:
            found.setdefault(f"{said[2]}-{said[3]}", []).append((int(said[4]), name))
    return {bundle: [name for _, name in sorted(each)] for bundle, each in found.items()}


def wanted(bundle: Bundle, names: Collection[str]) -> bool:
    """Returns whether no reader has read a bundle, and its step is not settled."""
    return f"{SPOOL}/{bundle.name}" not in names and f"{PLAN}/{bundle.step}" in names


def of_kind(names: Iterable[str], kind: str) -> list[str]:
    """Returns the names of the objects of a kind, without the leading `kind`/."""
    return [name.partition("/")[2] for name in names if name.startswith(f"{kind}/")]
