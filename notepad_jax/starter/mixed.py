"""A generator of four kinds of tasks on synthetic documents, each with a reward of its own.

What `synthetic` asks is right or wrong. To compare algorithms on a mix of rewards, four more
questions are asked of the same kind of document, with the same words:

    kind     question             facts, and what is right                        metric
    exact    code of Hugo ?       the secret code of Hugo is amber .              em
                                  `amber`
    list     market of Nora ?     later on the market Nora sold honey .           set_f1
                                  what she sold, two or three things
    count    songs of Otto ?      later on that evening Otto sang songs .         numeric
                                  how often he sang, one to four times: `3`
    order    story of Ida ?       for many years now Ida inhabits Selby .         pairwise
                                  her two or three towns, in the order told

Lists have an item on each line: the starter's vocabulary writes a new line, and digits, as
bytes. The facts of one question lie in stretches of their own of 64 tokens, so a chunk of
64 tells one at most. Where the document has none, the right answer is `nothing`. Below:
synthetic and vocabulary; above: mixed_lessons, which draws turns of these, and the programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from notepad_jax.starter import synthetic, vocabulary
from notepad_jax.starter.synthetic import CHAPTER, KINDS, NOTHING, SENTENCE
from notepad_jax.types import Evidence, Task

STRETCH = 8  # sentences; no two facts of one question lie in the same stretch


@dataclasses.dataclass(frozen=True)
class QuestionKind:
    """A kind of question: its words, its metric, and how many facts it has."""

    asks: str  # its first word
    metric: str
    fewest: int  # facts of a question that has an answer, and `most`
    most: int


OF_NAME = {
    "exact": QuestionKind("code", "em", 1, 1),
    "list": QuestionKind("market", "set_f1", 2, 3),
    "count": QuestionKind("songs", "numeric", 1, 4),
    "order": QuestionKind("story", "pairwise", 2, 3),
}
# What a fact of each kind may say of its subject, in the order of OF_NAME.
OBJECTS = (vocabulary.CODES, vocabulary.FOODS, ("songs",), vocabulary.TOWNS)
_SIZES = tuple(map(len, OBJECTS))
FIRST = tuple(KINDS * sum(_SIZES[:k]) for k in range(len(_SIZES) + 1))  # sentence of each kind


def market_fact(name: str, thing: str) -> str:
    return f"later on the market {name} sold {thing} ."


def songs_fact(name: str, songs: str) -> str:
    return f"later on that evening {name} sang {songs} ."


_FACTS = (synthetic.code_fact, market_fact, songs_fact, synthetic.home_fact)


@functools.cache
def sentences() -> np.ndarray:
    """All sentences: facts of the four kinds, fillers, and last the chapter break.

    A fact of kind k about name s with object o stands at `fact(k, s, o)`.
    """
    facts = [
        write(name, thing)
        for write, things in zip(_FACTS, OBJECTS, strict=True)
        for name in vocabulary.NAMES
        for thing in things
    ]
    return np.array([*facts, *synthetic.fillers(), CHAPTER], dtype=object)


def fact(kind: np.ndarray, name: np.ndarray, thing: np.ndarray) -> np.ndarray:
    """Returns the numbers of facts in `sentences()`; ints or int arrays of one shape."""
    return np.array(FIRST)[kind] + name * np.array(_SIZES)[kind] + thing


def draw_sentences(
    rng: np.random.Generator,
    shape: tuple[int, int],
    names: np.ndarray,
    distractor_share: float,
    chapter_rate: float,
) -> np.ndarray:
    """Draws numbers in `sentences()`, [R, count]: facts about `names` [R, *], fillers, breaks."""
    kind = rng.integers(0, len(OBJECTS), shape)
    who = names[np.arange(shape[0])[:, None], rng.integers(0, names.shape[1], shape)]
    thing = rng.integers(0, np.array(_SIZES)[kind])
    filler = FIRST[-1] + rng.integers(0, len(synthetic.fillers()), shape)
    drawn = np.where(rng.random(shape) < distractor_share, fact(kind, who, thing), filler)
    return np.where(rng.random(shape) < chapter_rate, len(sentences()) - 1, drawn)


@dataclasses.dataclass(frozen=True)
class MixedDocument:
    """A text of `8 * length` tokens, written again from its seed whenever it is read."""

    seed: int
    length: int  # sentences
    facts: tuple[tuple[int, str], ...]  # (sentence number, sentence), ascending
    asked: tuple[int, ...]  # indices of names that no distractor mentions
    distractor_share: float
    chapter_rate: float

    def pieces(self) -> Iterator[str]:
        others = np.setdiff1d(np.arange(KINDS), self.asked)[None]

        def draw(rng: np.random.Generator) -> np.ndarray:
            shape = (1, synthetic.BLOCK)
            return draw_sentences(rng, shape, others, self.distractor_share, self.chapter_rate)[0]

        yield from synthetic.written(self.seed, self.length, self.facts, draw, sentences())


def make_tasks(
    seed: int,
    tokens: int,
    questions: int,
    kinds: Sequence[str] = (),
    unanswerable: float = 0.3,
    two_hop: float = 0.5,
    distractor_share: float = 0.5,
    chapter_rate: float = 1 / 64,
) -> tuple[Task, ...]:
    """Makes one document of `tokens` tokens and `questions` tasks about it, of `kinds`.

    Without `kinds` these are the quick start's (`synthetic.make_tasks`, where the other
    arguments are explained). With them each question is of one of `kinds`, chosen by chance;
    a document of few stretches has fewer facts of a question than there might be.

    Raises ValueError as `synthetic.make_tasks` does, for a kind that there is not, and for
    `two_hop` beside kinds: it chooses between the quick start's two.
    """
    if not kinds:
        return synthetic.make_tasks(
            seed, tokens, questions, unanswerable, two_hop, distractor_share, chapter_rate
        )
    for name in kinds:
        if name not in OF_NAME:
            raise ValueError(
                f"data.kinds has {name!r}; use some of {', '.join(OF_NAME)}, or leave it empty "
                f"for the questions of the quick start"
            )
    if two_hop:
        raise ValueError(
            f"data.two_hop is {two_hop:g}, and data.kinds names other kinds of questions; set "
            f"data.two_hop=0, or leave data.kinds empty"
        )
    synthetic.check_questions(questions)
    # What is asked does not depend on the length: a shorter document has the same questions.
    rng, places = (np.random.default_rng([seed, 2**31, part]) for part in range(2))
    names = rng.permutation(KINDS)[:questions].tolist()
    length = max(1, tokens // SENTENCE)
    taken: dict[int, str] = {}  # sentence number -> fact
    asked = []
    for name in names:
        kind = tuple(OF_NAME).index(kinds[rng.integers(len(kinds))])
        told = _told(rng, kind, unanswerable)
        spots = _spots(places, length, len(told), taken)
        things = [OBJECTS[kind][thing] for thing in told[: len(spots)]]
        facts = [_FACTS[kind](vocabulary.NAMES[name], thing) for thing in things]
        taken.update(zip(spots, facts, strict=True))
        asked.append((name, kind, spots, things))
    document = MixedDocument(
        seed=seed,
        length=length,
        facts=tuple(sorted(taken.items())),
        asked=tuple(sorted(names)),
        distractor_share=distractor_share,
        chapter_rate=chapter_rate,
    )
    return tuple(
        _task(f"mixed-{seed}-{tokens}-{number}", document, *one) for number, one in enumerate(asked)
    )


def _told(rng: np.random.Generator, kind: int, unanswerable: float) -> list[int]:
    """Which objects the facts of a question name, in their order; none if it has no answer."""
    one = tuple(OF_NAME.values())[kind]
    count, things = rng.integers(one.fewest, one.most + 1), rng.permutation(len(OBJECTS[kind]))
    answerable = rng.random() >= unanswerable
    return np.resize(things, count).tolist() if answerable else []


def _spots(rng: np.random.Generator, length: int, wanted: int, taken: dict[int, str]) -> list[int]:
    """Returns free sentences for the facts of a question, ascending, each in its own stretch.

    Fewer than `wanted` where there are fewer stretches; ValueError where one has no room left.
    """
    stretches = max(1, length // STRETCH)
    chosen = rng.permutation(stretches)[:wanted].tolist()
    spots = []
    for stretch in sorted(chosen):
        end = length if stretch == stretches - 1 else (stretch + 1) * STRETCH
        free = [spot for spot in range(stretch * STRETCH, end) if spot not in taken]
        if not free:
            raise ValueError(
                f"the facts of all questions do not fit into a document of {length} sentences "
                f"({length * SENTENCE} tokens); ask for a longer one or fewer questions"
            )
        spots.append(free[rng.integers(len(free))])
    return spots


def _task(
    name: str, document: MixedDocument, who: int, kind: int, spots: list[int], things: list[str]
) -> Task:
    title, one = list(OF_NAME.items())[kind]
    counts = title == "count"
    evidence = tuple(
        Evidence(thing, spot / document.length) for thing, spot in zip(things, spots, strict=True)
    )
    right = (str(len(things)),) if counts else tuple(things)
    return Task(
        id=name,
        question=f"{one.asks} of {vocabulary.NAMES[who]} ?",
        document=document,
        answers=right if things else (NOTHING,),
        source=f"synthetic/{title}",
        metric=one.metric,
        evidence=() if counts else evidence,  # a memory has their number, and none of them
    )
