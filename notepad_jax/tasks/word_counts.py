"""Task generator of RULER's two word-count tasks: `cwe` and `fwe`.

Their documents are shuffled word lists whose counts are fixed beforehand, so that no two
words can tie where it matters. The list is never made: `draws.Shuffle` says which item
stands at a position, and the item says which word it is. Below is recipe.py; ruler.py
makes tasks of these.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from notepad_jax.tasks import recipe
from notepad_jax.tasks.draws import SampleDraws
from notepad_jax.tasks.haystack import Count
from notepad_jax.tasks.recipe import RecipeDocument, WrittenUnits

COMMON = 10  # words of cwe that are asked for
LEAST_UNCOMMON = 10  # with fewer, the list is hardly anything but the answer
ALPHA = 2.0  # fwe: the k-th most frequent word occurs in proportion to k**-ALPHA
FREQUENT = slice(1, 4)  # words of fwe that are asked for; the most frequent of all is NOISE
CODED_LETTERS = 6
NOISE = "..."

_ORDER = 6  # the purpose of the shuffle of a list's items
_ZETA = math.pi**2 / 6  # sum of k**-2


@dataclasses.dataclass(frozen=True)
class Repetitions:
    """How often the words of cwe come."""

    common: int
    uncommon: int

    @property
    def asked(self) -> int:
        """Items of the list that are words asked for."""
        return COMMON * self.common


# RULER's, which has fewer in texts shorter than LONG tokens.
SHORT_LISTS, LONG_LISTS, LONG = Repetitions(6, 1), Repetitions(30, 3), 4096


def common_words(
    task: str, draws: SampleDraws, length: int, count: Count
) -> tuple[RecipeDocument, tuple[str, ...]]:
    """Returns a numbered list in which 10 words come more often than all others; and those 10.

    The number of other words makes the length: a step adds one of them, as often as it
    comes. Raises Unreachable if the list does not fit, or without LEAST_UNCOMMON others.
    """
    times = LONG_LISTS if length >= LONG else SHORT_LISTS
    words = tuple(draws.words(np.arange(COMMON)))
    numbers = " ".join(f"{i}." for i in range(1, times.asked + 1))
    least = recipe.FIRST_WORD + count(" " + numbers)
    least += times.common * count(" " + " ".join(words))
    steps = functools.partial(_steps, draws, times)
    uncommon, left = recipe.fitting(steps, length - least, count)
    if uncommon < LEAST_UNCOMMON:
        raise recipe.too_short(
            task,
            length,
            f"{COMMON} words {times.common} times each take {least:,}, "
            f"and {LEAST_UNCOMMON * times.uncommon} items of other words have to fit, too",
        )
    recipe.check_length(task, length - recipe.FIRST_WORD - left, length)
    size = times.asked + uncommon * times.uncommon
    return RecipeDocument(WrittenUnits(functools.partial(_items, draws, times, size), size)), words


def frequent_words(
    task: str, draws: SampleDraws, length: int, count: Count
) -> tuple[RecipeDocument, tuple[str, ...]]:
    """Returns coded words among dots, with Zipf's frequencies; and the three most frequent.

    The k-th word comes floor(n k**-2 / zeta(2)) times, the first being dots, which also
    fill the last gap; n makes the length. Raises Unreachable where the third and the fourth
    coded word would tie.
    """
    most = 2 * length  # of n: a word takes a token or more, and dots are 0.6 of all words
    ranks = np.arange(1, math.isqrt(int(most / _ZETA)) + 2)
    words = (NOISE, *draws.coded(ranks, CODED_LETTERS)[1:])
    shares = ranks**-ALPHA / _ZETA
    tokens = np.array([count(" " + word) for word in words])
    if tokens.min() < 1:
        raise ValueError(f"{task}: the token counter finds no tokens in {NOISE!r}; use another")
    room = length - recipe.FIRST_WORD

    def times(n: int) -> np.ndarray:
        return np.floor(n * shares).astype(np.int64)

    low, high = 0, most  # the largest n that fits, by bisection
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if times(middle) @ tokens <= room else (low, middle - 1)
    counts = times(low)
    counts[0] += (room - counts @ tokens) // tokens[0]
    last = FREQUENT.stop
    if len(words) <= last or counts[last - 1] <= counts[last]:
        raise recipe.too_short(task, length, "the words that are asked for would tie with others")
    recipe.check_length(task, int(counts @ tokens), length)
    ends = np.cumsum(counts)
    size = int(ends[-1])
    write = functools.partial(_coded, np.array(words, dtype=object), ends, draws, size)
    return RecipeDocument(WrittenUnits(write, size)), words[FREQUENT]


def _steps(draws: SampleDraws, times: Repetitions, start: int, stop: int) -> list[str]:
    """What the uncommon words start..stop-1 add to a list: their items, in any order."""
    words = draws.words(np.arange(start, stop) + COMMON)
    return list(_repeated(words, times.asked + 1 + times.uncommon * start, times.uncommon))


def _repeated(words: list[str], number: int, times: int) -> Iterator[str]:
    for word in words:
        yield " ".join(f"{number + i}. {word}" for i in range(times))
        number += times


def _items(draws: SampleDraws, times: Repetitions, size: int, start: int, stop: int) -> list[str]:
    """Items start..stop-1 of the shuffled list, numbered from 1."""
    items = draws.shuffle(_ORDER, size).at(np.arange(start, stop))
    beyond = COMMON + (items - times.asked) // times.uncommon
    words = draws.words(np.where(items < times.asked, items // times.common, beyond))
    return [f"{number}. {word}" for number, word in enumerate(words, start=start + 1)]


def _coded(
    words: np.ndarray, ends: np.ndarray, draws: SampleDraws, size: int, start: int, stop: int
) -> list[str]:
    """Words start..stop-1 of the shuffled text: item i is the first word whose end is past i."""
    items = draws.shuffle(_ORDER, size).at(np.arange(start, stop))
    return words[np.searchsorted(ends, items, "right")].tolist()
