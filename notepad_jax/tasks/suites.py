"""The suites of generated tasks, and a sample of any task at any length.

`ruler` is RULER's thirteen tasks, `ruler-qa` questions among so many paragraphs that they fill the
length (what the published memory agents were measured on), `memory` what a memory in particular may
get wrong, `stories` stories of both in one haystack; `babilong`, `graphwalks`, `mrcr`, `oolong` and
`nolima` are of the form of these benchmarks. A sample is a function of (seed, task, number)
and the length, so building files, evaluating without files, and going on after a kill all see the
same one. Its facts and its question are the same at every length: lengths are compared over the
same questions. Above: the programs `build` and `evaluate`; below: the generators.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from notepad_jax.data.foreign import hotpotqa, squad
from notepad_jax.data.foreign.corpus import Corpus
from notepad_jax.tasks import (
    babilong,
    graphwalks,
    haystack,
    invented,
    memory_tasks,
    mrcr,
    nolima,
    oolong,
    questions,
    ruler,
    stories,
)
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.tasks.recipe import Unreachable
from notepad_jax.types import Task, TextDocument

RULER_QA = ("qa_1", "qa_2")  # SQuAD, HotpotQA
BUILT_IN_QA = "multi_hop"
# Suites whose samples each have a document of their own, out of nothing but a seed and prose.
_GENERATED = {
    "memory": memory_tasks,
    "babilong": babilong,
    "graphwalks": graphwalks,
    "mrcr": mrcr,
    "oolong": oolong,
    "nolima": nolima,
}
_NAMES = {
    "ruler": (*ruler.NAMES, *RULER_QA),
    "ruler-qa": ("hotpotqa", "squad", BUILT_IN_QA),
    **{suite: generator.NAMES for suite, generator in _GENERATED.items()},
    "stories": stories.NAMES,
}
_MAKERS: Mapping[str, Callable[[str, int, int, Haystack, Count], Task]] = {
    "ruler": ruler.make_task,
    **{suite: generator.make_task for suite, generator in _GENERATED.items()},
}
SUITES = tuple(_NAMES)
WORLD = 2**32  # the number of no sample: it seeds the world that built-in questions are about


@dataclasses.dataclass(frozen=True)
class SuiteSources:
    """What the tasks are made from. Paths may be local or gs:// URLs; "" is not given.

    `text` fills a haystack: "stdlib" (documentation strings of the installed Python), or
    "noise", or a text file or folder. Where RULER's qa_1 and qa_2 have no SQuAD or HotpotQA
    file, they ask the built-in questions of `invented.synthetic_corpus`.
    """

    count: Count  # tokens of a text
    text: str = "stdlib"
    hotpotqa: str = ""
    squad: str = ""
    warn: Callable[[str], None] = warnings.warn  # is told how many questions a file cannot ask

    @functools.cached_property
    def haystack(self) -> haystack.Haystack:
        if self.text == "stdlib":
            return haystack.stdlib_prose()
        if self.text == "noise":
            return haystack.noise()
        return haystack.text_files([self.text])

    @functools.cached_property
    def _hotpotqa(self) -> Corpus:
        return self._told(hotpotqa.read(self.hotpotqa), self.hotpotqa)

    @functools.cached_property
    def _squad(self) -> Corpus:
        return self._told(squad.read(self.squad), self.squad)

    def _told(self, corpus: Corpus, path: str) -> Corpus:
        for why, count in corpus.dropped.items():
            if count:
                total = count + len(corpus.questions)
                self.warn(f"left out: {count:,} of {total:,} questions of {path}: {why}")
        return corpus

    def corpus(self, suite: str, name: str, seed: int) -> Corpus:
        """Returns the questions of a task of `ruler` or `ruler-qa`.

        Built-in ones are about a world that belongs to the task and the seed alone.
        """
        if name in ("qa_1", "squad") and self.squad:
            return self._squad
        if name in ("qa_2", "hotpotqa") and self.hotpotqa:
            return self._hotpotqa
        if suite == "ruler" or name == BUILT_IN_QA:
            return _world(_sample_seed(seed, f"{suite}/{name}", WORLD))
        raise ValueError(
            f"{suite}/{name} asks the questions of a file; give it with --{name}, or ask the "
            f"built-in ones with --tasks {BUILT_IN_QA}"
        )


def names(suite: str, wanted: Sequence[str], sources: SuiteSources) -> tuple[str, ...]:
    """Returns the tasks of a suite, or those of them that are `wanted`.

    Unasked, `ruler-qa` is made from the files that are given, or else from built-in
    questions. Raises ValueError for a suite or task that there is not, naming those that
    there are.
    """
    if suite not in _NAMES:
        raise ValueError(f"there is no suite {suite!r}; use one of {', '.join(SUITES)}")
    for name in wanted:
        if name not in _NAMES[suite]:
            raise ValueError(
                f"suite {suite} has no task {name!r}; its tasks are {', '.join(_NAMES[suite])}"
            )
    if wanted:
        return tuple(name for name in _NAMES[suite] if name in wanted)
    if suite != "ruler-qa":
        return _NAMES[suite]
    given = [name for name in ("hotpotqa", "squad") if getattr(sources, name)]
    return tuple(given) or (BUILT_IN_QA,)


def make(
    suite: str, names: Sequence[str], length: int, numbers: Iterable[int], seed: int,
    sources: SuiteSources,
) -> Iterator[Task]:  # fmt: skip
    """Makes the samples `numbers` of tasks, documents of `length` tokens or up to 2% fewer.

    Raises Unreachable where a task cannot have the length, and ValueError where there are
    too few questions.
    """
    members = [
        (name, number, _sample_seed(seed, f"{suite}/{name}", number))
        for number in numbers
        for name in names
    ]
    if suite == "stories":  # documents tell of all kinds
        told = [(name, own) for name, _, own in members]
        yield from stories.make_samples(told, seed, length, sources.haystack, sources.count)
        return
    for name, number, own in members:
        if suite in _MAKERS and name not in RULER_QA:
            yield _MAKERS[suite](name, own, length, sources.haystack, sources.count)
        else:
            corpus, source = sources.corpus(suite, name, seed), f"{suite}/{name}"
            yield questions.make_task(corpus, number, own, length, sources.count, source)


def by_length(
    suite: str,
    wanted: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    sources: SuiteSources,
    on_task: Callable[[Task], None],
) -> tuple[dict[int, list[Task]], list[Unreachable]]:
    """Makes `samples` of each of the tasks `wanted` at each length that it can have.

    A task that cannot have a length does not stop the others: why it cannot is returned, too.
    Raises the first of those if nothing at all is left, ValueError as `make`, and what `on_task`
    raises of each as it is made.
    """
    made: dict[int, list[Task]] = {}
    left_out: list[Unreachable] = []
    together = [wanted] if suite == "stories" else [(name,) for name in wanted]
    for length, names in itertools.product(lengths, together):
        tasks = []
        try:
            for task in make(suite, names, length, range(samples), seed, sources):
                tasks.append(task)
                on_task(task)
        except Unreachable as problem:
            left_out.append(problem)
            continue
        made.setdefault(length, []).extend(tasks)
    if left_out and not made:
        raise left_out[0]
    return made, left_out


def make_of_paragraphs(
    name: str, paragraphs: int, numbers: Iterable[int], seed: int, sources: SuiteSources
) -> Iterator[Task]:
    """Makes samples of a `ruler-qa` task by paragraphs, as the published figures count."""
    source = f"ruler-qa/{name}"
    for number in numbers:
        own = _sample_seed(seed, source, number)
        pool = sources.corpus("ruler-qa", name, seed)
        yield questions.make_task_of_paragraphs(pool, number, own, paragraphs, source)


def unaided(
    suite: str, name: str, numbers: range, seed: int, sources: SuiteSources
) -> Iterator[tuple[int, Task]]:
    """Yields those of the questions `numbers` that there are, over a document of no text.

    Raises ValueError for a task whose questions cannot be known without its document.
    """
    if suite != "ruler-qa" and name not in RULER_QA:
        raise ValueError(f"nobody knows the answers of {suite}/{name} without its document")
    pool = sources.corpus(suite, name, seed)
    for number in range(numbers.start, min(numbers.stop, len(pool.questions))):
        paragraphs = len(pool.questions[number].gold)
        source = f"{suite}/{name}"
        task = questions.make_task_of_paragraphs(pool, number, 0, paragraphs, source)
        yield number, dataclasses.replace(task, document=TextDocument(""), evidence=())


@functools.lru_cache(maxsize=4)
def _world(seed: int) -> Corpus:
    return invented.synthetic_corpus(seed)


def _sample_seed(seed: int, name: str, number: int) -> int:
    parts = [seed, zlib.crc32(name.encode()), number]
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
