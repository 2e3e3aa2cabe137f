"""Task generator of the form of OOLONG-synth: statistics of many dated messages.

A line has a date, a user and a message, and a message is about one of six subjects, its label,
which is not written down: a reader has to tell labels itself, keep counts, and compare them at
the end. The document is a shuffled row of items. Each task cuts the items into groups (its
`Cell`s, e.g. the messages about food, month by month) whose sizes are set by their shares
beforehand, so that every answer is known from the sizes alone, and what is asked for has a clear
winner; what a group leaves open (user, day, words) an item draws by its number. So no document is
held or counted, and none of the words asked about changes with the length; numbers grow with it.

| task | asked for |
|---|---|
| most_frequent, least_frequent | the label of the most messages, of the fewest |
| count | how many messages have a label |
| comparison | whether a label is more or less common than another |
| user | the user of the most messages with a label |
| user_count | how many messages with a label a user wrote |
| user_label | the label of which a user wrote the most messages |
| before_after | whether a label is more or less common before a date than from then on |
| month | in which month a label is most frequent |
| date | the day of the most messages |

Evidence is the number, for tasks that ask for one, at the last line that counts. What differs from
the published data is listed in docs/evaluation.md. Below are recipe.py and oolong_lines.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from notepad_jax.tasks import oolong_lines, recipe
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.tasks.oolong_lines import DAYS, LABELS, USERS, Cell
from notepad_jax.types import Task

RATIO = 1.25, 1.6  # of two neighbouring shares, where one is to win
WINS = 1.1  # times the second: a winner's size at least

_ALL = range(len(LABELS))
_MORE, _LESS = "more common", "less common"
_LABEL_FORM = "Answer in the form 'Label: LABEL', with one of these: " + ", ".join(LABELS) + "."
_NUMBER_FORM = "Answer in the form 'Answer: NUMBER'."
_COMPARED_FORM = f"Answer in the form 'Answer: {_MORE}' or 'Answer: {_LESS}'."


@dataclasses.dataclass(frozen=True)
class SampleQuestion:
    """The question of a sample, before there is a document.

    `cells` come with their shares. `winner` is the cell that has to be the largest of `among` (or
    the smallest); number tasks have none.
    """

    question: str
    cells: tuple[tuple[Cell, float], ...]
    answer: str = ""  # "": the size of the first cell
    metric: str = "oolong"
    winner: int = 0
    among: tuple[int, ...] = ()
    smallest: bool = False


def make_task(name: str, seed: int, length: int, haystack: Haystack, count: Count) -> Task:
    """Makes one sample: lines of `length` tokens by `count`, and the question about them.

    As in `ruler.make_task`, except that `haystack` is not used, and that answers that are
    numbers grow with the length.

    Raises Unreachable, naming the task and the length, where the length cannot be reached or is
    too short for a clear winner; ValueError for an unknown task, a negative seed, or a `count`
    that is not additive.
    """
    if name not in NAMES:
        raise ValueError(f"OOLONG has no generated task {name!r}; there are {', '.join(NAMES)}")
    sample = recipe.sample(f"oolong/{name}", seed, length, haystack, count)
    asked = _TASKS[name](oolong_lines.scene(sample.draws), sample.rng)
    cells, shares = zip(*asked.cells, strict=True)
    lines, closing = oolong_lines.fitted(sample, cells, np.array(shares))
    sizes = lines.sizes.tolist()
    if not _clear(sizes, asked):
        raise recipe.too_short(sample.task, length, f"{sum(sizes)} messages have no clear winner")
    return Task(
        id=f"oolong-{name}-{length}-{seed}",
        question=asked.question,
        document=recipe.RecipeDocument(lines.filler(), closing=closing),
        answers=(asked.answer or str(sizes[0]),),
        source=sample.task,
        metric=asked.metric,
        contract="auto",
        evidence=() if asked.answer else lines.evidence(str(sizes[0]), closing),
    )


def _clear(sizes: Sequence[int], asked: SampleQuestion) -> bool:
    """Whether the winner wins, or the number that is asked for is not 0."""
    others = [sizes[k] for k in asked.among if k != asked.winner]
    if not others:
        return sizes[0] > 0
    if asked.smallest:
        return min(others) >= WINS * sizes[asked.winner] > 0
    return sizes[asked.winner] >= WINS * max(others)


def _ranked(rng: np.random.Generator, n: int) -> list[float]:
    """n shares that fall by a ratio of RATIO, the largest first; their sum is 1."""
    shares = rng.uniform(*RATIO) ** -np.arange(n)
    return (shares / shares.sum()).tolist()


def _parted(
    rng: np.random.Generator, cells: Sequence[Cell], whole: float
) -> list[tuple[Cell, float]]:
    """The cells in a drawn order, each with its share of `whole`, the largest first."""
    order = rng.permutation(len(cells))
    ranked = _ranked(rng, len(cells))
    return [(cells[k], whole * share) for k, share in zip(order, ranked, strict=True)]


def _labels(rng: np.random.Generator) -> list[tuple[Cell, float]]:
    return _parted(rng, [Cell(labels=(label,)) for label in _ALL], 1.0)


def _most_frequent(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    cells = _labels(rng)
    question = f"Which label do the most messages have? {_LABEL_FORM}"
    return SampleQuestion(question, tuple(cells), LABELS[cells[0][0].labels[0]], among=tuple(_ALL))


def _least_frequent(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    cells = _labels(rng)[::-1]
    question = f"Which label do the fewest messages have? {_LABEL_FORM}"
    answer = LABELS[cells[0][0].labels[0]]
    return SampleQuestion(question, tuple(cells), answer, among=tuple(_ALL), smallest=True)


def _count(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    cells = _labels(rng)
    cells = _first(cells, int(rng.integers(len(cells))))
    label = LABELS[cells[0][0].labels[0]]
    question = f"How many messages have the label {label}? {_NUMBER_FORM}"
    return SampleQuestion(question, tuple(cells), metric="oolong_number")


def _comparison(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    cells = _labels(rng)
    more, less = sorted(rng.permutation(len(cells))[:2].tolist())
    won, lost = (LABELS[cells[k][0].labels[0]] for k in (more, less))
    first, second, answer = (won, lost, _MORE) if rng.integers(2) else (lost, won, _LESS)
    question = (
        f"Is the label {first} more common or less common than the label {second}? {_COMPARED_FORM}"
    )
    return SampleQuestion(question, tuple(cells), answer, winner=more, among=(more, less))


def _user(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    label = int(rng.integers(len(LABELS)))
    cells = _parted(rng, [Cell(labels=(label,), users=(user,)) for user in range(USERS)], 0.6)
    question = (
        f"Which user wrote the most messages with the label {LABELS[label]}? "
        "Answer in the form 'User: NUMBER'."
    )
    cells.append((Cell(labels=_but(len(LABELS), label)), 0.4))
    return SampleQuestion(
        question, tuple(cells), scene.users[cells[0][0].users[0]], among=_first_of(USERS)
    )


def _user_count(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    label, user = int(rng.integers(len(LABELS))), int(rng.integers(USERS))
    others, rest = _but(USERS, user), _but(len(LABELS), label)
    share = float(rng.uniform(0.1, 0.3))
    cells = (
        (Cell((label,), (user,)), share),
        (Cell((label,), others), 0.2),
        (Cell(rest, (user,)), 0.2),
        (Cell(rest, others), 0.6 - share),
    )
    question = (
        f"How many messages with the label {LABELS[label]} did user {scene.users[user]} write? "
        f"{_NUMBER_FORM}"
    )
    return SampleQuestion(question, cells, metric="oolong_number")


def _user_label(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    user = int(rng.integers(USERS))
    cells = _parted(rng, [Cell((label,), (user,)) for label in _ALL], 0.5)
    question = f"Which label do the most messages of user {scene.users[user]} have? {_LABEL_FORM}"
    answer = LABELS[cells[0][0].labels[0]]
    cells.append((Cell(users=_but(USERS, user)), 0.5))
    return SampleQuestion(question, tuple(cells), answer, among=tuple(_ALL))


def _before_after(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    """Other labels come as often before the date as from then on."""
    label, day = int(rng.integers(len(LABELS))), DAYS // 2
    rest, halves = _but(len(LABELS), label), (tuple(range(day)), tuple(range(day, DAYS)))
    before = rng.integers(2)
    larger = float(rng.uniform(0.55, 0.75))
    cells = (
        (Cell((label,), days=halves[1 - before]), 0.5 * larger),
        (Cell((label,), days=halves[before]), 0.5 * (1 - larger)),
        (Cell(rest, days=halves[0]), 0.25),
        (Cell(rest, days=halves[1]), 0.25),
    )
    question = (
        f"Is the label {LABELS[label]} more common or less common before {scene.days[day]} than "
        f"from that date on? {_COMPARED_FORM}"
    )
    return SampleQuestion(question, cells, _MORE if before else _LESS, among=(0, 1))


def _month(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    label = int(rng.integers(len(LABELS)))
    cells = _parted(rng, [Cell((label,), days=days) for days in scene.months.values()], 0.6)
    answer = next(month for month, days in scene.months.items() if days == cells[0][0].days)
    question = (
        f"In which month are the most messages with the label {LABELS[label]}? "
        f"Answer in the form 'Month: MONTH', with one of these: {', '.join(scene.months)}."
    )
    cells.append((Cell(_but(len(LABELS), label)), 0.4))
    return SampleQuestion(question, tuple(cells), answer, among=_first_of(len(scene.months)))


def _date(scene: oolong_lines.Scene, rng: np.random.Generator) -> SampleQuestion:
    cells = _parted(rng, [Cell(days=(day,)) for day in range(DAYS)], 1.0)
    question = "On which date are the most messages? Answer in the form 'Date: DATE'."
    answer = scene.days[cells[0][0].days[0]]
    return SampleQuestion(question, tuple(cells), answer, "oolong_date", among=_first_of(DAYS))


def _first(cells: list[tuple[Cell, float]], k: int) -> list[tuple[Cell, float]]:
    return [cells[k], *cells[:k], *cells[k + 1 :]]


def _first_of(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def _but(n: int, one: int) -> tuple[int, ...]:
    return tuple(k for k in range(n) if k != one)


_TASKS: Mapping[str, Callable[[oolong_lines.Scene, np.random.Generator], SampleQuestion]] = {
    "most_frequent": _most_frequent,
    "least_frequent": _least_frequent,
    "count": _count,
    "comparison": _comparison,
    "user": _user,
    "user_count": _user_count,
    "user_label": _user_label,
    "before_after": _before_after,
    "month": _month,
    "date": _date,
}
NAMES = tuple(_TASKS)
