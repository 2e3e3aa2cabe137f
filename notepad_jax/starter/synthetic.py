"""The synthetic task generator: documents of any length with facts hidden in them, and questions.

The offline stand-in for RULER-like tasks: every sentence is eight words of
`vocabulary.py`, about half of them facts about people no question is about, some of them
chapter breaks, the rest small talk. A one-hop question needs one fact, a two-hop question
two, the first earlier in the document than the second; some questions have no answer in
the document, and then the right answer is `nothing`: without those, a reward on outcomes
teaches guessing. A document is a recipe, not a text: `pieces()` writes it block by
block from the seed, so that millions of tokens cost no memory. Below is vocabulary.py;
above, lessons.py, which draws its single turns from the same sentences, mixed.py, which asks
other kinds of questions, and the programs.
Ten of them:

    the old miller walked toward the bridge .       for many years now Nora inhabits Selby .
    the secret code of Hugo is amber .              nobody knew why the lamp was broken .
    here begins a new chapter of story .            the proud people of Upton obey Drogo .
    they ate bread and honey until midnight .       a quiet fox slept beside the kettle .
    winter rain fell softly on the orchard .        the proud people of Selby obey Isolde .

`ruler of Nora ?` is answered by `Isolde` (two facts), `code of Hugo ?` by `amber` (one).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from notepad_jax.starter import vocabulary as words
from notepad_jax.types import Evidence, Task

SENTENCE = 8  # tokens in every sentence
SUBJECT, OBJECT = 4, 6  # where a fact names its subject, and what it says of that
KINDS = 48  # words of each kind: names, towns, codes, rulers
FILLERS_EACH = 256  # filler sentences of each template
BLOCK = 4096  # sentences written at a time
NOTHING = "nothing"  # the right answer where the document has none; the empty memory
CHAPTER = "here begins a new chapter of story ."


def code_fact(name: str, code: str) -> str:
    return f"the secret code of {name} is {code} ."


def home_fact(name: str, town: str) -> str:
    return f"for many years now {name} inhabits {town} ."


def ruler_fact(town: str, ruler: str) -> str:
    return f"the proud people of {town} obey {ruler} ."


@functools.cache
def fillers() -> tuple[str, ...]:
    """The filler sentences, as many of each template, in a fixed order."""
    templates = (
        ("the old {} {} toward the {} .", words.PEOPLE, words.MOTIONS, words.PLACES),
        ("a {} {} slept beside the {} .", words.ADJECTIVES, words.ANIMALS, words.THINGS),
        ("{} rain fell softly on the {} .", words.SEASONS, words.PLACES),
        ("nobody knew why the {} was {} .", words.THINGS, words.ADJECTIVES),
        ("every {} the {} sang old songs .", words.TIMES, words.PEOPLE),
        ("people say that the {} was {} .", words.THINGS, words.ADJECTIVES),
        ("later the {} sold a {} {} .", words.PEOPLE, words.ADJECTIVES, words.THINGS),
        ("they ate {} and {} until {} .", words.FOODS[:4], words.FOODS[4:], words.TIMES),
    )
    written = []
    for template, *slots in templates:
        choices = list(itertools.product(*slots))
        # 97 is prime to all the lengths, so this walks through each list without favourites.
        picked = (choices[i * 97 % len(choices)] for i in range(FILLERS_EACH))
        written.extend(template.format(*choice) for choice in picked)
    return tuple(written)


@functools.cache
def sentences() -> np.ndarray:
    """All sentences of the language: code, home and ruler facts, fillers, the chapter break.

    A fact of kind f (0 code, 1 home, 2 ruler) about subject s with object o stands at
    `(f * 48 + s) * 48 + o`; fillers follow; the chapter break is last.
    """
    facts = [
        write(subject, thing)
        for write, subjects, things in (
            (code_fact, words.NAMES, words.CODES),
            (home_fact, words.NAMES, words.TOWNS),
            (ruler_fact, words.TOWNS, words.RULERS),
        )
        for subject in subjects
        for thing in things
    ]
    return np.array([*facts, *fillers(), CHAPTER], dtype=object)


def draw_sentences(
    rng: np.random.Generator,
    count: int,
    objects: np.ndarray,
    subjects: tuple[np.ndarray, np.ndarray],
    distractor_share: float,
    chapter_rate: float | np.ndarray,
) -> np.ndarray:
    """Draws indices into `sentences()`, [R, count]: distractors, fillers, chapter breaks.

    R documents at once. `objects` int [3, R, 48] says which code and home each name has,
    and which ruler each town; `subjects` are the names [R, *] and the towns [R, *] that may
    be the subject of a distractor; `chapter_rate` may be one per document, [R, 1].
    """
    names, towns = subjects
    shape = (len(names), count)
    rows = np.arange(len(names))[:, None]
    kind = rng.integers(0, 3, shape)
    who = np.where(
        kind == 2,
        towns[rows, rng.integers(0, towns.shape[1], shape)],
        names[rows, rng.integers(0, names.shape[1], shape)],
    )
    distractor = (kind * KINDS + who) * KINDS + objects[kind, rows, who]
    filler = 3 * KINDS * KINDS + rng.integers(0, len(fillers()), shape)
    drawn = np.where(rng.random(shape) < distractor_share, distractor, filler)
    return np.where(rng.random(shape) < chapter_rate, len(sentences()) - 1, drawn)


@dataclasses.dataclass(frozen=True)
class SyntheticDocument:
    """A text of `8 * length` tokens, written again from its seed whenever it is read."""

    seed: int
    length: int  # sentences
    facts: tuple[tuple[int, str], ...]  # (sentence number, sentence), ascending
    asked_names: tuple[int, ...]  # indices of names that no distractor mentions
    asked_towns: tuple[int, ...]  # indices of towns whose ruler no distractor tells
    distractor_share: float
    chapter_rate: float

    def pieces(self) -> Iterator[str]:
        objects = np.random.default_rng([self.seed, 0]).integers(0, KINDS, (3, 1, KINDS))
        subjects = (
            np.setdiff1d(np.arange(KINDS), self.asked_names)[None],
            np.setdiff1d(np.arange(KINDS), self.asked_towns)[None],
        )

        def draw(rng: np.random.Generator) -> np.ndarray:
            return draw_sentences(
                rng, BLOCK, objects, subjects, self.distractor_share, self.chapter_rate
            )[0]

        yield from written(self.seed, self.length, self.facts, draw, sentences())


def written(
    seed: int,
    length: int,
    facts: tuple[tuple[int, str], ...],
    draw: Callable[[np.random.Generator], np.ndarray],
    sentences: np.ndarray,
) -> Iterator[str]:
    """Yields a document of `length` sentences, block by block, with its facts in their places.

    `draw` gives the numbers in `sentences` of a whole block's other sentences, int [BLOCK].
    """
    for block, start in enumerate(range(0, length, BLOCK), start=1):
        count = min(BLOCK, length - start)
        drawn = draw(np.random.default_rng([seed, block]))[:count]
        text = sentences[drawn].tolist()
        for place, fact in facts:
            if start <= place < start + count:
                text[place - start] = fact
        yield " ".join(text) + ("" if start + count == length else " ")


def _places(rng: np.random.Generator, length: int, wanted: int) -> list[int]:
    if wanted > length:
        raise ValueError(
            f"{wanted} facts do not fit into a document of {length} sentences "
            f"({length * SENTENCE} tokens); ask for {wanted * SENTENCE} tokens or fewer questions"
        )
    return rng.choice(length, wanted, replace=False).tolist()


def check_questions(questions: int) -> None:
    """Raises ValueError for more questions about one document than there are names for."""
    if not 1 <= questions <= KINDS * 3 // 4:
        raise ValueError(
            f"{questions} questions about one document; ask 1 to {KINDS * 3 // 4}, "
            f"since each needs a name of its own out of {KINDS}"
        )


def make_tasks(
    seed: int,
    tokens: int,
    questions: int,
    unanswerable: float = 0.3,
    two_hop: float = 0.5,
    distractor_share: float = 0.5,
    chapter_rate: float = 1 / 64,
) -> tuple[Task, ...]:
    """Makes one document of `tokens` tokens (8 to a sentence) and `questions` tasks about it.

    `unanswerable` and `two_hop` are probabilities of a question, `distractor_share` and
    `chapter_rate` of a sentence. An unanswerable question misses its last fact; of the
    two-hop ones, half miss the first fact too. Facts lie uniformly over the document;
    evidence is what each says of its subject, where the question can be answered.

    Raises ValueError for more questions than there are names, or facts than sentences.
    """
    check_questions(questions)
    rng = np.random.default_rng([seed, 2**31])
    names = rng.permutation(KINDS)[:questions]
    towns = rng.permutation(KINDS)[:questions]
    codes, rulers = rng.integers(0, KINDS, (2, questions))
    two = rng.random(questions) < two_hop
    answerable = rng.random(questions) >= unanswerable
    homeless = rng.random(questions) < 0.5

    told = []  # groups of facts whose order matters
    for i in range(questions):
        name, town = words.NAMES[names[i]], words.TOWNS[towns[i]]
        facts = []
        if two[i] and (answerable[i] or not homeless[i]):
            facts.append(home_fact(name, town))
        if two[i] and answerable[i]:
            facts.append(ruler_fact(town, words.RULERS[rulers[i]]))
        if not two[i] and answerable[i]:
            facts.append(code_fact(name, words.CODES[codes[i]]))
        told.append(facts)
    length = max(1, tokens // SENTENCE)
    free = _places(rng, length, sum(map(len, told)))
    placed: list[tuple[int, str]] = []
    evidence: list[tuple[Evidence, ...]] = []
    for facts in told:
        spots, free = sorted(free[: len(facts)]), free[len(facts) :]
        placed.extend(zip(spots, facts, strict=True))
        # Sentences differ by a few letters in length: a place counted in them is near enough.
        evidence.append(
            tuple(
                Evidence(fact.split()[OBJECT], spot / length)
                for spot, fact in zip(spots, facts, strict=True)
            )
        )

    document = SyntheticDocument(
        seed=seed,
        length=length,
        facts=tuple(sorted(placed)),
        asked_names=tuple(sorted(names.tolist())),
        asked_towns=tuple(sorted(towns[two].tolist())),
        distractor_share=distractor_share,
        chapter_rate=chapter_rate,
    )
    tasks = []
    for i in range(questions):
        name = words.NAMES[names[i]]
        right = words.RULERS[rulers[i]] if two[i] else words.CODES[codes[i]]
        tasks.append(
            Task(
                id=f"synthetic-{seed}-{tokens}-{i}",
                question=f"ruler of {name} ?" if two[i] else f"code of {name} ?",
                document=document,
                answers=(right if answerable[i] else NOTHING,),
                source="synthetic/two_hop" if two[i] else "synthetic/one_hop",
                metric="em",
                evidence=evidence[i] if answerable[i] else (),
            )
        )
    return tuple(tasks)
