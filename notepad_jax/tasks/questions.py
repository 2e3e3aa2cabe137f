"""Task generator of RULER-QA, RULER's qa_1 and qa_2: gold paragraphs hidden among many.

`make_task` hides the gold paragraphs of one question of a corpus in a document of a wanted
length; `make_task_of_paragraphs` in a wanted number of paragraphs, as the published figures
have it. The paragraphs are shuffled by the sample's own seed: with one seed for all, the
evidence of every sample stands in the same slots and a reader can learn the slots. A
document is a list of paragraph numbers until it is read.

As in RULER, distractors are not checked for the answer. Leaving out every paragraph that
mentions it would be a leak: of all nationalities, only the right one would ever be named.
Above: suites; below: data.foreign.corpus.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from notepad_jax.data.foreign.corpus import Corpus, Paragraph, Question
from notepad_jax.tasks.haystack import Count
from notepad_jax.tasks.recipe import LOWEST, Unreachable
from notepad_jax.types import Evidence, Task

SHORTFALL = 1 - LOWEST  # a document's length lies in (LOWEST * length, length]
_TRIES = 32  # paragraphs in a row that do not fit any more, before one is cut
_TOGETHER = 64  # paragraphs in one piece of text
_JUDGED_BY = {"ruler-qa": ("sub_em", "auto"), "ruler": ("ruler_part", "plain")}


def make_task(
    corpus: Corpus, number: int, seed: int, length: int, count: Count, source: str
) -> Task:
    """Hides question `number` in a document of (0.98 * length, length] tokens.

    Tokens are counted by `count` part by part (heading, paragraph) and added up. For a
    counter of words that is exact. For a tokenizer that counts text differently in parts
    than joined, what joining adds or saves is measured once on 64 paragraphs, and the
    document aims 0.3% lower. Distractors are drawn without replacement; those that do not
    fit into what is left are passed over, and if the gap stays too wide, one is cut at a
    word.
    `source` is "ruler-qa/..." (metric sub_em, contract auto) or "ruler/..." (ruler_part,
    plain). Raises Unreachable if the gold paragraphs need more than `length` tokens, or the
    whole pool less.
    """
    judged = _judged(source)
    question = _question(corpus, number)
    rng = np.random.default_rng([seed, number, length])
    sizes = _sizes(corpus, count)
    limit = length if not sizes.joint else (1 - SHORTFALL / 8) * length
    chosen = list(question.gold)
    used = sum(sizes.block(place, number) for place, number in enumerate(chosen, start=1))
    if used > limit:
        raise Unreachable(
            f"{source}: question {number} of {corpus.name} needs {math.ceil(used)} tokens for its "
            f"gold paragraphs; {length} are too short"
        )
    cut, too_long = (-1, 0), []
    for candidate in _distractors(corpus, question, rng):
        full = used > (1 - SHORTFALL / 4) * length
        if len(too_long) == _TRIES or (full and too_long):
            break
        size = sizes.block(len(chosen) + 1, candidate)
        if used + size <= limit:
            chosen.append(candidate)
            used += size
            too_long = []
        else:
            too_long.append(candidate)
    if too_long and used <= (1 - SHORTFALL / 4) * length:
        heading = sizes.heading(len(chosen) + 1)
        last = too_long[-1]
        characters, size = _fit(corpus.paragraphs[last], limit - used - heading, count)
        if characters:
            chosen.append(last)
            cut, used = (last, characters), used + heading + size
    if used <= LOWEST * length:
        raise Unreachable(
            f"{source}: {corpus.name} cannot fill {length} tokens to within {SHORTFALL:.0%}: "
            f"{len(chosen)} of its {len(corpus.paragraphs)} paragraphs come to {int(used)}; use "
            f"another length, or a file with more paragraphs"
        )
    return _task(corpus, question, rng.permutation(chosen), cut, source, judged, f"{seed}-{length}")


def make_task_of_paragraphs(
    corpus: Corpus, number: int, seed: int, paragraphs: int, source: str
) -> Task:
    """Hides question `number` among `paragraphs` paragraphs, gold ones included.

    The published lengths have 50 (7K tokens), 100, ... 25,600 (3.5M). No paragraph is used
    twice: raises Unreachable if the pool is too small, or there are more gold paragraphs.
    """
    judged = _judged(source)
    question = _question(corpus, number)
    if not len(question.gold) <= paragraphs <= len(corpus.paragraphs):
        raise Unreachable(
            f"{source}: {paragraphs} paragraphs were asked for; question {number} of "
            f"{corpus.name} needs at least {len(question.gold)} and the corpus has "
            f"{len(corpus.paragraphs)}; ask for a number between, or use a larger file"
        )
    rng = np.random.default_rng([seed, number, paragraphs])
    chosen = list(question.gold)
    for candidate in _distractors(corpus, question, rng):
        if len(chosen) == paragraphs:
            break
        chosen.append(candidate)
    suffix = f"{seed}-{paragraphs}"
    return _task(corpus, question, rng.permutation(chosen), (-1, 0), source, judged, suffix)


@dataclasses.dataclass(frozen=True)
class ParagraphDocument:
    """Numbered paragraphs of a corpus in a given order, written when they are read."""

    corpus: Corpus = dataclasses.field(repr=False)
    order: Sequence[int] = dataclasses.field(repr=False)  # compact: 45,000 at 3.5M tokens
    cut: tuple[int, int]  # a paragraph that is cut and after how many characters, or (-1, 0)

    def pieces(self) -> Iterator[str]:
        """Yields `Paragraph 1: TITLE`, the text below, an empty line, and so on."""
        for start in range(0, len(self.order), _TOGETHER):
            blocks = (self.block(place) for place in range(start, start + _TOGETHER))
            yield "".join(blocks)

    def block(self, place: int) -> str:
        """The text of one place in the order, "" past the end; the last one ends the document."""
        if place >= len(self.order):
            return ""
        text = _heading(place + 1) + self._body(place)
        return text if place < len(self.order) - 1 else text.rstrip("\n")

    def _body(self, place: int) -> str:
        paragraph = self.corpus.paragraphs[self.order[place]]
        if self.order[place] == self.cut[0]:
            paragraph = dataclasses.replace(paragraph, text=paragraph.text[: self.cut[1]])
        return _body(paragraph)


def _heading(number: int) -> str:
    return f"Paragraph {number}:"


def _body(paragraph: Paragraph) -> str:
    title = f" {paragraph.title}" if paragraph.title else ""
    return f"{title}\n{paragraph.text}\n\n"


def _judged(source: str) -> tuple[str, str]:
    """The metric and the contract of a source."""
    family = source.split("/")[0]
    if family not in _JUDGED_BY:
        raise ValueError(f"source {source!r} is unknown; use {' or '.join(_JUDGED_BY)}/NAME")
    return _JUDGED_BY[family]


def _task(
    corpus: Corpus,
    question: Question,
    order: np.ndarray,
    cut: tuple[int, int],
    source: str,
    judged: tuple[str, str],
    suffix: str,
) -> Task:
    document = ParagraphDocument(corpus, array.array("i", order.tolist()), cut)
    return Task(
        id=f"{source}-{question.id}-{suffix}",
        question=question.text,
        document=document,
        answers=question.answers,
        source=source,
        metric=judged[0],
        contract=judged[1],
        evidence=_evidence(document, question),
    )


def _evidence(document: ParagraphDocument, question: Question) -> tuple[Evidence, ...]:
    """The facts with their exact places: characters before them over all characters."""
    starts, total = {}, 0
    gold = set(question.gold)
    for place, number in enumerate(document.order):
        if number in gold:
            starts[number] = total + len(_heading(place + 1))
        total += len(document.block(place))
    found = []
    for fact in question.facts:
        title = document.corpus.paragraphs[fact.paragraph].title
        before = starts[fact.paragraph] + (len(title) + 1 if title else 0) + 1 + fact.start
        found.append(Evidence(fact.text, before / total))
    return tuple(sorted(found, key=lambda fact: fact.place))


def _question(corpus: Corpus, number: int) -> Question:
    if not 0 <= number < len(corpus.questions):
        raise ValueError(
            f"{corpus.name} has {len(corpus.questions)} questions, counted from 0; there is no "
            f"number {number}; ask for fewer samples"
        )
    return corpus.questions[number]


def _distractors(corpus: Corpus, question: Question, rng: np.random.Generator) -> Iterator[int]:
    """The paragraphs that came with the question first, then all others; both shuffled."""
    shuffled = rng.permutation(len(corpus.paragraphs)).tolist()
    gold, near = set(question.gold), set(question.near)
    yield from (number for number in shuffled if number in near)
    yield from (number for number in shuffled if number not in gold and number not in near)


class _Sizes:
    """Tokens of headings and paragraphs, each counted once and kept."""

    def __init__(self, corpus: Corpus, count: Count) -> None:
        self._corpus, self._count = corpus, count
        self._bodies = np.full(len(corpus.paragraphs), -1, np.int32)
        self._headings: list[int] = [0]
        self.joint = self._measure_joint()

    def _measure_joint(self) -> float:
        """Tokens that a paragraph has more among others than in parts; 0 for additive counters."""
        pool = len(self._corpus.paragraphs)
        some = np.unique(np.linspace(0, pool - 1, _TOGETHER).astype(int)).tolist()
        document = ParagraphDocument(self._corpus, tuple(some), (-1, 0))
        parts = sum(self.heading(place + 1) + self.body(some[place]) for place in range(len(some)))
        return (sum(map(self._count, document.pieces())) - parts) / len(some)

    def block(self, place: int, number: int) -> float:
        """Tokens of paragraph `number` as the document's `place`-th, heading included."""
        return self.heading(place) + self.body(number) + self.joint

    def body(self, number: int) -> int:
        if self._bodies[number] < 0:
            self._bodies[number] = self._count(_body(self._corpus.paragraphs[number]))
        return int(self._bodies[number])

    def heading(self, number: int) -> int:
        while number >= len(self._headings):
            self._headings.append(self._count(_heading(len(self._headings))))
        return self._headings[number]


@functools.lru_cache(maxsize=8)
def _sizes(corpus: Corpus, count: Count) -> _Sizes:
    return _Sizes(corpus, count)


def _fit(paragraph: Paragraph, room: float, count: Count) -> tuple[int, int]:
    """Cuts a paragraph at a word; returns (characters, tokens) of what fits, (0, 0) if nothing."""
    ends = [place for place, letter in enumerate(paragraph.text) if letter == " " and place]
    tokens = [0]

    def fits(end: int) -> bool:
        size = count(_body(dataclasses.replace(paragraph, text=paragraph.text[:end])))
        if size <= room:
            tokens.append(max(size, tokens[-1]))
        return size <= room

    low, high = 0, len(ends)  # ends[:low] fit
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(ends[middle]) else (low, middle)
    return (ends[low - 1], tokens[-1]) if low else (0, 0)
