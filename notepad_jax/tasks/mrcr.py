"""Task generator of the form of OpenAI's MRCR: several same requests in one long conversation.

A user asks an assistant for poems, letters and the like about this and that; 2, 4 or 8 of the
requests are word for word the same, and the question wants one of their texts back, after a random
string: which one is a matter of counting, and the text of copying. All other turns are close to
those: they ask for the same form about something else, or for another form about the same. A turn
is a function of the sample's seed and its number, so a conversation of any length is written in
constant memory, and one seed has the same requests, texts and places at every length. The texts
are put together from sentences of ours, no two of them alike. Evidence is the text's sentences.
What differs from the published files is listed in docs/evaluation.md. Below is recipe.py.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Sequence

import numpy as np

from notepad_jax.scoring.long_context import PREFIX
from notepad_jax.tasks import recipe
from notepad_jax.tasks.draws import MATERIALS, QUALITIES, THINGS
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.tasks.recipe import Fact
from notepad_jax.types import Task

NAMES = ("mrcr_2", "mrcr_4", "mrcr_8")
FORMS = (
    "poem", "letter", "short story", "news report", "speech", "song", "diary entry", "review",
    "advertisement", "toast",
)  # fmt: skip
TOPICS = tuple(
    "tapirs lighthouses penguins bakeries glaciers violins beekeepers volcanoes bicycles owls "
    "orchards harbours circuses telescopes hedgehogs railways cathedrals mushrooms sailors "
    "windmills libraries otters deserts clockmakers kites markets dolphins castles rivers "
    "gardeners thunderstorms museums camels blacksmiths islands butterflies vineyards painters "
    "bridges foxes"
    .split()
)  # fmt: skip
SENTENCES = 6, 10  # of a text

_FAREWELL = "\nUser: now say something quiet\nAssistant:"  # the last gap is closed behind it
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiou])")
_WORDS = QUALITIES, MATERIALS, THINGS
_LETTERS = np.array(list(string.ascii_letters + string.digits))
_SENTENCES = (
    "Whoever has seen {topic} once will keep the {q} {t} of that day in mind.",
    "Under a {m} sky the {q} {t} waits for {topic}.",
    "Nobody in our street owns a {t} as {q} as this one.",
    "They say that {topic} began with a {m} {t} and a {q} idea.",
    "In the {q} hours a {m} {t} is all that one needs.",
    "My aunt traded her {m} {t} for a {q} afternoon among {topic}.",
    "How {q} the world becomes when {topic} are near!",
    "A {q} child once drew {topic} on the back of a {m} {t}.",
    "There was a {t} of {m}, and it was {q} beyond words.",
    "We left the {m} {t} behind and kept only the {q} memories.",
    "Some prefer a {q} {t}, but give me {topic} and I am content.",
    "Even the mayor arrived with a {q} {m} {t} under one arm.",
    "For seven years the {t} stood there, {q} and covered in {m}.",
    "Let us speak of {topic} the way others speak of a {q} {t}.",
    "Neither the {m} {t} nor the rain could spoil this {q} evening.",
    "Behind the house lay a {t} that {topic} had made {q}.",
    "Every spring a {q} stranger brings {m} and asks about {topic}.",
    "Listen, for the {m} {t} sings its {q} tune again.",
    "Without {topic} this {t} would be nothing but {m}.",
    "On the third day somebody found a {q} {t} beside the {m} gate.",
    "You ask what is {q} about {topic}, and I show you a {t}.",
    "Between two hills of {m} there is room for one {q} {t}.",
    "Once more the {q} old {t} was polished like {m}.",
    "What the {t} is to {m}, that {topic} are to a {q} heart.",
)

Request = tuple[str, str]  # a form and a topic


def make_task(name: str, seed: int, length: int, haystack: Haystack, count: Count) -> Task:
    """Makes one sample: a conversation of `length` tokens by `count`, and its question.

    As in `ruler.make_task`, except that `haystack` is not used: all of it is conversation.

    Raises Unreachable, naming the task and the length, where the length cannot be reached;
    ValueError for an unknown task, a negative seed, or a `count` that is not additive.
    """
    if name not in NAMES:
        raise ValueError(f"MRCR has no task {name!r}; there are {', '.join(NAMES)}")
    sample = recipe.sample(f"mrcr/{name}", seed, length, haystack, count)
    rng, same = sample.rng, int(name.rpartition("_")[2])
    asked = FORMS[rng.integers(len(FORMS))], TOPICS[rng.integers(len(TOPICS))]
    wanted = int(rng.integers(same))
    prefix = "".join(rng.choice(_LETTERS, PREFIX))
    depths = sorted(rng.random(same).tolist())
    texts = [_text(asked[1], np.random.default_rng((*sample.seed, 0, k))) for k in range(same)]
    facts = [
        fact
        for k, (depth, text) in enumerate(zip(depths, texts, strict=True))
        for fact in _facts(asked, depth, text, k == wanted)
    ]
    write = functools.partial(_turns, sample.seed, asked)
    document, evidence = recipe.hide_among(
        sample.task, facts, write, length, count, farewell=_FAREWELL
    )
    return Task(
        id=f"mrcr-{name}-{length}-{seed}",
        question=_question(prefix, wanted, asked),
        document=document,
        answers=(prefix + " ".join(texts[wanted]),),
        source=sample.task,
        metric="mrcr",
        contract="auto",
        evidence=evidence,
    )


def _question(prefix: str, wanted: int, asked: Request) -> str:
    form, topic = asked
    return (
        f"In the conversation the user asks several times: {_request(asked)}. Prepend {prefix} to "
        f"the {_ORDINALS[wanted]} {form} about {topic} that the assistant wrote, counted from the "
        "beginning. Answer with that string and that text, word for word, and with nothing else."
    )


def _request(request: Request) -> str:
    form, topic = request
    return f"write {'an' if form[0] in 'aeiou' else 'a'} {form} about {topic}"


def _facts(asked: Request, depth: float, text: Sequence[str], wanted: bool) -> list[Fact]:
    """A turn as facts of one place, a sentence each, so that each is evidence for itself."""
    told = [f"{_opening(asked)} {text[0]}", *text[1:]]
    shown = text if wanted else [""] * len(text)
    return [Fact(depth, part, words) for part, words in zip(told, shown, strict=True)]


def _opening(request: Request) -> str:
    """How a turn begins: on a line of its own, with the space that parts all units before it."""
    return f"\nUser: {_request(request)}\nAssistant:"


def _turns(seed: tuple[int, ...], asked: Request, start: int, stop: int) -> list[str]:
    """Turns start..stop-1 of those that are not asked for."""
    return [_turn(asked, np.random.default_rng((*seed, 1, k))) for k in range(start, stop)]


def _turn(asked: Request, rng: np.random.Generator) -> str:
    """In two of four turns the form is that asked for, or the topic, and never both."""
    form, topic = _other(FORMS, asked[0], rng), _other(TOPICS, asked[1], rng)
    nearness = rng.integers(4)
    if nearness == 0:
        form = asked[0]
    elif nearness == 1:
        topic = asked[1]
    return f"{_opening((form, topic))} {' '.join(_text(topic, rng))}"


def _other(choices: Sequence[str], than: str, rng: np.random.Generator) -> str:
    return choices[(choices.index(than) + rng.integers(1, len(choices))) % len(choices)]


def _text(topic: str, rng: np.random.Generator) -> list[str]:
    """Sentences about a topic, each of another pattern: about 10**20 texts of the fewest."""
    patterns = rng.permutation(len(_SENTENCES))[: rng.integers(SENTENCES[0], SENTENCES[1] + 1)]
    slots = rng.integers(0, [len(words) for words in _WORDS], (len(patterns), len(_WORDS)))
    return [
        _sentence(_SENTENCES[pattern], topic, words)
        for pattern, words in zip(patterns.tolist(), slots.tolist(), strict=True)
    ]


def _sentence(pattern: str, topic: str, words: Sequence[int]) -> str:
    quality, material, thing = (choices[k] for choices, k in zip(_WORDS, words, strict=True))
    filled = pattern.format(topic=topic, q=quality, m=material, t=thing)
    return _BEFORE_VOWEL.sub(r"\1n ", filled)
