"""Task generator of reading comprehension: free questions about one sentence of a text.

RULER's needles and the memory tasks are asked for in a dozen fixed ways, and a small model that is
taught them knows no other: asked who led the works, it says `none`. Here a fact is one of the
relations of `relations.txt` (who built, whose is it now, why was it closed, how far is it), told
and asked in several ways, alone or in the middle of a sentence. Beside it other facts are told:
the same relation about another, and other relations about the same. A third of the questions are
about a sentence of the haystack's own, where its form tells what to ask. One question of eight has
no answer. Above: stories; below: cast and recipe.

    It is said that the mill of Lorne was built by Mrs Brindle, which surprised nobody.
    Who was the builder of the mill of Lorne? -> Mrs Brindle
"""

from __future__ import annotations

import dataclasses
import functools
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from notepad_jax.tasks.draws import VOWELS, Cast
from notepad_jax.tasks.haystack import Haystack
from notepad_jax.tasks.memory_tasks import NOT_STATED
from notepad_jax.tasks.recipe import Fact, Story

NAME = "comprehension"
UNANSWERABLE = 1 / 8  # of the questions
OF_PROSE = 1 / 3  # of the questions are about a sentence of the haystack's kind
DECORATED = 0.5  # of the sentences have something before the fact, as many something after it
ASIDE = 0.25  # of the persons, buildings and things are described on the way
YEARS = range(1700, 2000)
_FILE = Path(__file__).with_name("relations.txt")
# What an aside may follow: neither "the mill of Lorne" nor "the doctor's" is parted.
_DESCRIBED = re.compile(r"\{(person|building|thing)\}(?= (?!of )|[.,])")
# Sentences of prose that can be asked about, and how.
_ABOUT = re.compile(
    r"(The|All|Each|Every|Any|These) ([a-z]+ [a-z ]{3,30}?) "
    r"((?:is|are|was|were|can|must|should|may|will|has|have) [^.;:]{12,100})\."
)
_IF = re.compile(r"(If|When|Unless) ([^.;:,'(]{10,60}), (?:then )?([^.;:]{12,90})\.")
_ABOUT_ASKED = (
    "What does the text say about the {}?",
    "What is said about the {}?",
    "What do we learn about the {}?",
    "What about the {}?",
)
_BEFORE_VOWEL = re.compile(rf"\ba (?=[{VOWELS}])")


@dataclasses.dataclass(frozen=True)
class Relation:
    """What can be told and asked: templates with slots in braces."""

    answer: str  # the slot that answers
    pairs: tuple[tuple[str, str], ...]  # (sentence, question) whose slots the sentence has


@dataclasses.dataclass(frozen=True)
class Relations:
    """All relations, and what their slots may be."""

    slots: Mapping[str, Sequence[str]]
    known: tuple[Relation, ...]


@functools.cache
def relations() -> Relations:
    """Returns what `relations.txt` says."""
    slots: dict[str, Sequence[str]] = {}
    known: list[Relation] = []
    for block in _FILE.read_text(encoding="utf-8").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith("#")]
        lists = [line[1:].partition(" ") for line in lines if line.startswith("@")]
        slots |= {name: listed.split("|") for name, _, listed in lists}
        answers = [line[2:] for line in lines if line.startswith("= ")]
        asked = [line[2:] for line in lines if line.startswith("? ")]
        told = [line for line in lines if line[0] not in "@=?"]
        pairs = ((t, q) for t in told for q in asked if _slots(q) | {*answers} <= _slots(t))
        known += [Relation(answer, tuple(pairs)) for answer in answers]
    return Relations(slots, tuple(known))


def story(cast: Cast, haystack: Haystack) -> Story:
    """Returns a free question, the fact that answers it or none, and others beside it."""
    told = prose(haystack)
    if told and cast.rng.random() < OF_PROSE:
        return _of_prose(told, cast)
    known = relations().known
    asked = cast.one_of(known)
    template, question = cast.one_of(asked.pairs)
    drawn = {slot: _drawn(slot, cast) for slot in sorted(_slots(template))}
    subject = {slot: drawn[slot] for slot in sorted(_slots(question))}
    others = [one for one in known if one.answer != asked.answer]
    facts = [_beside(cast.one_of(others), subject, cast) for _ in range(2)]
    if subject and cast.rng.random() < 0.5:
        another = subject
        while any(another[slot] == subject[slot] for slot in subject):
            another = {slot: _drawn(slot, cast) for slot in subject}
        facts.append(_beside(asked, another, cast))
    answer = NOT_STATED
    if cast.rng.random() >= UNANSWERABLE:
        answer = drawn[asked.answer]
        facts.append(Fact(cast.depth(), _told(template, drawn, cast), shown=answer))
    return _asked(_capital(_filled(question, drawn)), answer, facts)


@dataclasses.dataclass(frozen=True)
class Askable:
    """A sentence of prose whose form tells what can be asked about it."""

    sentence: str
    questions: tuple[str, ...]
    answer: str  # words of the sentence


@functools.lru_cache(maxsize=4)
def prose(haystack: Haystack) -> tuple[Askable, ...]:
    """Returns the sentences of a haystack that can be asked about."""
    found = []
    for sentence in haystack.sentences:
        if about := _ABOUT.fullmatch(sentence):
            asked = tuple(template.format(about[2]) for template in _ABOUT_ASKED)
            found.append(Askable(sentence, asked, about[3]))
        elif clause := _IF.fullmatch(sentence):
            asked = (f"What happens {clause[1].lower()} {clause[2]}?",)
            found.append(Askable(sentence, asked, clause[3]))
    return tuple(found)


def _of_prose(told: Sequence[Askable], cast: Cast) -> Story:
    """A question about one sentence of prose, or about one in whose place another stands."""
    asked, other = cast.one_of(told), cast.one_of(told)
    question, depth = cast.one_of(asked.questions), cast.depth()
    if other != asked and cast.rng.random() < UNANSWERABLE:
        return _asked(question, NOT_STATED, [Fact(depth, other.sentence)])
    return _asked(question, asked.answer, [Fact(cast.depth(), asked.sentence, shown=asked.answer)])


def _asked(question: str, answer: str, facts: Sequence[Fact]) -> Story:
    """A story whose note is the question with its answer.

    A small model copies the question first, and finds the answer as it would answer it: notes that
    were the sentence were often another sentence's.
    """
    noted = [dataclasses.replace(f, note=f"{question} {answer}" if f.shown else "") for f in facts]
    return Story(noted, question, (answer,), "sub_em", "auto")


def _beside(relation: Relation, shared: Mapping[str, str], cast: Cast) -> Fact:
    """A fact that is not asked for: a relation of which some slots are given."""
    template, _ = cast.one_of(relation.pairs)
    drawn = {slot: _drawn(slot, cast) for slot in sorted(_slots(template))} | shared
    return Fact(cast.depth(), _told(template, drawn, cast))


def _slots(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def _drawn(slot: str, cast: Cast) -> str:
    """What a slot is in one story."""
    if slot == "year":
        return str(cast.between(YEARS[0], YEARS[-1]))
    if slot != "person":
        return cast.one_of(relations().slots[slot])
    person = next(cast.people)
    if cast.rng.random() < 0.5:
        return person
    first, _, last = person.partition(" ")
    return cast.one_of(relations().slots["titled"]).format(first=first, last=last)


def _told(template: str, drawn: Mapping[str, str], cast: Cast) -> str:
    """A sentence of a relation, half of the time with something before and behind it."""
    text = _filled(_described(template, cast), drawn).rstrip(".,")
    before, after = (cast.one_of(relations().slots[name]) for name in ("before", "after"))
    text = before + text if cast.rng.random() < DECORATED else _capital(text)
    return text + (after if cast.rng.random() < DECORATED else "") + "."


def _described(template: str, cast: Cast) -> str:
    """A template with something said about persons, buildings and things on the way."""

    def put(found: re.Match[str]) -> str:
        if cast.rng.random() >= ASIDE:
            return found[0]
        aside = cast.one_of(relations().slots[f"aside.{found[1]}"])
        if found.string[found.end()] in ".,":
            aside = aside.rstrip(",")
        return found[0] + aside.format(
            **{slot: _drawn(slot, cast) for slot in sorted(_slots(aside))}
        )

    return _DESCRIBED.sub(put, template)


def _filled(template: str, drawn: Mapping[str, str]) -> str:
    """A template's text as it stands within a sentence: names alone have a capital."""
    within = template[0].lower() + template[1:]
    return _BEFORE_VOWEL.sub("an ", within.format(**drawn))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
