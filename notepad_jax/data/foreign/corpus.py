"""A question-answering corpus: questions, their gold paragraphs, and the pool these lie in.

A `Corpus` is what tasks.questions makes documents of. hotpotqa and squad read one from
users' files; where there are no such files, tasks.invented makes one out of nothing. The
facts that a reader must carry away are located in the gold paragraphs. Below: sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from notepad_jax.data import sources
from notepad_jax.data.admission import Fault


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A distractor or a gold paragraph; the title may be empty."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class GoldFact:
    """Words that a reader must carry away from a gold paragraph."""

    text: str
    paragraph: int  # number in the corpus
    start: int  # character of the paragraph's text


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its answers (any is right) and the paragraphs that hold the evidence."""

    id: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]  # numbers of paragraphs in the corpus
    near: tuple[int, ...]  # paragraphs that came with the question: the hardest distractors
    facts: tuple[GoldFact, ...]  # those that are known; none for yes-or-no questions


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Questions and the pool of paragraphs, gold ones included."""

    name: str
    questions: Sequence[Question]
    paragraphs: Sequence[Paragraph]
    dropped: Mapping[str, int]  # questions that were left out, by reason


class Pool:
    """Paragraphs, each kept once, numbered as they come."""

    def __init__(self) -> None:
        self.paragraphs: list[Paragraph] = []
        self._known: dict[Paragraph, int] = {}

    def add(self, title: str, text: str) -> int:
        paragraph = Paragraph(title, text)
        number = self._known.setdefault(paragraph, len(self.paragraphs))
        if number == len(self.paragraphs):
            self.paragraphs.append(paragraph)
        return number


def find_word(wanted: str, text: str) -> int:
    """Returns where `wanted` stands with no letter or digit glued to it, or -1."""
    at = text.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if not text[max(0, at - 1) : at].isalnum() and not text[end : end + 1].isalnum():
            return at
        at = text.find(wanted, at + 1)
    return -1


def named(words: str, question: str) -> bool:
    """Whether the question names these words already: then they are no fact."""
    return find_word(words.lower(), question.lower()) >= 0


def text_of(row: Mapping[str, Any], name: str, where: str) -> str:
    """Returns the text in a column; Fault if there is none, or nothing in it."""
    if name not in row:
        raise Fault(f"{where} has no column {name!r}; it has {sources.columns_of(row)}")
    if not isinstance(row[name], str) or not row[name].strip():
        raise Fault(f"{where}: {name!r} must be a text, it is {row[name]!r:.80}")
    return row[name]
