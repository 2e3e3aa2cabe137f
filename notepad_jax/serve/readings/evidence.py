"""Provenance of an answer: which chunk brought what it says into the memory, and where that stands.

A memory is rewritten with every chunk, so what is known of it is since which chunk each of its
words has been in it without a gap: as much as the memory is long, however long the document. The
longest run of words that an answer shares with the last memory came with the chunk that brought
the last of them. Of that chunk the sentence with these words is told, and its place in the
document, in bytes. Nothing is computed by the model. Above: `chat_model` and `jobs`; below:
`read_ahead`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from notepad_jax.serve.http.errors import Refusal
from notepad_jax.serve.readings.read_ahead import ReadAhead, letters

SHARE = 0.5  # of an answer's letters that must stand in the memory; less is chance
NEAR = 1 << 14  # letters by which a tokenizer may have moved a place, by normalising what is before
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"""[.!?]+["'\u201d\u2019)\]]*\s+|\n+""")


class Origins:
    """The origins of the memory's words: since which chunk each has been in it."""

    def __init__(self) -> None:
        self.memory = ""
        self._since: dict[str, int] = {}

    def update(self, chunk: int, memory: str) -> None:
        """Updates the origins with the memory after a chunk."""
        self._since = {word: self._since.get(word, chunk) for word in _words(memory)}
        self.memory = memory

    def of(self, answer: str) -> tuple[str, int] | None:
        """Returns what of an answer stands in the memory, as the answer writes it, and which chunk
        brought it; None where that is less than half of it."""
        spans = [found.span() for found in _WORD.finditer(answer)]
        said = _words(answer)
        first, count = _longest_run(said, _words(self.memory))
        if not count or _letters(said[first : first + count]) < SHARE * _letters(said):
            return None
        text = answer[spans[first][0] : spans[first + count - 1][1]]
        return text, max(self._since[word] for word in said[first : first + count])


def evidence(
    origins: Origins, chunks: ReadAhead, decode: Callable[[Iterable[int]], str], question: str,
    answer: str,
) -> dict[str, Any] | None:  # fmt: skip
    """Returns the provenance of an answer: where it entered the memory; None if it is not in it.

    `{text, chunk, sentence, bytes}`; the last two are None where no sentence of the chunk has
    these words, `bytes` also where the document is gone, or is not what it was.
    """
    found = origins.of(answer)
    if found is None:
        return None
    text, chunk = found
    told: dict[str, Any] = {"text": text, "chunk": chunk, "sentence": None, "bytes": None}
    sentence = _sentence(decode(chunks[chunk]), text, {*_words(question), *_words(origins.memory)})
    if sentence is None:
        return told
    at, words = sentence
    with contextlib.suppress(Refusal):
        before = chunks.letters_before(chunk) + at
        told["bytes"] = _place(chunks.document.pieces(), before, words.split())
    return told | {"sentence": words}


def _words(text: str) -> list[str]:
    # Found first: casefold() makes marks of some letters (İ, ΐ), which would part a word.
    return [word.casefold() for word in _WORD.findall(text)]


def _letters(words: Sequence[str]) -> int:
    return sum(map(len, words))


def _longest_run(said: Sequence[str], there: Sequence[str]) -> tuple[int, int]:
    """Returns (first, count) of the longest run of `said` that is one of `there`, by letters."""
    best, best_letters = (0, 0), 0
    before: dict[int, int] = {}  # length of the run that ends at each place of `there`
    places: dict[str, list[int]] = {}
    for place, word in enumerate(there):
        places.setdefault(word, []).append(place)
    for last, word in enumerate(said):
        now = {place: before.get(place - 1, 0) + 1 for place in places.get(word, ())}
        if now:
            count = max(now.values())
            letters = _letters(said[last + 1 - count : last + 1])
            if letters > best_letters:
                best, best_letters = (last + 1 - count, count), letters
        before = now
    return best


def _sentence(chunk: str, text: str, about: set[str]) -> tuple[int, str] | None:
    """Returns the sentence of a chunk that has the words of `text`, and how many letters stand
    before it; of several the one with most words that question and memory have, too."""
    run, best, most, start = _words(text), None, -1, 0
    for end in [*(found.end() for found in _SENTENCE_END.finditer(chunk)), len(chunk)]:
        sentence = chunk[start:end]
        words = _words(sentence)
        if _longest_run(run, words)[1] == len(run):
            shared = len(about.intersection(words))
            if shared > most:
                best, most = (letters(chunk[:start]), sentence.strip()), shared
        start = end
    return best


def _place(pieces: Iterator[str], before: int, words: Sequence[str]) -> list[int] | None:
    """Returns the bytes [first, last + 1] of a sentence that has about `before` letters before it.

    White space is not compared. None where it is not to be found near there.
    """
    pattern = re.compile(r"\s+".join(map(re.escape, words)))
    window, passed, size = "", 0, 0  # of the text before the window: letters, bytes
    ahead = before + _letters(words) + NEAR
    held = 0  # letters of the window
    for piece in pieces:
        if passed + held + letters(piece) < before - NEAR:  # all of it lies before
            passed, size = passed + held + letters(piece), size + _bytes(window + piece)
            window, held = "", 0
            continue
        window, held = window + piece, held + letters(piece)
        if passed + held > ahead:
            break
    best: re.Match[str] | None = None
    near, at, count = 0, 0, passed  # `count` letters stand before place `at` of the window
    for found in pattern.finditer(window):
        count, at = count + letters(window[at : found.start()]), found.start()
        if best is None or abs(count - before) < near:
            best, near = found, abs(count - before)
        if count >= before:  # those behind it are farther away
            break
    if best is None:
        return None
    first = size + _bytes(window[: best.start()])
    return [first, first + _bytes(best[0])]


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
