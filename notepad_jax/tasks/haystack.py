"""Haystacks, the text in which facts are hidden: sentences, and how many tokens each takes.

Three haystacks: bland sentences of ours said over and over, the documentation strings of
the installed Python standard library (real prose, on every machine, offline), and a user's
own text files. Sentences are parted by single spaces, and a document's tokens are the sum
of its sentences' tokens, each counted once with the space before it. That is exact for
tokenizers which cut before a space and a word: sentencepiece, byte-level BPE with the
patterns of GPT-2 to Qwen, counters of words. Prefix sums then size a document of 3.5M
tokens in microseconds. Above is recipe.py, which makes documents out of this.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from notepad_jax.data import sources

Count = Callable[[str], int]  # tokens of a text

LONGEST = 400  # characters of a sentence; longer ones are cut at a space where there is one
LARGEST = 16 * 2**20  # bytes of text files; about 4M tokens, and nothing needs more
TEXT_SUFFIXES = (".md", ".rst", ".txt")  # the files of a folder that are read
PROSE_SENTENCES = 1000  # a standard library with fewer has come without its sources

_NOISE = (
    "The meadow lies under a thin mist.",
    "A cart rolls slowly down the lane.",
    "Someone has left the gate open again.",
    "The clouds move on toward the coast.",
    "It is neither warm nor cold today.",
    "Nothing much happens in the afternoon.",
    "The kettle hums, and nobody minds.",
    "Then the evening comes, as it always does.",
    "All is well.",
)
_SKIPPED = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = {"body", "handlers", "orelse", "finalbody", "cases"}  # of statements
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z])")
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n")
_REAL_PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'\"()\-]*[.!?]")
_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")
_TOO_LONG = re.compile(rf"\S.{{0,{LONGEST - 1}}}(?!\S)|\S{{1,{LONGEST}}}")


@dataclasses.dataclass(frozen=True, eq=False)
class Haystack:
    """Sentences in an order that makes sense, read from anywhere and round and round."""

    sentences: tuple[str, ...] = dataclasses.field(repr=False)
    name: str

    def __post_init__(self) -> None:
        if not self.sentences:
            raise ValueError(f"the haystack {self.name!r} has no sentences; give it some text")

    def holds(self, text: str) -> bool:
        """Whether `text` stands in the haystack as whole words, whatever its case.

        Generated facts avoid what the haystack holds: an answer that also stands in the
        prose by accident would make a sample ambiguous.
        """
        words = _WORD.findall(text.lower())
        if not words or not self._words.issuperset(words):
            return False
        return re.search(rf"(?<!\w){re.escape(text.lower())}(?!\w)", self._lowered) is not None

    @functools.cached_property
    def _lowered(self) -> str:
        return " ".join(self.sentences).lower()

    @functools.cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(_WORD.findall(self._lowered))


@dataclasses.dataclass(frozen=True, eq=False)
class Measures:
    """Sizes of a haystack's sentences, each with the space (or line break) before it."""

    tokens: np.ndarray  # int64 [2n + 1], prefix sums over two rounds of the sentences
    characters: np.ndarray  # int64 [2n + 1], the same in characters
    shortest_first: np.ndarray  # int64 [n], sentence numbers by tokens
    sorted_tokens: np.ndarray  # int64 [n], the tokens of those


def measured(haystack: Haystack, count: Count, parted: str = " ") -> Measures:
    """Counts every sentence once; the result is kept for this haystack, `count` and `parted`.

    `parted`, one character, is what stands before each sentence in the document.

    Raises ValueError if `count` is not additive (see `check_additive`) or finds no tokens
    in a sentence.
    """
    return _measured(haystack, count, parted)


@functools.lru_cache(maxsize=16)
def _measured(haystack: Haystack, count: Count, parted: str) -> Measures:
    check_additive(count)
    tokens = np.array([count(parted + sentence) for sentence in haystack.sentences], np.int64)
    if tokens.min() < 1:
        empty = haystack.sentences[int(tokens.argmin())]
        raise ValueError(
            f"the token counter finds no tokens in {empty!r} of the haystack {haystack.name!r}; "
            "leave that sentence out or use another tokenizer"
        )
    characters = np.array([1 + len(sentence) for sentence in haystack.sentences], np.int64)
    order = np.argsort(tokens, kind="stable")
    return Measures(
        tokens=np.concatenate([[0], np.cumsum(np.tile(tokens, 2))]),
        characters=np.concatenate([[0], np.cumsum(np.tile(characters, 2))]),
        shortest_first=order,
        sorted_tokens=tokens[order],
    )


@functools.lru_cache(maxsize=16)
def check_additive(count: Count) -> None:
    """Raises ValueError unless a text counts as the sum of its words and sentences.

    Off by one is let pass: many tokenizers treat the first word of a text differently.
    """
    sentences = [*_NOISE, "17. Item 4821930 is 3f2a9c41-5b7e-4d10-9a6f-0c8e2b714d55.", "... ..."]
    whole = count(" ".join(sentences))
    for parts in (sentences, " ".join(sentences).split(" ")):
        summed = sum(count(" " + part) for part in parts)
        if abs(summed - whole) > 1 or not whole:
            raise ValueError(
                f"the token counter finds {whole} tokens in a text and {summed} in its "
                f"{len(parts)} parts; lengths can only be kept with a tokenizer that cuts at "
                "spaces and adds no tokens of its own"
            )


@functools.cache
def noise() -> Haystack:
    """A few bland sentences, said over and over: nothing in it resembles a fact."""
    return Haystack(_NOISE, "noise")


@functools.cache
def stdlib_prose() -> Haystack:
    """The documentation strings of the installed Python standard library, as sentences.

    Modules in the order of their names, each sentence once; lists, code and anything with
    odd characters is left out. The same for one version of Python, not across versions.
    Takes some two seconds, once per process. Raises ValueError if the library has come
    without its sources.
    """
    folder = sysconfig.get_path("stdlib")
    sentences: dict[str, None] = {}  # each once, in the order found
    for path in _files(folder, (".py",), skipped=_SKIPPED):
        for docstring in _docstrings(path):
            for paragraph in _PARAGRAPH_END.split(docstring):
                if ">>>" not in paragraph:
                    found = _SENTENCE_END.split(" ".join(paragraph.split()))
                    sentences.update(dict.fromkeys(filter(_is_prose, found)))
    if len(sentences) < PROSE_SENTENCES:
        raise ValueError(
            f"{folder} holds {len(sentences)} documented sentences, fewer than "
            f"{PROSE_SENTENCES}; this Python has come without its sources: give text files instead"
        )
    return Haystack(tuple(sentences), "stdlib")


def text_files(paths: Sequence[str | Path]) -> Haystack:
    """A user's own prose: text files (local or gs://), or folders of .txt, .md and .rst files.

    A folder's files are read in the order of their names, folder by folder. Line breaks and
    runs of spaces become single spaces; sentences of more than LONGEST characters are cut.

    Raises ValueError for a missing, empty or non-UTF-8 file (with the byte), a folder
    without text files, and more than LARGEST bytes in all.
    """
    sentences: list[str] = []
    room = LARGEST
    for file in (file for path in paths for file in _text_files_of(path)):
        content = _read(file, room)
        room -= len(content)
        sentences += _sentences_of(file, content)
    return Haystack(tuple(sentences), "text files")


def _text_files_of(path: str | Path) -> Sequence[str | Path]:
    if sources.is_remote(path):
        return [path]
    path = Path(path)
    if path.is_dir():
        files = list(_files(path, TEXT_SUFFIXES))
        if not files:
            raise ValueError(
                f"{path} holds no text files; put files ending in {', '.join(TEXT_SUFFIXES)} there"
            )
        return files
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give text files or a folder of text files")
    return [path]


def _read(file: str | Path, room: int) -> bytes:
    try:
        if sources.is_remote(file):
            content = sources.read(file)
        else:
            with open(file, "rb") as opened:
                content = opened.read(room + 1)
    except OSError as problem:
        raise ValueError(f"{file} cannot be read: {problem.strerror}") from None
    if len(content) > room:
        raise ValueError(
            f"the haystack's text files, as far as {file}, hold more than {LARGEST:,} bytes; "
            "that is enough for any document, so give fewer files"
        )
    return content


def _sentences_of(file: str | Path, content: bytes) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{file} is not UTF-8 at byte {problem.start}; convert it to UTF-8"
        ) from None
    paragraphs = (" ".join(paragraph.split()) for paragraph in _PARAGRAPH_END.split(text))
    sentences = [s for paragraph in paragraphs for s in _SENTENCE_END.split(paragraph) if s]
    if not sentences:
        raise ValueError(f"{file} is empty; a haystack needs text")
    return [part for sentence in sentences for part in _cut(sentence)]


def _cut(sentence: str) -> list[str]:
    if len(sentence) <= LONGEST:
        return [sentence]
    return [part.strip() for part in _TOO_LONG.findall(sentence)]


def _files(
    folder: str | Path, suffixes: tuple[str, ...], skipped: Collection[str] = ()
) -> Iterator[Path]:
    """Files below a folder by ending, folder by folder, in the order of their names."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped)
        yield from (Path(where, name) for name in sorted(names) if name.endswith(suffixes))


def _docstrings(path: Path) -> Iterable[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []  # the library holds a few files that are not meant to be parsed
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # as ast.walk, breadth first, but not into the many expressions
        nodes += (one for block in node._fields if block in _BLOCKS for one in getattr(node, block))
    return filter(None, (ast.get_docstring(n) for n in nodes if isinstance(n, _DOCUMENTED)))


def _is_prose(sentence: str) -> bool:
    return (
        20 <= len(sentence) <= LONGEST
        and sentence.count(" ") >= 3
        and max(map(len, sentence.split())) <= 20
        and _REAL_PROSE.fullmatch(sentence) is not None
    )
