"""Writes a dataset of questions about a real book: Genesis and Exodus, with `book_questions`.

    apt-get install bible-kjv                               # the text, on Debian and Ubuntu
    python -m benchmarks.book book.jsonl
    python -m benchmarks.book book.jsonl --text pg10.txt    # Project Gutenberg's, or another's
    python -m notepad_jax eval --suite book.jsonl --policy POLICY --name before

Writes a task file (data/README.md) of 40 rows over one document: chapters in paragraphs, as a
reader has them, without the numbers of verses. A file's rows do not share a document, so the text
stands there 40 times (15 MB). Expected: 368,587 characters, which are 90,274 tokens of SmolLM2's.

The text must have every verse of the two books, and the words that answer each question, once;
anything else is refused, naming the verse. Rows stand in an order in which the first ones, however
many (`--samples 20`), are spread evenly over the book. An answer is right that contains the gold
one (`sub_em`); numbers are right in the book's words, in modern ones and in figures, and a longer
number that ends in the same words is taken for right, too. Of a list the share that was named
counts (`ruler_all`).

Models may know this book by heart: docs/evaluation.md says how to measure what one knows
without reading. Above: `eval`, which reads the file; below: data.files.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.book_questions import QUESTIONS, Fact, Question
from notepad_jax.data import files
from notepad_jax.types import Evidence, Task, TextDocument

PROGRAM = "bible"  # of Debian's package bible-kjv
BOOKS = ("Genesis", "Exodus")
VERSES = 1533 + 1213
PARAGRAPH = 600  # characters, after which the next full stop at a verse's end ends a paragraph

# "Ge1:1 In the beginning", "Genesis 1:1 In ...", or "1:1 In ..." within a line.
_MARK = re.compile(r"(?:^(?:[1-3] ?)?[A-Za-z]+ ?|(?<!\S))(\d+):(\d+)\s+", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_GOLDEN = (5**0.5 - 1) / 2

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclasses.dataclass(frozen=True)
class Verse:
    """A verse, without its number."""

    book: str
    chapter: int
    number: int
    words: str

    @property
    def name(self) -> str:
        return f"{self.book} {self.chapter}:{self.number}"


def installed() -> str:
    """Returns the two books as the installed program prints them, a verse a line.

    Raises ValueError if there is no such program, or it cannot.
    """
    if shutil.which(PROGRAM) is None:
        raise ValueError(
            f"there is no program `{PROGRAM}`; apt-get install bible-kjv, or name a King James "
            f"Bible with numbered verses: --text FILE"
        )
    done = subprocess.run([PROGRAM, "-f", "gen1:1-exo40:38"], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"`{PROGRAM}` ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout


def verses(text: str) -> list[Verse]:
    """Returns the verses of the first two books of a text that numbers them (1:1).

    What stands before the first verse, behind a blank line within or after one (titles), and from
    the third book on is left out; apostrophes are straight ones.
    """
    text = text.replace("\u2019", "'")
    found: list[Verse] = []
    book = -1
    for mark, after in itertools.pairwise([*_MARK.finditer(text), None]):
        chapter, number = int(mark[1]), int(mark[2])
        book += (chapter, number) == (1, 1)
        if book == len(BOOKS):
            break
        words = text[mark.end() : after.start() if after else len(text)]
        words = " ".join(_BLANK_LINE.split(words)[0].split())
        if book >= 0:
            found.append(Verse(BOOKS[book], chapter, number, words))
    return found


def prose(found: Sequence[Verse]) -> str:
    """Returns verses as chapters in paragraphs."""
    paragraphs: list[str] = []
    for (book, chapter), of_chapter in itertools.groupby(found, lambda v: (v.book, v.chapter)):
        paragraphs += [f"{book}, chapter {chapter}", *_paragraphs(v.words for v in of_chapter)]
    return "\n\n".join(paragraphs) + "\n"


def _paragraphs(sentences: Iterator[str]) -> Iterator[str]:
    held = ""
    for words in sentences:
        held = f"{held} {words}".strip()
        if len(held) >= PARAGRAPH and held.endswith((".", "?", "!")):
            yield held
            held = ""
    if held:
        yield held


def tasks(found: Sequence[Verse], questions: Sequence[Question]) -> list[Task]:
    """Returns a task for each question, about one document; the first N of them are spread over it.

    Raises ValueError naming the verse if words of a fact do not stand in it, or stand elsewhere,
    too, or do not hold the answer.
    """
    by_name = {verse.name: verse.words for verse in found}
    text = prose(found)
    document = TextDocument(text)
    order = sorted(range(len(questions)), key=lambda i: i * _GOLDEN % 1)
    return [_task(questions[i], document, by_name) for i in order]


def _task(question: Question, document: TextDocument, by_name: dict[str, str]) -> Task:
    text = document.text
    for fact in question.facts:
        if fact.words not in by_name.get(fact.where, ""):
            raise ValueError(
                f"{fact.where} is not there or does not say {fact.words!r}; the questions are "
                f"about the King James Version"
            )
        if text.count(fact.words) > 1:
            raise ValueError(f"{fact.where}: {fact.words!r} stands elsewhere, too; name more of it")
    wanted = question.answers if question.all_wanted else question.answers[:1]
    return Task(
        id=question.facts[-1].where,
        question=question.question,
        document=document,
        answers=tuple(dict.fromkeys([*question.answers, *spellings(question.number)])),
        source="book",
        metric="ruler_all" if question.all_wanted else "sub_em",
        contract="auto",
        evidence=tuple(_evidence(answer, question.facts, text) for answer in wanted),
    )


def _evidence(answer: str, facts: Sequence[Fact], text: str) -> Evidence:
    """Where in the text an answer stands; of two facts in the one that holds it."""
    for fact in facts:
        if answer in fact.words:
            at = text.index(fact.words) + fact.words.index(answer)
            return Evidence(answer, at / len(text))
    raise ValueError(f"{facts[-1].where}: {answer!r} does not stand in {facts[-1].words!r}")


def spellings(number: int) -> tuple[str, ...]:
    """Returns a number below a million in figures and in words: with "and" and hyphens, and not.

    Of 0, which is no number, nothing.
    """
    if not number:
        return ()
    said = [_words(number, " and "), _words(number, " ")]
    return tuple(dict.fromkeys([str(number), *said, *(one.replace("-", " ") for one in said)]))


def _words(number: int, joint: str) -> str:
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    unit, name, link = (100, "hundred", joint) if number < 1000 else (1000, "thousand", " ")
    rest = link + _words(number % unit, joint) if number % unit else ""
    return f"{_words(number // unit, joint)} {name}{rest}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT.jsonl", help="the task file to write")
    parser.add_argument("--text", help=f"a text with numbered verses (of `{PROGRAM}` if not given)")
    options = parser.parse_args(argv)
    try:
        text = _opened(options.text) if options.text else installed()
        found = verses(text)
        if len(found) != VERSES:
            raise ValueError(
                f"{options.text or PROGRAM} has {len(found):,} verses of {' and '.join(BOOKS)}, "
                f"numbered as 1:1, and not {VERSES:,}; give the whole King James Version"
            )
        made = tasks(found, QUESTIONS)
        count = files.write(options.out, made, itertools.repeat(0))
    except ValueError as problem:
        sys.exit(str(problem))
    print(f"{options.out}: {count} questions about {len(made[0].document.text):,} characters")


def _opened(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {problem}") from None


if __name__ == "__main__":
    main()
