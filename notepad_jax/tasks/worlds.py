"""A simulation of bAbI's worlds: people go from room to room, take things, drop and give them.

bAbI (Weston et al. 2015, arXiv 1502.05698) asks about stories that a small simulated world tells.
This is a simulation of our own that tells in the same words; what happens is drawn from a seed. A
`World` is replayed event by event, knows where people are, what they hold, and by which sentence of
the story each of these is known. Above: babilong, which asks; beside: whereabouts; below: cast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from notepad_jax.tasks.draws import Cast

MOVE, TAKE, DROP, GIVE = "move", "take", "drop", "give"

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")

WENT = ("went to", "went back to", "moved to", "journeyed to", "travelled to")
_VERBS: Mapping[str, tuple[str, ...]] = {
    TAKE: ("took", "got", "grabbed", "picked up"),
    DROP: ("dropped", "left", "discarded", "put down"),
    GIVE: ("gave", "handed", "passed"),
}


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens, one sentence of the story."""

    who: str
    did: str  # MOVE, TAKE, DROP or GIVE
    what: str  # a room, or else a thing
    to: str = ""  # the person it is given to


@dataclasses.dataclass(frozen=True)
class KnownFrom:
    """A room or a person, and which sentence of the story says so (from 0)."""

    name: str
    sentence: int


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a world is made of, and how often what happens in it."""

    people: Sequence[str]
    rooms: Sequence[str]
    things: Sequence[str]
    weights: Mapping[str, float]  # of the kinds of events, among those that are possible


class World:
    """The state of a world: where people are, and what they hold, after the events it was shown.

    A person's place is unknown before they move, and that of a thing until it is taken.
    """

    def __init__(self) -> None:
        self.at: dict[str, KnownFrom] = {}  # person -> room
        self.held: dict[str, KnownFrom] = {}  # thing -> holder, in the order of receiving
        self.trail: dict[str, list[KnownFrom]] = {}  # thing -> the rooms that it was in
        self._sentences = 0

    def show(self, event: Event) -> None:
        """Applies the next event to the world."""
        here = KnownFrom(event.what, self._sentences)
        if event.did == MOVE:
            self.at[event.who] = here
            for thing in self.carried(event.who):
                self._trace(thing, here)
        else:
            self.held.pop(event.what, None)
        if event.did in (TAKE, GIVE):
            self.held[event.what] = KnownFrom(event.to or event.who, self._sentences)
            self._trace(event.what, self.at[event.who])
        if event.did == GIVE:  # is where the giver is
            self.at.setdefault(event.to, self.at[event.who])
        self._sentences += 1

    def carried(self, person: str) -> list[str]:
        return [thing for thing, holder in self.held.items() if holder.name == person]

    def _trace(self, thing: str, room: KnownFrom) -> None:
        trail = self.trail.setdefault(thing, [])
        if not trail or trail[-1].name != room.name:
            trail.append(room)

    def possible(self, setting: Setting) -> dict[str, list[Event]]:
        """Returns what can happen next, by kind; every kind has something."""
        found: dict[str, list[Event]] = {}
        for event in self._next(setting):
            found.setdefault(event.did, []).append(event)
        return {did: events for did, events in found.items() if did in setting.weights}

    def _next(self, setting: Setting) -> Iterator[Event]:
        for who in setting.people:
            for room in setting.rooms:
                if self._room(who) != room:
                    yield Event(who, MOVE, room)
            for thing in setting.things:
                yield from self._with(who, thing, setting.people)

    def _with(self, who: str, thing: str, people: Sequence[str]) -> Iterator[Event]:
        """What one person can do with one thing."""
        holder, room = self.held.get(thing), self._room(who)
        if holder is None and room and self._lies(thing) in ("", room):
            yield Event(who, TAKE, thing)
        if holder is not None and holder.name == who:
            yield Event(who, DROP, thing)
            for other in people:
                if other != who and self._room(other) in ("", room):
                    yield Event(who, GIVE, thing, other)

    def _room(self, person: str) -> str:
        return self.at[person].name if person in self.at else ""

    def _lies(self, thing: str) -> str:
        return self.trail[thing][-1].name if thing in self.trail else ""


def play(cast: Cast, setting: Setting, steps: int) -> list[Event]:
    """Returns `steps` events of a new world."""
    world, events = World(), []
    for _ in range(steps):
        possible = world.possible(setting)
        kinds = sorted(possible)
        weights = [setting.weights[did] for did in kinds]
        did = cast.rng.choice(kinds, p=[weight / sum(weights) for weight in weights])
        event = possible[did][cast.between(0, len(possible[did]) - 1)]
        world.show(event)
        events.append(event)
    return events


def after(events: Sequence[Event]) -> World:
    """Returns the world in which these events have happened."""
    world = World()
    for event in events:
        world.show(event)
    return world


def said(cast: Cast, event: Event) -> str:
    """Returns an event as a sentence, in one of several wordings."""
    if event.did == MOVE:
        return f"{event.who} {cast.one_of(WENT)} the {event.what}."
    there = cast.one_of((" there", ""))
    receiver = f" to {event.to}" if event.to else ""
    return f"{event.who} {cast.one_of(_VERBS[event.did])} the {event.what}{receiver}{there}."
