"""Which draws a step learns from, which version reads them, and what a reader takes up next.

A fleet is a trainer and readers that say everything in objects under names (`checkpoint.objects`).
Here are the names, and every decision as a pure function of what lies there: no clock, no message,
nobody who is declared alive or dead. Step s makes policy version s; its draws are **pinned** to one
version, `reads(s, lead)`, so that their bits follow from plan and weights, whoever reads them and
however often. A step's draws are dealt into **bundles**: one engine reads a bundle alone, from an
empty cache.

A reader may begin what is planned, and a step is planned when its version is published. So at most
`lead` + 1 steps are under way at once, and no turn is older than `lead` when it is learnt from.
What a reader begins that another had begun harms nobody: of two results of a bundle, which are
equal, the first stands. Above: training.fleet and training.fleet_reader.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

PLAN, CLAIM, PROGRESS, SPOOL = "plan", "claim", "progress", "spool"  # kinds of objects
OF_STEPS = (PLAN, CLAIM, PROGRESS, SPOOL)
TERMS, ENDED = "terms", "ended"  # objects of a run: what readers have to agree on, and its end

_NAME = re.compile(r"(\w+)/(\d+)(?:-(\d+))?(?:-(\d+))?")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Draws of a step that one engine reads together."""

    step: int  # that learns from them; it makes the policy of this version
    number: int  # among those of the step
    version: int  # of the policy that reads them
    chunks: int  # of their documents at most; 0: no limit
    ordinals: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its objects, behind their kind."""
        return f"{self.step}-{self.number}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is read for a step."""

    step: int
    version: int
    chunks: int
    bundles: tuple[tuple[int, ...], ...]  # ordinals of each
    terms: str  # digest of what readers have to agree on

    @property
    def ordinals(self) -> list[int]:
        """Of all bundles, in the order of the stream."""
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
        raise ValueError("a plan is cut off, or was changed") from None


# ---------------------------------------------------------------- the rule


def reads(step: int, lead: int, since: int = 0) -> int:
    """Returns the version that reads for a step: `lead` steps older than the one that learns.

    None older than `since`, with which the fleet began.
    """
    return max(since, step - 1 - lead)


def open_steps(done: int, lead: int, last: int) -> range:
    """Returns the steps that may be read for once version `done` is published, `last` at most."""
    return range(done + 1, min(done + 1 + lead, last) + 1)


def settled(names: Iterable[str], saved: int) -> list[str]:
    """Returns the objects of steps up to `saved`: nobody needs them again."""
    return [name for name in names if (found := step_of(name)) is not None and found <= saved]


def step_of(name: str) -> int | None:
    """Returns the step that an object is of; None for one that is of none."""
    found = _NAME.fullmatch(name)
    return int(found[2]) if found and found[1] in OF_STEPS else None


# ---------------------------------------------------------------- what a reader takes up


def chosen(
    plans: Sequence[Plan], spooled: Collection[str], claims: Mapping[str, Sequence[str]], me: str
) -> Bundle | None:
    """Returns the bundle that reader `me` reads next; None where all that may be read are read.

    `spooled` are names of bundles that are read, `claims` who began which, in order. First what
    it began itself, before it was killed; then what nobody began, of the earliest step; then what
    others began, fewest of them first: their reader may be dead, or slow.
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


def of_kind(names: Iterable[str], kind: str) -> list[str]:
    """Returns what stands behind `kind`/ in the names of such objects."""
    return [name.partition("/")[2] for name in names if name.startswith(f"{kind}/")]
