"""The lines of OOLONG's documents: dated messages of users, in groups of known sizes.

Item i of 0..n-1 belongs to the group whose range of items it falls into, and draws what its group
leaves open by its number; line k shows the item that a shuffle puts there. What a line can say is
a finite set of dates, users and messages, each counted once, so that the tokens of n lines are a
sum over numpy arrays, and how many lines fit a length is found by bisection without writing one.
Above is oolong.py; below recipe.py and draws.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from notepad_jax.tasks import haystack, recipe
from notepad_jax.tasks.draws import SampleDraws, Shuffle
from notepad_jax.tasks.haystack import Count
from notepad_jax.tasks.recipe import Sample, WrittenUnits
from notepad_jax.types import Evidence

USERS = 8
DAYS = 24  # different dates of a document, two in each month of a year
PATTERNS = 6  # of a label's messages; each goes with each of its words
AT_ONCE = 65_536  # items looked at together

_FIRST_YEAR, _YEARS = 2015, 10
_ORDER, _USER, _DAY, _LABEL, _WORDS, _WHO = range(20, 26)  # purposes of shuffles
_ANY = 2**32  # size of the shuffles that items draw by
_FAREWELL = "\nEnd of the messages."  # the last gap is closed behind it
# By label: what its messages are about, and how they say it.
_MESSAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "food": (
        "soup bread stew pizza lasagne risotto salad omelette pie goulash curry porridge",
        (
            "The {} needs more salt.", "I burnt the {} again.", "Who wants more of the {}?",
            "My {} tasted better yesterday.", "We had {} for lunch.", "Pass the {} and a fork.",
        ),
    ),
    "weather": (
        "rain snow hail fog drizzle sleet thunder frost lightning sunshine mist wind",
        (
            "The forecast says {} for tomorrow.", "Take a coat, there is {} outside.",
            "All week nothing but {}.", "The sky looks like {} soon.",
            "After the {} the air was fresh.", "There was {} over the valley this morning.",
        ),
    ),
    "sport": (
        "football tennis hockey rugby basketball cricket handball volleyball badminton "
        "wrestling fencing judo",
        (
            "Our team lost the {} final.", "The {} coach wants us to train harder.",
            "She won a medal in {}.", "The referee stopped the {} match.",
            "We scored late in {} tonight.", "I hurt my knee playing {}.",
        ),
    ),
    "music": (
        "piano violin guitar trumpet flute clarinet accordion saxophone banjo organ drum oboe",
        (
            "He practises scales on the {}.", "The {} solo got applause.",
            "My {} is out of tune.", "She composed a waltz for {}.",
            "The orchestra still lacks a {}.", "I learned a new melody on the {}.",
        ),
    ),
    "travel": (
        "train ferry plane tram bus taxi monorail steamer airship sleeper shuttle caravan",
        (
            "We missed the {} to the coast.", "Book two seats on the {}.",
            "The {} left the station late.", "My suitcase is still on the {}.",
            "The {} ticket cost a fortune.", "Passengers may board the {} now.",
        ),
    ),
    "gardening": (
        "tulips tomatoes roses beans carrots lilacs pumpkins daisies peas radishes hedges ferns",
        (
            "I watered the {} twice.", "Snails ate the {} in the flower bed.",
            "Sow the {} in April.", "The {} need pruning.",
            "We dug up the lawn and planted {}.", "Put compost around the {}.",
        ),
    ),
}  # fmt: skip
LABELS = tuple(_MESSAGES)
MESSAGES = tuple(
    tuple(pattern.format(word) for pattern in patterns for word in words.split())
    for words, patterns in _MESSAGES.values()
)  # by label, all of one length


@dataclasses.dataclass(frozen=True)
class Cell:
    """A group of lines, by what they have in common; empty is whatever there is."""

    labels: tuple[int, ...] = ()
    users: tuple[int, ...] = ()
    days: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Scene:
    """The users and the dates of one sample's messages."""

    users: tuple[str, ...]  # five digits each
    days: tuple[str, ...]  # ascending, written as in the lines
    months: Mapping[str, tuple[int, ...]]  # by name: its days' numbers


def scene(draws: SampleDraws) -> Scene:
    """Returns the users and dates of a sample."""
    users = draws.shuffle(_WHO, 90_000).at(np.arange(USERS)) + 10_000
    rng = np.random.default_rng((*draws.seed, _WHO))
    year = _FIRST_YEAR + int(rng.integers(_YEARS))
    days = [
        datetime.date(year, month, int(day))
        for month in range(1, 13)
        for day in sorted(1 + rng.permutation(28)[: DAYS // 12])
    ]
    months = {f"{days[k]:%B}": tuple(range(k, k + DAYS // 12)) for k in range(0, DAYS, DAYS // 12)}
    written = tuple(f"{day:%b %d, %Y}" for day in days)
    return Scene(tuple(map(str, users.tolist())), written, months)


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of one document."""

    draws: SampleDraws
    scene: Scene
    cells: Sequence[Cell]
    sizes: np.ndarray  # int64 [cells]: lines of each

    @property
    def size(self) -> int:
        return int(self.sizes.sum())

    def filler(self) -> WrittenUnits:
        return WrittenUnits(self.write, self.size)

    def write(self, start: int, stop: int) -> list[str]:
        """Lines start..stop-1, each behind a line break."""
        items = self._order.at(np.arange(start, stop))
        days, users, labels, words = (array.tolist() for array in self.drawn(items))
        return [
            f"\nDate: {self.scene.days[d]} || User: {self.scene.users[u]} || "
            f"Message: {MESSAGES[label][w]}"
            for d, u, label, w in zip(days, users, labels, words, strict=True)
        ]

    def drawn(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns day, user, label and words, int64 [n] each, of items int64 [n]."""
        groups = np.searchsorted(np.cumsum(self.sizes), items, "right")
        choices = (
            (_DAY, [cell.days or range(DAYS) for cell in self.cells]),
            (_USER, [cell.users or range(USERS) for cell in self.cells]),
            (_LABEL, [cell.labels or range(len(LABELS)) for cell in self.cells]),
            (_WORDS, [range(len(MESSAGES[0]))] * len(self.cells)),
        )
        days, users, labels, words = (
            _chosen(self.draws.shuffle(purpose, _ANY).at(items), groups, open_)
            for purpose, open_ in choices
        )
        return days, users, labels, words

    def evidence(self, shown: str, closing: tuple[str, ...]) -> tuple[Evidence, ...]:
        """What is known once the last line of the first cell has been read: `shown`."""
        document = recipe.RecipeDocument(self.filler(), closing=closing)
        whole = document.characters(self.size + len(closing)) - 1
        return (Evidence(shown, document.characters(self._last()) / whole),)

    def _last(self) -> int:
        """The number of the last line whose item belongs to the first cell."""
        for stop in range(self.size, 0, -AT_ONCE):
            start = max(0, stop - AT_ONCE)
            found = np.flatnonzero(self._order.at(np.arange(start, stop)) < self.sizes[0])
            if found.size:
                return start + int(found[-1])
        raise AssertionError("the first cell has lines")

    @functools.cached_property
    def _order(self) -> Shuffle:
        return self.draws.shuffle(_ORDER, self.size)


def fitted(
    sample: Sample, cells: Sequence[Cell], shares: np.ndarray
) -> tuple[Lines, tuple[str, ...]]:
    """As many lines as fit the sample's length, and what closes the last gap.

    A cell has its share of them, to the nearest line. Raises Unreachable if
    the length cannot be reached from below within 2%.
    """
    count, own = sample.count, scene(sample.draws)
    room = sample.length - recipe.FIRST_WORD - count(" " + _FAREWELL)
    weights = _weights(own, count)
    low, high = 0, max(0, room) // weights.frame  # the most lines that fit, by bisection
    while low < high:
        middle = (low + high + 1) // 2
        fits = _tokens(_lines(sample.draws, own, cells, shares, middle), weights) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    if not low:
        raise recipe.too_short(sample.task, sample.length, "there is no room for a message")
    lines = _lines(sample.draws, own, cells, shares, low)
    bland, left = recipe.closing(haystack.noise(), room - _tokens(lines, weights), count)
    recipe.check_length(sample.task, sample.length - recipe.FIRST_WORD - left, sample.length)
    return lines, (" ".join((_FAREWELL, *bland)),)


def _lines(
    draws: SampleDraws, own: Scene, cells: Sequence[Cell], shares: np.ndarray, n: int
) -> Lines:
    """n lines by shares, rounded by largest remainders: a larger share never gets fewer lines."""
    sizes = np.floor(n * shares).astype(np.int64)
    rest = np.argsort(sizes - n * shares, kind="stable")[: n - sizes.sum()]
    sizes[rest] += 1
    return Lines(draws, own, cells, sizes)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Tokens of what lines are made of, each part with the space before it."""

    frame: int  # of what all lines have
    days: np.ndarray  # int64 [DAYS]
    users: np.ndarray  # int64 [USERS]
    messages: np.ndarray  # int64 [labels, messages of a label]


def _weights(own: Scene, count: Count) -> _Weights:
    frame = sum(count(" " + part) for part in ("\nDate:", "|| User:", "|| Message:"))
    if frame < 1:
        raise ValueError("the token counter finds no tokens in 'Date:'; use another")
    return _Weights(
        frame,
        np.array([count(" " + day) for day in own.days], np.int64),
        np.array([count(" " + user) for user in own.users], np.int64),
        _message_tokens(count),
    )


@functools.lru_cache(maxsize=16)
def _message_tokens(count: Count) -> np.ndarray:
    return np.array([[count(" " + said) for said in label] for label in MESSAGES], np.int64)


def _tokens(lines: Lines, weights: _Weights) -> int:
    total = weights.frame * lines.size
    for start in range(0, lines.size, AT_ONCE):
        items = np.arange(start, min(start + AT_ONCE, lines.size))
        days, users, labels, words = lines.drawn(items)
        total += int(weights.days[days].sum() + weights.users[users].sum())
        total += int(weights.messages[labels, words].sum())
    return total


def _chosen(drawn: np.ndarray, groups: np.ndarray, choices: Sequence[Sequence[int]]) -> np.ndarray:
    """One of the choices of each item's group, by a number that the item drew."""
    sizes = np.array([len(choice) for choice in choices])
    table = np.zeros((len(choices), sizes.max()), np.int64)
    for row, choice in zip(table, choices, strict=True):
        row[: len(choice)] = choice
    return table[groups, drawn % sizes[groups]]
