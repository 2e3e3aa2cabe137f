"""Task generator of several questions a document: stories of RULER and memory tasks, mixed.

RULER's needles and chains (`ruler`), the memory tasks (`memory_tasks`) and free questions
(`comprehension`) tell a story each. Several of them are hidden in one haystack, each with its
question, and each is interference for the others; so a document is prefilled once for all its
questions, in training and in evaluation. Every story has a script, what good notes say after each
of its facts (`recipe.Story.script`), from which imitation learns. Above: suites, and the stream of
a training run; below: ruler, memory_tasks, comprehension and recipe.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from notepad_jax.tasks import comprehension, memory_tasks, recipe, ruler
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.tasks.recipe import Sample, Story
from notepad_jax.types import Task

TOLD = 0.6  # share of a document's tokens that stories may take; the rest is haystack
SMALL = 64  # tokens that are kept free for each story to come: the smallest has fewer
TRIES = 8  # longer documents, and other ones, where one cannot be made
OTHERS = 2**40  # from a document's seed to that of the next one that is tried in its place
MOST = 16  # questions about one document, where no number is given

Member = tuple[str, int]  # a story: its kind and its seed


def _needles(name: str, sample: Sample) -> Story:
    needles = ruler.NEEDLES[name]
    depths = sample.rng.random(needles.facts).tolist()
    return ruler.needle_story(needles, sample.draws, depths, sample.haystack.holds)


def _chain(sample: Sample) -> Story:
    return ruler.chain_story(sample.draws, sample.rng.random(ruler.HOPS + 1).tolist())


def _of_memory(name: str, sample: Sample) -> Story:
    return memory_tasks.STORIES[name](sample.cast)


_TOLD: Mapping[str, Callable[[Sample], Story]] = {
    **{
        name: functools.partial(_needles, name)
        for name, needles in ruler.NEEDLES.items()
        if needles.prose
    },
    "vt": _chain,
    **{name: functools.partial(_of_memory, name) for name in memory_tasks.NAMES},
    comprehension.NAME: lambda sample: comprehension.story(sample.cast, sample.haystack),
}
NAMES = tuple(_TOLD)


def check(kinds: Iterable[str]) -> None:
    """Raises ValueError for a kind of story that there is not, naming those that there are."""
    for kind in kinds:
        if kind not in NAMES:
            raise ValueError(f"there is no story {kind!r}; there are {', '.join(NAMES)}")


def story(member: Member, haystack: Haystack, count: Count) -> Story:
    """Returns one story; a function of its kind and seed, and of what the haystack holds."""
    kind, seed = member
    sample = recipe.sample(f"stories/{kind}", seed, 1, haystack, count)
    return _TOLD[kind](sample)


def make_document(
    members: Sequence[Member], seed: int, length: int, haystack: Haystack, count: Count
) -> tuple[Task, ...]:
    """Hides the stories of `members` in one document of `length` tokens; returns their tasks.

    `seed` says where in the haystack it begins. The tasks share the document object. Raises
    Unreachable as `recipe.hide` does.
    """
    told = [story(member, haystack, count) for member in members]
    facts = [(fact, k) for k, one in enumerate(told) for fact in one.facts]
    facts.sort(key=lambda pair: pair[0].depth)
    opening = float(np.random.default_rng(seed).random())
    document, evidence = recipe.hide(
        "stories", [fact for fact, _ in facts], haystack, opening, length, count
    )
    whose = [k for fact, k in facts if fact.shown]  # of each evidence, in the same order
    return tuple(
        Task(
            id=f"stories-{kind}-{length}-{own}",
            question=one.question,
            document=document,
            answers=one.answers,
            source=f"stories/{kind}",
            metric=one.metric,
            contract=one.contract,
            evidence=tuple(e for e, owner in zip(evidence, whose, strict=True) if owner == k),
            script=one.script(),
        )
        for k, ((kind, own), one) in enumerate(zip(members, told, strict=True))
    )


def drawn_length(seed: int, least: int, most: int) -> int:
    """Returns a length in tokens from `least` to `most`, evenly by its logarithm; 0: `most`."""
    share = np.random.default_rng([seed, zlib.crc32(b"length")]).random()
    return round(most * (min(least or most, most) / most) ** share)


def make_tasks(
    seed: int, kinds: Sequence[str], questions: int, length: int, haystack: Haystack, count: Count
) -> tuple[Task, ...]:
    """Makes a document of `length` tokens with `questions` stories, drawn by `seed` from `kinds`.

    Kinds come in a shuffled order, each as often as the others; one that finds no room any more
    gives way to the next that does. Raises Unreachable where none finds room.
    """
    rng = np.random.default_rng([seed, zlib.crc32(b"stories")])
    order = [kinds[i] for i in rng.permutation(len(kinds))]
    room, members = TOLD * length, []
    for k in range(questions):
        own = int(rng.integers(2**62))
        for kind in order[k % len(order) :] + order[: k % len(order)]:
            size = _size(story((kind, own), haystack, count), count)
            if size <= room - SMALL * (questions - 1 - k):
                break
        else:
            raise recipe.too_short("stories", length, f"there is no room for {questions} stories")
        members.append((kind, own))
        room -= size
    return make_document(members, seed, length, haystack, count)


def draw_tasks(
    seed: int, kinds: Sequence[str], questions: int, lengths: range, haystack: Haystack,
    count: Count,
) -> tuple[Task, ...]:  # fmt: skip
    """As `make_tasks`, of the length that `seed` draws from `lengths`; some length, if it can be.

    Where stories find no room, or sentences do not come to the length, the document is longer, and
    at the longest it has other stories. Raises Unreachable where that is of no use, either.
    """
    most = lengths[-1]
    drawn = drawn_length(seed, lengths[0], most)
    longer = dict.fromkeys(drawn + (most - drawn) * k // TRIES for k in range(TRIES + 1))
    others = [(seed + k * OTHERS, most) for k in range(1, TRIES + 1)]
    *tries, last = [*((seed, length) for length in longer), *others]
    for own, length in tries:
        with contextlib.suppress(recipe.Unreachable):
            return make_tasks(own, kinds, questions, length, haystack, count)
    return make_tasks(last[0], kinds, questions, last[1], haystack, count)


def make_samples(
    members: Sequence[Member], seed: int, length: int, haystack: Haystack, count: Count,
    most: int = MOST,
) -> Iterator[Task]:  # fmt: skip
    """Makes the tasks of all `members`, in documents of `length` tokens with `most` of them.

    A document takes members in their order while there is room for their stories, at least one.
    One member tells the same story, at the same depths, at every length. Raises Unreachable for
    a story that does not fit a document alone.
    """
    here: list[Member] = []
    room, number = TOLD * length, 0
    for member in members:
        size = _size(story(member, haystack, count), count)
        if here and (size > room or len(here) == most):
            yield from make_document(here, seed + number, length, haystack, count)
            here, room, number = [], TOLD * length, number + 1
        here.append(member)
        room -= size
    if here:
        yield from make_document(here, seed + number, length, haystack, count)


def _size(told: Story, count: Count) -> int:
    return sum(count(" " + fact.text) for fact in told.facts)
