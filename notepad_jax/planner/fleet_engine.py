"""An engine of the simulated fleet: what waits, what runs, and how far its clock is.

All turns that run decode together: a step takes a fixed time and some for each taken slot, and
prefill of a turn that begins holds up the others. Readings of a group that write equally much are a
*lot*, which is one event instead of many; with every turn at its limit that is the whole group.
Above: `fleet`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Lot:
    """Readings of a group that advance in step, and have a slot each."""

    readings: int
    private: tuple[int, ...]  # prompt tokens of one of them, in each turn
    written: tuple[int, ...]  # tokens of one of them, in each turn


@dataclasses.dataclass(frozen=True)
class PlayedDocument:
    """A document with the readings of its group. The last turns are the answer's."""

    shared: tuple[int, ...]  # prompt tokens that its group shares, in each turn
    lots: tuple[Lot, ...]
    packed: int  # tokens of it that an update computes

    @functools.cached_property
    def length(self) -> int:
        return sum(self.shared)

    @functools.cached_property
    def prompts(self) -> int:
        """Prompt tokens that an engine prefills of it, where its group shares what it can."""
        return self.length + sum(lot.readings * sum(lot.private) for lot in self.lots)

    @functools.cached_property
    def turns(self) -> int:
        """Turns of all its readings."""
        return len(self.shared) * sum(lot.readings for lot in self.lots)


@dataclasses.dataclass(frozen=True)
class Rates:
    """The speeds of an engine's chips, and the times of a weight transfer."""

    slots: int  # turns that an engine decodes at once
    prefill: float  # tokens a second
    decode: float  # seconds of a decoding step, however few slots are taken
    slot: float  # seconds more for each slot that is
    update: float  # packed tokens a second, learnt on the chips of one engine
    handoff: float  # seconds from a trainer to engines on the same chips
    publish: float  # seconds from a trainer through storage to where engines see it
    adopt: float  # seconds that an engine stands still to take them from there
    switch: float  # seconds that it does where they lie on its host by then

    def least(self, document: PlayedDocument) -> float:
        """Returns the engine's seconds of reading it, were all slots always taken."""
        written = sum(lot.readings * sum(lot.written) for lot in document.lots)
        steps = written / self.slots
        return document.prompts / self.prefill + steps * self.decode + written * self.slot


class Engine:
    """One engine; its owner calls `go_on`, and `ends` says when its next turn ends."""

    def __init__(self, rates: Rates, stream: Sequence[PlayedDocument], draining: bool) -> None:
        self._rates, self._stream, self._draining = rates, stream, draining
        self.clock = 0.0
        self.busy = 0.0  # seconds
        self.taken = 0  # slots
        self.load = 0  # turns of readings that it was given and has not ended
        self.version = 0
        self.coming: int | None = None  # a version that it has not adopted yet
        self.paused = False  # no turn is begun, since the chips are wanted
        self.shares: collections.deque[tuple[int, list[int]]] = collections.deque()  # pinned ones
        self._step = 0.0  # decoding steps so far
        self._running: list[tuple[float, int, int, int, int]] = []  # until which step, and what
        self._waiting: list[tuple[int, int, int]] = []  # place in the stream, lot, turn
        self._prefilled: set[tuple[int, int]] = set()  # place and turn, by this version

    @property
    def ends(self) -> float:
        """When the next turn ends, if none is begun before."""
        if not self._running:
            return math.inf
        return self.clock + (self._running[0][0] - self._step) * self._pace

    @property
    def _pace(self) -> float:
        return self._rates.decode + self._rates.slot * self.taken

    def take(self, places: Sequence[int]) -> None:
        """Puts documents of the stream behind those that wait."""
        for place in places:
            document = self._stream[place]
            self.load += document.turns
            for lot in range(len(document.lots)):
                heapq.heappush(self._waiting, (place, lot, 0))

    def end_turn(self) -> tuple[int, int, bool]:
        """Returns (place of the document, version, whether the lot's reading is over)."""
        self._advance(self.ends)
        _, place, lot, turn, version = heapq.heappop(self._running)
        readings = self._stream[place].lots[lot].readings
        self.taken -= readings
        self.load -= readings
        last = turn + 1 == len(self._stream[place].shared)
        if not last:
            heapq.heappush(self._waiting, (place, lot, turn + 1))
        return place, version, last

    def go_on(self, now: float) -> None:
        """Adopts new weights and begins waiting turns, where that is allowed."""
        self._advance(now)
        if not self.taken and not self._waiting and self.shares:
            version, places = self.shares.popleft()
            self._turn_to(version, self._rates.switch)
            self.take(places)
        elif self.coming is not None and not (self._draining and self.taken):
            self._turn_to(self.coming, self._rates.adopt if self._draining else 0.0)
            self.coming = None
        if not self.paused and self.coming is None:
            self._begin()

    def _turn_to(self, version: int, seconds: float) -> None:
        if version != self.version:
            self.version = version
            self.clock += seconds
            self._prefilled.clear()

    def _begin(self) -> None:
        while self._waiting:
            place, number, turn = self._waiting[0]
            document = self._stream[place]
            lot = document.lots[number]
            if self.taken + lot.readings > self._rates.slots:
                return
            heapq.heappop(self._waiting)
            tokens = lot.readings * lot.private[turn]
            if (place, turn) not in self._prefilled:
                self._prefilled.add((place, turn))
                tokens += document.shared[turn]
            self.clock += tokens / self._rates.prefill
            self.busy += tokens / self._rates.prefill
            self.taken += lot.readings
            until = self._step + lot.written[turn]
            heapq.heappush(self._running, (until, place, number, turn, self.version))

    def _advance(self, to: float) -> None:
        if to <= self.clock:
            return
        if self.taken:
            self._step += (to - self.clock) / self._pace
            self.busy += to - self.clock
        self.clock = to
