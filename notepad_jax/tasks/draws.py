"""Seeded draws of what generated tasks hide: names, numbers, identifiers, words, coded words.

Nothing here is drawn twice in one sample. A `Shuffle` is a permutation of 0..size-1 that is
computed where it is needed and never stored, so the i-th name of a document, or the i-th
item of a shuffled list of a million, is known from the seed alone and costs no memory.
Names are three words of ours ("quiet-copper-lantern"): 589,824 of them, so that even a
document of 3.5M tokens made of nothing but facts repeats none. `words.txt` beside this file
is a list of 6,718 English words, written for this project. A `Cast` draws one after the other.
Above: the task generators; imports nothing of ours but the names of people in starter.vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from notepad_jax.starter import vocabulary

QUALITIES = tuple(
    "ancient bashful bitter brave brisk broad calm careful cheerful clever curious dapper deep "
    "distant dusty eager early faithful famous fancy fearless foggy fragile frosty gentle glad "
    "grand hasty heavy hollow honest humble idle jolly keen lively lonely loud lucky merry misty "
    "modest narrow nimble patient plain polite proud quiet rapid restless rough sandy shallow "
    "sharp silent sleepy slender solemn steady sturdy tender timid weary".split()
)
MATERIALS = tuple(
    "alder amber ash azure bamboo basalt beech birch brass brick bronze canvas carmine cedar "
    "chalk cherry clay coal cobalt copper coral cork cotton cream crimson crystal ebony elm "
    "emerald felt fir flannel flint garnet gauze glass golden granite grey hazel hemp indigo iron "
    "ivory jade khaki lace larch lead leather lilac lime linen maple marble mauve mica nickel oak "
    "ochre olive onyx opal orange paper pearl pewter pine plaster plum poplar purple quartz reed "
    "ruby russet saffron sage satin scarlet silk silver slate steel stone straw tan teal thistle "
    "tin topaz velvet walnut wax willow wool".split()
)
THINGS = tuple(
    "anchor anvil apron arch arrow axle badge banner barge barrel basin basket beacon bell bench "
    "blanket boat bottle bracelet brazier bridge broom bucket buckle button cabin candle canoe "
    "carpet cart chair chest chimney clock collar compass cradle crate crown cup curtain dagger "
    "desk door drum easel fence ferry fiddle flag flute fountain gate glove goblet hammer harp "
    "hatch helmet hinge horn jug kettle key kite ladder lamp lantern ledger lever lock loom "
    "mast mirror needle oar oven paddle pillow plough pulley quill raft ribbon saddle "
    "shield shovel spindle stool sundial tankard tent torch trowel wagon wheel".split()
)
WORDS = tuple(pathlib.Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())
# A coined word is five letters and an ending, such as "luviterock"; no listed word is made so.
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
ENDINGS = ("adge", "arth", "ault", "erock", "istle", "olet", "orrow", "umber")
NAME_COUNT = len(QUALITIES) * len(MATERIALS) * len(THINGS)  # 589,824

_ROUNDS = 4
_LEAST_BITS = 8  # mixing fewer bits than these leaves patterns

_AT_ONCE = 32  # drawn together by one_by_one

T = TypeVar("T")


class Exhausted(ValueError):
    """The error where more different names or numbers are asked for than there are."""


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """A seeded permutation of 0..size-1, computed for any indices in constant memory.

    A power of two at least as large as `size` is permuted by rounds of "times an odd
    number, plus a number, high half folded into the low half", each of which can be
    undone; what lands outside is sent round again until it lands inside (cycle walking:
    Black and Rogaway, Ciphers with arbitrary finite domains, 2002, section 3). Good
    enough for shuffling data, no good for secrets.
    """

    seed: tuple[int, ...]
    size: int  # 1 .. 2**32

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: where each of `indices` int [n] is sent.

        Raises Exhausted for an index that is not below `size`.
        """
        mixed = np.asarray(indices).astype(np.uint64)
        if mixed.size and mixed.max() >= self.size:
            raise Exhausted(f"there are only {self.size:,} different ones to draw")
        mixed = self._mix(mixed)
        while (outside := mixed >= self.size).any():
            mixed[outside] = self._mix(mixed[outside])
        return mixed.astype(np.int64)

    @functools.cached_property
    def _keys(self) -> tuple[int, np.ndarray]:
        bits = max(_LEAST_BITS, (self.size - 1).bit_length())
        keys = np.random.default_rng(self.seed).integers(0, 2**bits, (_ROUNDS, 2), np.uint64)
        keys[:, 0] |= np.uint64(1)  # odd: only then can the multiplication be undone
        return bits, keys

    def _mix(self, values: np.ndarray) -> np.ndarray:
        bits, keys = self._keys
        mask, half = np.uint64(2**bits - 1), np.uint64(bits // 2)
        for factor, addend in keys:
            values = (values * factor + addend) & mask
            values ^= values >> half
        return values


@dataclasses.dataclass(frozen=True)
class SampleDraws:
    """What one sample draws, by index: pure functions of its seed, without repetition.

    All take `indices` int [n] and return n texts; they raise Exhausted past the last.
    """

    seed: tuple[int, ...]

    def names(self, indices: np.ndarray) -> list[str]:
        """Three words each, NAME_COUNT of them."""
        rest, things = np.divmod(self.shuffle(1, NAME_COUNT).at(indices), len(THINGS))
        qualities, materials = np.divmod(rest, len(MATERIALS))
        triples = zip(qualities.tolist(), materials.tolist(), things.tolist(), strict=True)
        return [f"{QUALITIES[q]}-{MATERIALS[m]}-{THINGS[t]}" for q, m, t in triples]

    def numbers(self, indices: np.ndarray) -> list[str]:
        """Seven digits each, the first never 0."""
        picked = self.shuffle(2, 9_000_000).at(indices) + 1_000_000
        return [str(number) for number in picked.tolist()]

    def people(self, indices: np.ndarray) -> list[str]:
        """First name and surname, 2,304 of them."""
        surnames = len(vocabulary.TOWNS)
        picked = self.shuffle(3, len(vocabulary.NAMES) * surnames).at(indices)
        pairs = (divmod(person, surnames) for person in picked.tolist())
        return [f"{vocabulary.NAMES[name]} {vocabulary.TOWNS[surname]}" for name, surname in pairs]

    def coded(self, indices: np.ndarray, letters: int) -> list[str]:
        """Words of `letters` random lower-case letters, 6 at most."""
        picked = self.shuffle(4, 26**letters).at(indices)
        digits = picked[:, None] // 26 ** np.arange(letters) % 26
        text = (digits + ord("a")).astype(np.uint8).tobytes().decode()
        return [text[i : i + letters] for i in range(0, len(text), letters)]

    def words(self, indices: np.ndarray) -> list[str]:
        """Single words: all of WORDS, and past their end coined ones, 1,166,400 of them."""
        indices = np.asarray(indices)
        listed = self.shuffle(7, len(WORDS)).at(indices[indices < len(WORDS)]).tolist()
        stems = (len(CONSONANTS) * len(VOWELS)) ** 2 * len(CONSONANTS)
        past = indices[indices >= len(WORDS)] - len(WORDS)
        coined = self.shuffle(8, stems * len(ENDINGS)).at(past).tolist()
        words = iter([WORDS[word] for word in listed]), iter(map(_coin, coined))
        return [next(words[index >= len(WORDS)]) for index in indices.tolist()]

    def uuids(self, indices: np.ndarray) -> list[str]:
        """UUIDs of version 4 (RFC 9562): 122 bits of noise, so that none comes twice."""
        keys = np.random.default_rng((*self.seed, 5)).integers(0, 2**64, 2, np.uint64)
        noise = np.stack([_noise(np.asarray(indices).astype(np.uint64) ^ key) for key in keys], 1)
        text = noise.astype(">u8").tobytes().hex()
        # "4" is the version, and one of "89ab" says that the layout is the RFC's.
        return [
            f"{d[:8]}-{d[8:12]}-4{d[13:16]}-{'89ab'[int(d[16], 16) % 4]}{d[17:20]}-{d[20:]}"
            for d in (text[i : i + 32] for i in range(0, len(text), 32))
        ]

    def shuffle(self, purpose: int, size: int) -> Shuffle:
        """A permutation for one purpose, e.g. 6; those of other purposes have nothing in common."""
        return Shuffle((*self.seed, purpose), size)


def one_by_one(
    draw: Callable[[np.ndarray], list[str]], avoid: Callable[[str], bool]
) -> Iterator[str]:
    """What a method of `SampleDraws` draws, in order, without what is to be avoided."""
    for start in itertools.count(0, _AT_ONCE):
        drawn = draw(np.arange(start, start + _AT_ONCE))
        yield from (text for text in drawn if not avoid(text))


@dataclasses.dataclass(frozen=True)
class Cast:
    """The seeded source of a story's chances, names, numbers and people: one sample's own."""

    rng: np.random.Generator
    names: Iterator[str]
    numbers: Iterator[str]
    people: Iterator[str]

    @classmethod
    def of(cls, rng: np.random.Generator, draws: SampleDraws, held: Callable[[str], bool]) -> Cast:
        """Returns the cast of one sample, without names that are `held` by its haystack."""
        kinds = (draws.names, draws.numbers, draws.people)
        return cls(rng, *(one_by_one(kind, held) for kind in kinds))

    def depth(self) -> float:
        return float(self.rng.random())

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.integers(len(choices)))]


def _coin(number: int) -> str:
    """The coined word of a number: its digits to the bases of endings and letters."""
    number, ending = divmod(number, len(ENDINGS))
    word = ENDINGS[ending]
    for letters in (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS):
        number, letter = divmod(number, len(letters))
        word = letters[letter] + word
    return word


def _noise(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood, 2014): a bijection of 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
