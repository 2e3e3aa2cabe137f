"""The search for the fastest and the cheapest settings of a step that leave its numbers alone.

`search` tries row length, rows of a micro-batch, recomputation, devices to a row, devices to an
engine and slices: hundreds of plans by arithmetic (`arithmetic`), a few milliseconds each. What an
update needs and what engines need are counted apart and added, since neither knows the other's
settings. Of the best, one of each family (slice, devices to a row, recomputation) at a time, the
programs are then compiled, where libtpu is there: what it says of a family's memory corrects the
estimates of the rest of it, and only a compiled plan that fits is found. Every point is told when
it is known. Above: `plan`'s command; below: `candidates` (what is tried), `figures` (a point), and
`plan`, whose numbers for a point are these.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from notepad_jax import keys
from notepad_jax.planner import plan, planned_policy
from notepad_jax.planner.candidates import of_engine, of_trainer
from notepad_jax.planner.cost_analysis import ProgramCost
from notepad_jax.planner.figures import Point, as_said
from notepad_jax.planner.lowering import HANDOFF, PHASES, ROLLOUT, UPDATE
from notepad_jax.planner.plan import DoesNotFit, SlicePlan
from notepad_jax.planner.planned_policy import PlannedPolicy
from notepad_jax.setup import configuration
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.screen import Screen, SilentScreen
from pallas_kernels import aot

_PRICES = pathlib.Path(__file__).with_name("prices.txt").read_text(encoding="utf-8").splitlines()
# Dollars for a chip and an hour, on demand; launch/ reads the same file.
PRICES = {
    chip: float(price)
    for chip, price, _ in (line.split() for line in _PRICES if not line.startswith("#"))
}
MOST_CHIPS = 256  # of the slices that a chip's name alone stands for
MEMORY = 0.01  # of a step's seconds that all of a device's memory is worth
BETTER = 0.99  # of the seconds of what is found: less is not worth a compilation
SHOWN = 3  # estimates that are told of each slice


@dataclasses.dataclass(frozen=True)
class Search:
    """The parameters of a search."""

    config: Training
    slices: Sequence[str]
    prices: Mapping[str, float]
    tries: int  # compilations, beside that of the config as it is; 0: none


@dataclasses.dataclass(frozen=True)
class _Guess:
    """Candidate settings, planned by arithmetic."""

    slice: str
    sets: Mapping[str, Any]
    seconds: float
    dollars: float | None
    stays: Mapping[str, int]  # bytes of each phase
    beside: Mapping[str, int]  # the largest program's of each phase
    hbm: int

    @property
    def family(self) -> tuple[str, Any, Any]:
        return self.slice, self.sets["parallel.tensor"], self.sets["grpo.remat"]

    @property
    def burden(self) -> float:
        """To multiply seconds or dollars with: of equals the one that needs less is better."""
        peak = max(self.stays[phase] + self.beside[phase] for phase in PHASES)
        return 1 + MEMORY * peak / self.hbm

    def fits(self, larger: Mapping[tuple[str, Any, Any], float]) -> bool:
        """`larger` says how much more of a family's updates is needed than was counted."""
        factor = {UPDATE: larger.get(self.family, 1.0)}
        return all(self.stays[p] + self.beside[p] * factor.get(p, 1.0) <= self.hbm for p in PHASES)


def slices(said: str) -> tuple[str, ...]:
    """Returns the slices that `--tpu` names: some, by comma, a chip alone for all of its slices.

    Raises ValueError for what there is not.
    """
    names: list[str] = []
    for word in said.split(","):
        chip = word.strip()
        if chip not in aot.SLICES:
            aot.chips_of(chip)
            names.append(chip)
            continue
        cubes = ("4x4x4", "4x4x8", "4x8x8") if chip in aot.MOST_CHIPS else ()
        every = [f"{chip}:{sides}" for sides in (*aot.SLICES[chip], *cubes)]
        names += [name for name in every if aot.chips_of(name) <= MOST_CHIPS]
    return tuple(dict.fromkeys(names))


def prices(said: Sequence[str]) -> Mapping[str, float]:
    """Returns dollars for a chip and an hour by chip, with those said as `v5p=2.1`.

    Raises ValueError for one that cannot be read.
    """
    found = dict(PRICES)
    for word in said:
        chip, _, price = word.partition("=")
        if chip not in aot.SLICES or not _is_price(price):
            raise ValueError(
                f"--price {word!r} is not CHIP=DOLLARS for an hour of one, as v5p=2.94, where CHIP "
                f"is one of {', '.join(aot.SLICES)}"
            )
        found[chip] = float(price)
    return found


def _is_price(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def search(
    asked: Search, screen: Screen, told: Callable[[Point], None], known: dict[str, ProgramCost]
) -> list[Point]:
    """Returns the points that were planned, in order; `told` is given each when it is there.

    `known` is as for `plan.run`. Raises ValueError where no setting can run on any of the slices.
    """
    points: list[Point] = []

    def tell(point: Point) -> Point:
        points.append(point)
        told(point)
        return point

    policy = planned_policy.policy_of(asked.config, "tpu")
    pool: list[_Guess] = []
    for name in asked.slices:
        if made := _plan(asked, name, {}, policy):
            tell(_point(made, {}, asked))
        guesses = _guesses(asked, name, policy)
        pool += guesses
        for guess in itertools.islice(_best_of_families(guesses), SHOWN):
            tell(_point(_plan(asked, name, guess.sets, policy), guess.sets, asked))
    if not pool:
        raise ValueError(
            f"by arithmetic no row length, recomputation or mesh fits {', '.join(asked.slices)}; "
            f"name larger slices, or plan one of them to read what it lacks"
        )
    if asked.tries:
        _compile(asked, pool, screen, tell, known)
    return points


# ---------------------------------------------------------------- compiled


def _compile(
    asked: Search,
    pool: Sequence[_Guess],
    screen: Screen,
    tell: Callable[[Point], Point],
    known: dict[str, ProgramCost],
) -> None:
    if len(asked.slices) == 1 and _runs(asked, asked.slices[0], {}):
        if point := _compiled(asked, asked.slices[0], {}, screen, known):
            tell(point)
    larger: dict[tuple[str, Any, Any], float] = {}
    left, found = list(pool), []
    aims = [operator.attrgetter("seconds")]
    if len({guess.slice for guess in pool}) > 1 and any(guess.dollars for guess in pool):
        aims.append(operator.attrgetter("dollars"))
    for aim in itertools.islice(itertools.cycle(aims), asked.tries):
        left = [guess for guess in left if guess.fits(larger)]
        aimed = [guess for guess in left if aim(guess)]  # what has a price, if that is the aim
        best = min((aim(point) for point in found if aim(point)), default=math.inf)
        guess = min(aimed, key=lambda guess, aim=aim: aim(guess) * guess.burden, default=None)
        if guess is None or aim(guess) > BETTER * best:
            continue
        point = _compiled(asked, guess.slice, guess.sets, screen, known)
        left.remove(guess)
        if point is None:
            continue
        if tell(point).fits:
            found.append(point)
            left = [other for other in left if other.family != guess.family]
            continue
        needed = (point.peaks[UPDATE] - guess.stays[UPDATE]) / max(1, guess.beside[UPDATE])
        larger[guess.family] = max(needed, larger.get(guess.family, 1.0))


def _compiled(
    asked: Search, name: str, sets: Mapping[str, Any], screen: Screen, known: dict[str, ProgramCost]
) -> Point | None:
    """None, and a line, for what a kernel or a program refuses before anything is compiled."""
    config = _changed(asked.config, sets)
    try:
        made = plan.run(config, name, screen, known, plan.LARGEST)
    except DoesNotFit as problem:
        made = problem.plan
    except ValueError as problem:
        screen.warn(f"{name}, {sets or 'as it is'}: {problem}")
        return None
    return _point(made, sets, asked)


# ---------------------------------------------------------------- by arithmetic


def _guesses(asked: Search, name: str, policy: PlannedPolicy) -> list[_Guess]:
    """Returns what fits the slice `name` by arithmetic, the fastest first."""
    trainers, engines = (
        of_trainer(asked.config, name, policy),
        of_engine(asked.config, name, policy),
    )
    tried = ([(t, _plan(asked, name, t | e, policy)) for t in trainers] for e in engines)
    learnt = next((found for some in tried if (found := [one for one in some if one[1]])), [])
    if not learnt:
        return []
    lead, base = learnt[0]
    read = [(e, made) for e in engines if (made := _plan(asked, name, lead | e, policy))]
    stay = functools.partial(_stays, base)
    guesses = []
    for (t, learns), (e, reads) in itertools.product(learnt, read):
        phases = {ROLLOUT: _phase(reads, ROLLOUT), UPDATE: _phase(learns, UPDATE)}
        phases[HANDOFF] = _phase(reads, HANDOFF)
        seconds = sum(phase.seconds for phase in phases.values())
        guess = _Guess(
            slice=name,
            sets=t | e,
            seconds=seconds,
            dollars=_dollars(asked, name, seconds),
            stays={p: stay(learns, p) + stay(reads, p) + stay(base, p) for p in PHASES},
            beside={p: phase.peak - sum(phase.residents.values()) for p, phase in phases.items()},
            hbm=base.hbm,
        )
        if guess.fits({}):
            guesses.append(guess)
    return sorted(guesses, key=lambda guess: guess.seconds * guess.burden)


def _stays(base: SlicePlan, made: SlicePlan, phase: str) -> int:
    """What stays of `made` beyond what stays of `base`; all of it for `base` itself."""
    own = sum(_phase(made, phase).residents.values())
    return own - (0 if made is base else sum(_phase(base, phase).residents.values()))


def _phase(made: SlicePlan, name: str) -> plan.Phase:
    return made.phases[PHASES.index(name)]


def _best_of_families(guesses: Sequence[_Guess]) -> Iterator[_Guess]:
    seen = set()
    for guess in guesses:
        if guess.family not in seen:
            seen.add(guess.family)
            yield guess


# ---------------------------------------------------------------- one point


def _plan(
    asked: Search, name: str, sets: Mapping[str, Any], policy: PlannedPolicy
) -> SlicePlan | None:
    """A plan by arithmetic, whether it fits or not; None for what cannot run there."""
    try:
        config = _changed(asked.config, sets)
        return plan.run(
            config, name, SilentScreen(), programs=plan.ESTIMATE, policy=policy, documents=False
        )
    except DoesNotFit as problem:
        return problem.plan
    except ValueError:
        return None


def _runs(asked: Search, name: str, sets: Mapping[str, Any]) -> bool:
    return _plan(asked, name, sets, planned_policy.policy_of(asked.config, "tpu")) is not None


def _changed(config: Training, sets: Mapping[str, Any]) -> Training:
    overrides = [f"--config.{key}={as_said(value)}" for key, value in sets.items()]
    return configuration.changed(config, overrides)


def _point(made: SlicePlan, sets: Mapping[str, Any], asked: Search) -> Point:
    known = keys.flat(asked.config)
    return Point(
        slice=made.slice,
        sets={key: value for key, value in sets.items() if known[key] != value},
        compiled=made.compiled,
        fits=made.fits,
        seconds=made.seconds,
        dollars=_dollars(asked, made.slice, made.seconds),
        peaks={phase.name: phase.peak for phase in made.phases},
        hbm=made.hbm,
        fill=made.step["fill"],
        computed_tokens=int(made.step["computed_tokens"]),
        verdict=made.verdict,
    )


def _dollars(asked: Search, name: str, seconds: float) -> float | None:
    price = asked.prices.get(name.partition(":")[0])
    return None if price is None else price * aot.chips_of(name) * seconds / 3600
