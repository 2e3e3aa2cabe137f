"""BABILong's task generator, at any length: bAbI's facts, in order, scattered over a haystack.

BABILong (Kuratov et al. 2024, arXiv 2406.10149) hides a story of bAbI among sentences of books and
asks bAbI's question about it. Of bAbI's twenty tasks these are the first thirteen, ten of which
BABILong reports; the stories are told by our own simulation (`worlds`), in bAbI's words, and
answers are the published labels. A story is drawn by the seed and is the same at every length.

| task | told | asked |
|---|---|---|
| qa1 | people move | where a person is |
| qa2, qa3 | they also take and drop things | where a thing is, and where it was before |
| qa4 | which room is north, ... of which | what lies on one side of a room |
| qa5 | people give things to one another | what was given, the giver, the receiver |
| qa6 | as qa2 | whether a person is in a room |
| qa7, qa8 | as qa5 | how many things a person carries, and which |
| qa9, qa10 | a person is no longer in a room, or in one of two | whether a person is in a room |
| qa11 to qa13 | as qa1, with pronouns, in pairs, and both | where a person is |

Evidence is the word that a memory has to hold once the story is over (a room, a person, each thing
that is carried), at the sentence that says it: for a thing, where its carrier went. Nothing has to
be held if nothing is carried, and then there is none. Where the answer is yes, no or maybe it is
the room that the deciding sentence names; if yes, the question names it, too, so it may be copied
from there. How such answers are judged says scoring.long_context. Above: suites; below: worlds and
whereabouts, which tell, and recipe.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from notepad_jax.tasks import recipe, whereabouts, worlds
from notepad_jax.tasks.draws import Cast
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.tasks.recipe import Fact
from notepad_jax.tasks.whereabouts import StoryQuestion, Told
from notepad_jax.tasks.worlds import (
    DROP,
    GIVE,
    MOVE,
    PEOPLE,
    ROOMS,
    TAKE,
    Event,
    KnownFrom,
    Setting,
)
from notepad_jax.types import Task

NUMBERS = ("none", "one", "two", "three")
NOTHING = "nothing"

_UNSURE_PEOPLE = ("Bill", "Fred", "Julie", "Mary")  # of qa10, and their rooms
_UNSURE_ROOMS = ("bedroom", "cinema", "kitchen", "office", "park", "school")
_WEIGHTS = {MOVE: 3.0, TAKE: 3.0, DROP: 1.0}


@dataclasses.dataclass(frozen=True)
class BabiTask:
    """One of bAbI's tasks."""

    tell: Callable[[Cast], Told]
    metric: str  # of scoring.long_context
    how: str  # how to answer, behind the question


def make_task(name: str, seed: int, length: int, haystack: Haystack, count: Count) -> Task:
    """Makes one sample: a document of `length` tokens by `count`, and its question.

    As in `ruler.make_task`: `seed` alone says which sample, the document has more than
    0.98 `length` and at most `length` tokens, and one seed tells the same story at the
    same depths at every length.

    Raises Unreachable, naming the task and the length, where the length cannot be reached;
    ValueError for an unknown task, a negative seed, or a `count` that is not additive.
    """
    if name not in NAMES:
        raise ValueError(f"there is no task {name!r} of BABILong; there are {', '.join(NAMES)}")
    sample = recipe.sample(f"babilong/{name}", seed, length, haystack, count)
    cast, kind = sample.cast, _KINDS[name]
    opening = cast.depth()
    sentences, asked = kind.tell(cast)
    facts = _scattered(cast, sentences, asked)
    document, evidence = recipe.hide(sample.task, facts, haystack, opening, length, count)
    return Task(
        id=f"babilong-{name}-{length}-{seed}",
        question=f"{asked.question} {kind.how}",
        document=document,
        answers=(asked.answer,),
        source=sample.task,
        metric=kind.metric,
        evidence=evidence,
    )


def _scattered(cast: Cast, sentences: Sequence[str], asked: StoryQuestion) -> list[Fact]:
    """The sentences at rising depths."""
    shown = {known.sentence: known.name for known in asked.known}
    depths = sorted(cast.rng.random(len(sentences)).tolist())
    return [
        Fact(depth, text, shown.get(i, ""))
        for i, (depth, text) in enumerate(zip(depths, sentences, strict=True))
    ]


# ---------------------------------------------------------------- people, rooms and things


def _played(
    asks: Callable[[Sequence[Event]], Iterator[StoryQuestion]],
    steps: tuple[int, int],
    make: Callable[[Cast], Setting],
    cast: Cast,
) -> Told:
    """A world that is played until it can be asked about."""
    while True:
        setting = make(cast)
        events = worlds.play(cast, setting, cast.between(*steps))
        if choices := list(asks(events)):
            return [worlds.said(cast, event) for event in events], whereabouts.any_of(cast, choices)


def _house(cast: Cast) -> Setting:
    return Setting(PEOPLE, ROOMS, worlds.THINGS, _WEIGHTS)


def _meeting(people: Sequence[str], cast: Cast) -> Setting:
    """Few rooms, in which people meet and give things to one another."""
    rooms = cast.rng.permutation(ROOMS)[:3].tolist()
    return Setting(people, rooms, worlds.THINGS, {**_WEIGHTS, GIVE: 3.0})


def _where(events: Sequence[Event]) -> Iterator[StoryQuestion]:
    for thing, trail in worlds.after(events).trail.items():
        yield StoryQuestion(f"Where is the {thing}?", trail[-1].name, (trail[-1],))


def _where_before(events: Sequence[Event]) -> Iterator[StoryQuestion]:
    """Of rooms in which a thing came once, so that there is one before."""
    for thing, trail in worlds.after(events).trail.items():
        visits = collections.Counter(room.name for room in trail)
        for before, room in zip(trail[:-1], trail[1:], strict=True):
            if visits[room.name] == 1:
                question = f"Where was the {thing} before the {room.name}?"
                yield StoryQuestion(question, before.name, (before,))


def _whether(events: Sequence[Event]) -> Iterator[StoryQuestion]:
    for who, at in worlds.after(events).at.items():
        for room in ROOMS:
            answer = "yes" if room == at.name else "no"
            yield StoryQuestion(f"Is {who} in the {room}?", answer, (at,))


# ---------------------------------------------------------------- things that are given and carried


def _gifts(events: Sequence[Event]) -> Iterator[StoryQuestion]:
    """Of what was given, the questions that have one answer."""
    found: dict[str, list[KnownFrom]] = {}
    for i, event in enumerate(events):
        if event.did == GIVE:
            for question, answer in _about_gift(event):
                found.setdefault(question, []).append(KnownFrom(answer, i))
    for question, known in found.items():
        if len({answer.name for answer in known}) == 1:
            yield StoryQuestion(question, known[-1].name, (known[-1],))


def _about_gift(gift: Event) -> Iterator[tuple[str, str]]:
    yield f"What did {gift.who} give to {gift.to}?", gift.what
    yield f"Who gave the {gift.what} to {gift.to}?", gift.who
    yield f"Who gave the {gift.what}?", gift.who
    yield f"Who received the {gift.what}?", gift.to
    yield f"Who did {gift.who} give the {gift.what} to?", gift.to


def _carried(events: Sequence[Event]) -> Iterator[tuple[str, tuple[KnownFrom, ...]]]:
    """Every person that was named, and what they carry."""
    held = worlds.after(events).held
    people = {event.who for event in events} | {event.to for event in events}
    for who in sorted(people - {""}):
        yield who, tuple(KnownFrom(t, h.sentence) for t, h in held.items() if h.name == who)


def _how_many(events: Sequence[Event]) -> Iterator[StoryQuestion]:
    for who, things in _carried(events):
        yield StoryQuestion(f"How many objects is {who} carrying?", NUMBERS[len(things)], things)


def _what(events: Sequence[Event]) -> Iterator[StoryQuestion]:
    for who, things in _carried(events):
        answer = ",".join(thing.name for thing in things) or NOTHING
        yield StoryQuestion(f"What is {who} carrying?", answer, things)


_ROOM = "What is told last counts. Answer with the name of the room alone."
_BEFORE = "Answer with the name of the room alone."
_YES_NO = "What is told last counts. Answer yes or no, and nothing else."
_MAYBE = "What is told last counts. Answer yes, no or maybe, and nothing else."
_WORD = "Answer with a single word."
_COUNT = "Answer with none, one, two or three, and nothing else."
_LIST = "Answer with their names, separated by commas, or with nothing if there are none."


def _walk_kind(together: int, pronouns: bool) -> BabiTask:
    return BabiTask(
        functools.partial(whereabouts.walks, together, pronouns), "babilong_places", _ROOM
    )


_HOST = functools.partial(_meeting, PEOPLE)
_KINDS: Mapping[str, BabiTask] = {
    "qa1": _walk_kind(1, False),
    "qa2": BabiTask(functools.partial(_played, _where, (4, 20), _house), "babilong_places", _ROOM),
    "qa3": BabiTask(
        functools.partial(_played, _where_before, (8, 36), _house), "babilong_places", _BEFORE
    ),
    "qa4": BabiTask(whereabouts.directions, "babilong_places", _BEFORE),
    "qa5": BabiTask(
        functools.partial(
            _played, _gifts, (4, 20), functools.partial(_meeting, worlds.GIVERS)
        ),
        "babilong_gifts",
        _WORD,
    ),
    "qa6": BabiTask(
        functools.partial(_played, _whether, (2, 20), _house), "babilong_yes_no", _YES_NO
    ),
    "qa7": BabiTask(
        functools.partial(_played, _how_many, (4, 20), _HOST), "babilong_numbers", _COUNT
    ),
    "qa8": BabiTask(functools.partial(_played, _what, (4, 20), _HOST), "babilong_things", _LIST),
    "qa9": BabiTask(
        functools.partial(whereabouts.sightings, False, PEOPLE, ROOMS), "babilong_yes_no", _YES_NO
    ),
    "qa10": BabiTask(
        functools.partial(whereabouts.sightings, True, _UNSURE_PEOPLE, _UNSURE_ROOMS),
        "babilong_maybe",
        _MAYBE,
    ),
    "qa11": _walk_kind(1, True),
    "qa12": _walk_kind(2, False),
    "qa13": _walk_kind(2, True),
}  # fmt: skip
NAMES = tuple(_KINDS)
