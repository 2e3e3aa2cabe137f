"""bAbI's stories of places, in which no thing is carried: walks, sides of rooms, sightings.

Nothing has to be simulated for these: the last sentence about a person decides, or the one about
a room. Each function tells a story and asks about it (`Told`). Above: babilong, beside: worlds.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from notepad_jax.tasks import worlds
from notepad_jax.tasks.draws import Cast
from notepad_jax.tasks.worlds import PEOPLE, ROOMS, KnownFrom

_WOMEN = ("Mary", "Sandra")
_NEXT = ("After that", "Afterwards", "Following that", "Then")
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclasses.dataclass(frozen=True)
class StoryQuestion:
    """A question about a story, its answer, and what has to be known for it."""

    question: str
    answer: str
    known: tuple[KnownFrom, ...]


Told = tuple[list[str], StoryQuestion]  # sentences in their order, and what is asked about them


def any_of(cast: Cast, choices: Iterable[StoryQuestion]) -> StoryQuestion:
    """One of the questions, every answer as likely as any other."""
    by_answer = collections.defaultdict(list)
    for asked in choices:
        by_answer[asked.answer].append(asked)
    alike = by_answer[cast.one_of(sorted(by_answer))]
    return alike[cast.between(0, len(alike) - 1)]


def walks(together: int, pronouns: bool, cast: Cast) -> Told:
    """qa1 and qa11 to qa13: walks of one or two people, who go on as "she", "he" or "they"."""
    sentences: list[str] = []
    at: dict[str, KnownFrom] = {}
    for _ in range(cast.between(1, 5) if pronouns else cast.between(2, 10)):
        people = cast.rng.permutation(PEOPLE)[:together].tolist()
        names = [" and ".join(people)]
        names += [f"{cast.one_of(_NEXT)} {_pronoun(people)}"] if pronouns else []
        taken = {at[who].name for who in people if who in at}
        rooms = cast.rng.permutation([room for room in ROOMS if room not in taken]).tolist()
        for name, room in zip(names, rooms, strict=False):
            at |= dict.fromkeys(people, KnownFrom(room, len(sentences)))
            sentences.append(f"{name} {cast.one_of(worlds.WENT)} the {room}.")
    asked = [StoryQuestion(f"Where is {who}?", room.name, (room,)) for who, room in at.items()]
    return sentences, any_of(cast, asked)


def _pronoun(people: Sequence[str]) -> str:
    if len(people) > 1:
        return "they"
    return "she" if people[0] in _WOMEN else "he"


def directions(cast: Cast) -> Told:
    """qa4: two rooms beside a third, each told from either side."""
    centre, *beside = cast.rng.permutation(ROOMS)[:3].tolist()
    sides = cast.rng.permutation(sorted(_OPPOSITE))[:2].tolist()
    sentences, asked = [], []
    for i, (room, side) in enumerate(zip(beside, sides, strict=True)):
        told = (f"The {room} is {side} of the {centre}.",
                f"The {centre} is {_OPPOSITE[side]} of the {room}.")  # fmt: skip
        sentences.append(cast.one_of(told))
        for question in (f"What is {side} of the {centre}?",
                         f"What is the {centre} {_OPPOSITE[side]} of?"):  # fmt: skip
            asked.append(StoryQuestion(question, room, (KnownFrom(room, i),)))
    return sentences, any_of(cast, asked)


@dataclasses.dataclass(frozen=True)
class _Sighting:
    """What was last said of a person: that they are in a room, in one of two, or not in one."""

    rooms: tuple[str, ...]
    there: bool
    sentence: int

    def answer(self, room: str) -> str:
        """Whether they are in the room: yes, no, maybe; "" for what cannot be known."""
        if room not in self.rooms:
            return "no" if self.there else ""
        return ("yes" if len(self.rooms) == 1 else "maybe") if self.there else "no"

    def known(self, room: str) -> KnownFrom:
        """A room that was said, another than the one asked for if there is one."""
        other = [said for said in self.rooms if said != room]
        return KnownFrom((other or self.rooms)[0], self.sentence)


def sightings(
    unsure: bool, people: Sequence[str], rooms: Sequence[str], cast: Cast
) -> Told:  # fmt: skip
    """qa9, or if `unsure` qa10."""
    sentences: list[str] = []
    last: dict[str, _Sighting] = {}
    for i in range(cast.between(2, 10)):
        who = cast.one_of(people)
        text, last[who] = _seen(cast, unsure, who, rooms, last.get(who), i)
        sentences.append(text)
    return sentences, any_of(
        cast,
        (
            StoryQuestion(f"Is {who} in the {room}?", seen.answer(room), (seen.known(room),))
            for who, seen in last.items()
            for room in rooms
            if seen.answer(room)
        ),
    )


def _seen(
    cast: Cast, unsure: bool, who: str, rooms: Sequence[str], before: _Sighting | None, i: int
) -> tuple[str, _Sighting]:
    left = before.rooms if before is not None and before.there else ()
    room, other = cast.rng.permutation([room for room in rooms if room not in left])[:2].tolist()
    form = cast.between(0, 2)
    if form == 0:
        return f"{who} is in the {room}.", _Sighting((room,), True, i)
    if form == 1:
        return f"{who} {cast.one_of(worlds.WENT)} the {room}.", _Sighting((room,), True, i)
    if unsure:
        text = f"{who} is either in the {room} or the {other}."
        return text, _Sighting((room, other), True, i)
    if left:
        return f"{who} is no longer in the {left[0]}.", _Sighting(left, False, i)
    return f"{who} is not in the {room}.", _Sighting((room,), False, i)
