"""Work claiming by readers: plans and claims in a run's folder decide a reader's next bundle.

A claim says which reader began a bundle. It only decides what is read first: a bundle that two
readers have begun is put once. Above: fleet_reader and fleet_live; the order is
`rollout.schedule.chosen`'s.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence

from notepad_jax.checkpoint.objects import Objects
from notepad_jax.rollout import schedule
from notepad_jax.rollout.schedule import Bundle, Plan

PATIENCE = 30.0  # seconds after which another's bundle is begun again, before one was read here
QUIET = 60.0  # seconds without anything to begin after which a reader says what it waits for
SLOWER = 3.0  # times as long as the last of our own


@dataclasses.dataclass
class Claims:
    """One reader's view of a fleet's plans, and of which reader began what."""

    objects: Objects
    terms: str  # what plans have to carry (`fleet.Terms.agreed`)
    me: str
    last: float = PATIENCE / SLOWER  # seconds that our last bundle took
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    seen: dict[str, float] = dataclasses.field(default_factory=dict)  # claims, since when
    owners: dict[str, str] = dataclasses.field(default_factory=dict)  # of claims
    copied: bool = False  # whether another had begun what was begun last
    idle_since: float | None = None  # when there was nothing to begin first

    def next(
        self, names: Sequence[str], may: Callable[[int], bool], besides: Collection[str] = (),
        copies: bool = True,
    ) -> Bundle | None:  # fmt: skip
        """Claims and returns the next bundle to read; None where there is none.

        It may be one that another has begun long ago, unless no `copies` are wanted.

        `names` are those of all objects, `may` says whether a plan of a version may be read, and
        `besides` are bundles that are under way here. Raises ValueError for plans of other terms.
        """
        read, by = set(schedule.of_kind(names, schedule.SPOOL)), schedule.claimed(names)
        planned = self._planned(schedule.of_kind(names, schedule.PLAN))
        plans = [plan for plan in planned if may(plan.version)]
        claims = {bundle: [self._whose(one) for one in each] for bundle, each in by.items()}
        fresh = {bundle for bundle, each in by.items() if not copies or self._fresh(each[-1])}
        others = {bundle for bundle, each in claims.items() if each[-1] != self.me}
        bundle = schedule.chosen(plans, read | set(besides) | fresh & others, claims, self.me)
        if bundle is None:
            return None
        self.idle_since = None
        self.copied = bundle.name in others
        number = len(by.get(bundle.name, ()))
        mine = self.put(schedule.CLAIM, bundle, self.me.encode(), f"-{number}")
        return bundle if mine else None  # another was quicker: look again

    def put(self, kind: str, bundle: Bundle, content: bytes, which: str = "") -> bool:
        """Puts an object of a bundle; returns whether it stands now.

        It goes again if the bundle's step is settled meanwhile. A trainer removes a settled step's
        plan before it lists what else lies there, so that one of the two sees it.
        """
        name = f"{kind}/{bundle.name}{which}"
        if kind == schedule.PROGRESS:
            self.objects.replace(name, content)
        elif not self.objects.put(name, content):
            return False
        if self.objects.get(f"{schedule.PLAN}/{bundle.step}") is not None:
            return True
        self.objects.remove(name)
        return False

    def idle(self, may: Callable[[int], bool]) -> str:
        """Returns what a reader without work waits for: once, after QUIET seconds; else ""."""
        if self.idle_since is None:
            self.idle_since = time.monotonic()
        if time.monotonic() - self.idle_since < QUIET:
            return ""
        self.idle_since = math.inf  # once
        gone = sorted({plan.version for plan in self.plans.values() if not may(plan.version)})
        if gone:
            return f"waiting for version {gone[0]} of the policy, by which the next step is read"
        return "waiting for the trainer, which has planned nothing that is not read"

    def _planned(self, steps: Sequence[str]) -> list[Plan]:
        for step in steps:
            name = f"{schedule.PLAN}/{step}"
            if step not in self.plans:
                if plan := self.objects.parsed(name, schedule.parsed, schedule.AGAIN):
                    self.plans[step] = plan
        self.plans = {step: plan for step, plan in self.plans.items() if step in steps}
        for plan in self.plans.values():
            if plan.terms != self.terms:
                raise ValueError(
                    f"the run in {self.objects.folder.parent} went on with other settings since "
                    f"this reader began; start it again"
                )
        return list(self.plans.values())

    def _whose(self, claim: str) -> str:
        if claim not in self.owners:  # asked once: it only says what is read first
            self.owners[claim] = (self.objects.get(claim) or b"").decode()
        return self.owners[claim]

    def _fresh(self, claim: str) -> bool:
        """Whether a claim has not stood for so long that its reader may be dead."""
        since = self.seen.setdefault(claim, time.monotonic())
        return time.monotonic() - since < SLOWER * self.last
