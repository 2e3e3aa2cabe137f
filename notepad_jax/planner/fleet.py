"""A discrete-event simulation of a fleet: step time where rollout and update overlap.

Engines read documents turn by turn, a trainer learns from batches of them and publishes what came
of it; `simulate` plays one `Mode` of sharing chips between the two. Step v learns with version v
and makes v + 1; cohort c is the c-th N documents of the stream. Two numbers say what may overlap
(docs/configuration.md): a cohort may be begun once version c - lead is there, and the batch of step
v has all that is left of cohorts up to v - slack, filled with other finished documents, the oldest
first. So nothing is learnt from that is older than lead + slack.

Nothing here is measured or drawn: same documents, rates and mode, same outcome. An engine decodes
all its running turns together, a step at a time, and stands still while it prefills. Above:
`fleet_modes`, which lists what is worth comparing; rates come from `fleet_rates`, documents from
`fleet_lengths`, and one engine is `fleet_engine`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from notepad_jax.planner.fleet_engine import Engine, PlayedDocument, Rates

# How an engine takes new weights. Pinned: it reads its whole share of a cohort with one version.
# Draining: it ends its turns first. Resident: old and new weights lie beside each other, and every
# turn begins with the newest.
PINNED, DRAINING, RESIDENT = ADOPTIONS = ("pinned", "draining", "resident")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A schedule of rollout and update: what runs when, and on which chips."""

    name: str
    readers: int  # engines
    trainer: float = 0.0  # engines' worth of chips that only learn; 0: the readers' chips learn
    by_length: bool = True  # longest document to the least loaded engine, and first
    window: int = 1  # steps whose documents are sorted by length and dealt to their batches
    lead: int = 0  # cohorts that may be begun ahead of the version that learns
    slack: int = 0  # steps that a document may come later than its cohort
    adoption: str = RESIDENT  # of ADOPTIONS

    @property
    def apart(self) -> bool:
        return self.trainer > 0

    @property
    def engines(self) -> float:
        """Chips, in those of one engine."""
        return self.readers + self.trainer


@dataclasses.dataclass(frozen=True)
class ModeResult:
    """The result of a simulated mode; seconds are of the model's clock."""

    seconds: float  # of a step, in the mean over those after the first ones
    learning: float  # of them, in the mean over all steps
    readers_idle: float  # share of the time that engines may read
    trainer_idle: float  # share of the time; of a trainer that has chips of its own, or 0
    ages: Mapping[int, int]  # documents, by versions between learning and their oldest turn
    turns: int  # of readings, that were read of the documents learnt from
    packed: int  # tokens learnt from
    busy: float  # engines' seconds of reading and learning, in all
    least: float  # of what was learnt from: engines' seconds, were all slots always taken
    whole: float  # seconds from the start to the last step's end


def simulate(
    documents: Sequence[PlayedDocument],
    mode: Mode,
    rates: Rates,
    batch: int,
    steps: int = 12,
    first: int = 4,
) -> ModeResult:
    """Simulates `steps` steps of `batch` documents each; the mean is over those after the `first`.

    Raises ValueError where the stream is shorter than `needed` says.
    """
    if len(documents) < needed(mode, batch, steps):
        raise ValueError(
            f"{len(documents)} documents are fewer than the {needed(mode, batch, steps)} that "
            f"{steps} steps of {batch} draw with lead {mode.lead} and slack {mode.slack}"
        )
    stream = arranged(documents[: needed(mode, batch, steps)], mode, batch)
    return _Run(stream, mode, rates, batch, steps).outcome(first)


def needed(mode: Mode, batch: int, steps: int) -> int:
    """Returns how many documents a run of `steps` steps may begin."""
    ahead = mode.lead + mode.slack
    return batch * (steps + (ahead + 1 if ahead else 0))


def arranged(documents: Sequence[PlayedDocument], mode: Mode, batch: int) -> list[PlayedDocument]:
    """Returns the stream as it is read: cohorts one after the other, what comes first, first."""
    stream = list(documents)
    if mode.window > 1:
        stream = _sorted(stream, batch * mode.window, longest_first=False)
    return _sorted(stream, batch, longest_first=True) if mode.by_length else stream


def _sorted(
    stream: Sequence[PlayedDocument], each: int, longest_first: bool
) -> list[PlayedDocument]:
    """Sorts every `each` documents among themselves; equally long ones stay as they are."""
    parts = (stream[first : first + each] for first in range(0, len(stream), each))
    return [one for part in parts for one in sorted(part, key=_length, reverse=longest_first)]


def _length(document: PlayedDocument) -> int:
    return document.length


class _Run:
    """The state of a fleet at one moment of the model's clock."""

    def __init__(
        self, stream: Sequence[PlayedDocument], mode: Mode, rates: Rates, batch: int, steps: int
    ) -> None:
        self._stream, self._mode, self._rates = stream, mode, rates
        self._batch, self._steps = batch, steps
        draining = mode.adoption == DRAINING
        self._engines = [Engine(rates, stream, draining) for _ in range(mode.readers)]
        self._now = 0.0
        self._version, self._newest = 0, 0  # that learns; that was published last
        self._ends = [0.0]  # of steps; of the first `0`, the start
        self._released = 0  # cohorts that engines were given
        self._left = [len(document.lots) for document in stream]  # lots that are not read yet
        self._oldest = [steps] * len(stream)  # version of the oldest turn
        self._done: set[int] = set()  # read and not learnt from: places in the stream
        self._settled: set[int] = set()
        self._learning: list[int] = []
        self._learnt_at = math.inf
        self._published: collections.deque[tuple[float, int]] = collections.deque()
        self._news = False  # whether something happened that may let a step begin
        self._learnt, self._ages = 0.0, collections.Counter[int]()

    def outcome(self, first: int) -> ModeResult:
        self._release()
        while self._version < self._steps:
            self._event()
            if self._news:
                self._begin_step()
        settled = [self._stream[place] for place in self._settled]
        reading = sum(engine.busy for engine in self._engines)
        may = self._now - (0 if self._mode.apart else self._learnt)
        chips = self._mode.trainer or self._mode.readers
        packed = sum(document.packed for document in settled)
        return ModeResult(
            seconds=(self._ends[-1] - self._ends[first]) / (self._steps - first),
            learning=self._learnt / self._steps,
            readers_idle=1 - reading / (len(self._engines) * may),
            trainer_idle=1 - self._learnt / self._now if self._mode.apart else 0.0,
            ages=dict(sorted(self._ages.items())),
            turns=sum(lot.readings * len(lot.written) for one in settled for lot in one.lots),
            packed=packed,
            busy=reading + self._learnt * chips,
            least=packed / self._rates.update + sum(map(self._rates.least, settled)),
            whole=self._now,
        )

    def _event(self) -> None:
        """Advances the clock to the next event."""
        engine = min(self._engines, key=_ends)
        published = self._published[0][0] if self._published else math.inf
        at = min(engine.ends, self._learnt_at, published)
        assert at < math.inf, f"nothing happens in step {self._version} of {self._mode.name}"
        self._now = max(self._now, at)
        if at == published:
            self._adopt(self._published.popleft()[1])
        elif at == self._learnt_at:
            self._end_step()
        else:
            self._end_turn(engine)

    def _end_turn(self, engine: Engine) -> None:
        place, version, last = engine.end_turn()
        self._oldest[place] = min(self._oldest[place], version)
        if last:
            self._left[place] -= 1
            if not self._left[place]:
                self._done.add(place)
                self._news = True
        engine.go_on(self._now)
        self._news |= engine.paused

    def _adopt(self, version: int) -> None:
        self._newest, self._news = version, True
        for engine in self._engines:
            engine.paused = False
            if self._mode.adoption != PINNED:
                engine.coming = version
        self._release()

    def _release(self) -> None:
        """Gives engines the cohorts that the newest version lets them begin."""
        ended = len(self._stream) // self._batch
        while self._released < min(ended, self._newest + self._mode.lead + 1):
            first = self._released * self._batch
            version = max(0, self._released - self._mode.lead)
            self._share(range(first, first + self._batch), version)
            self._released += 1
        for engine in self._engines:
            engine.go_on(self._now)

    def _share(self, cohort: range, version: int) -> None:
        pinned = self._mode.adoption == PINNED
        shares: list[list[int]] = [[] for _ in self._engines]
        loads = [0 if pinned else engine.load for engine in self._engines]
        for place in cohort:
            least = loads.index(min(loads)) if self._mode.by_length else place % len(loads)
            shares[least].append(place)
            loads[least] += self._stream[place].turns
        for engine, share in zip(self._engines, shares, strict=True):
            if pinned:
                engine.shares.append((version, share))
            else:
                engine.take(share)

    def _begin_step(self) -> None:
        """Begins to learn if the batch is there, and no earlier one is on its way."""
        together = not self._mode.apart
        if self._learnt_at < math.inf or (together and self._published):
            return
        batch = self._ready()
        if len(batch) < self._batch or self._version == self._steps:
            self._news = False
            return
        if together:  # a turn that runs is ended first, and no other is begun
            for engine in self._engines:
                engine.paused = True
            if any(engine.taken for engine in self._engines):
                return
        packed = sum(self._stream[place].packed for place in batch)
        chips = self._mode.trainer or self._mode.readers
        took = packed / (self._rates.update * chips)
        self._learning, self._learnt_at, self._news = batch, self._now + took, False
        self._learnt += took

    def _ready(self) -> list[int]:
        """The next batch; shorter than a batch where what is owed or fills it is not read yet."""
        owed = set(self._owed())
        if not owed <= self._done:
            return []
        rest = sorted(self._done - owed)
        return [*sorted(owed), *rest][: self._batch]

    def _owed(self) -> Iterator[int]:
        until = (self._version - self._mode.slack + 1) * self._batch
        return (place for place in range(until) if place not in self._settled)

    def _end_step(self) -> None:
        for place in self._learning:
            self._ages[self._version - self._oldest[place]] += 1
        self._done.difference_update(self._learning)
        self._settled.update(self._learning)
        self._version += 1
        self._ends.append(self._now)
        takes = self._rates.publish if self._mode.apart else self._rates.handoff
        self._published.append((self._now + takes, self._version))
        self._learnt_at, self._news = math.inf, True


def _ends(engine: Engine) -> float:
    return engine.ends
