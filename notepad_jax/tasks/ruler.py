"""RULER's task generator, at any length: eleven of its thirteen (qa_* need question files).

RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3) asks a reader to find needles, follow
chains of assignments, and count words. The difficulty parameters here are those of its
published configuration; the sentences, the questions and the word lists are ours, so scores
follow the same axes and are not the same numbers. For those, read the files that NVIDIA's own
scripts write. Throughout, our documents differ from RULER's in this: no worked example comes
before the question, the length is the document's alone, and facts stand anywhere, uniformly;
docs/evaluation.md lists every difference.

| task | haystack | hidden | asked for |
|---|---|---|---|
| niah_single_1 | noise | a name and its number | the number |
| niah_single_2 | prose | a name and its number | the number |
| niah_single_3 | prose | a name and its UUID | the UUID |
| niah_multikey_1 | prose | 4 names with a number each | one of the numbers |
| niah_multikey_2 | other names with numbers | a name and its number | the number |
| niah_multikey_3 | other UUIDs with UUIDs | a UUID and its UUID | the second UUID |
| niah_multivalue | prose | a name and 4 numbers, one a sentence | all 4 |
| niah_multiquery | prose | 4 names with a number each | all 4 |
| vt | noise | 1 chain of 5 registers, 4 hops | the registers that hold the value |
| cwe | none | a list: 10 words 30 times each, the others 3 (below 4,096 tokens 6 and 1) | the 10 |
| fwe | none | coded words, the k-th most frequent in proportion to k**-2 | numbers 2 to 4 |

Names are three words instead of RULER's two, so that 3.5M tokens of them repeat none. One
seed has the same facts at the same depths at every length: lengths can be compared in pairs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np

from notepad_jax.tasks import recipe, word_counts
from notepad_jax.tasks.draws import Exhausted, SampleDraws, one_by_one
from notepad_jax.tasks.haystack import Count, Haystack, noise
from notepad_jax.tasks.recipe import Fact, Sample, Story
from notepad_jax.types import Document, Evidence, Task

# RULER's limits of an answer, in tokens, by the first part of a task's name.
ANSWER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
HOPS = 4  # of vt: 5 registers hold the value

_REGISTER_LETTERS = 5
_HOW_MANY = {4: "four", 5: "five"}

Made = tuple[Document, str, tuple[str, ...], tuple[Evidence, ...]]  # question, answers between


@dataclasses.dataclass(frozen=True)
class Needles:
    """The difficulty of a needle task in noise or prose, in RULER's terms."""

    prose: bool  # the haystack given, or noise
    uuids: bool  # values are UUIDs, or numbers of seven digits
    names: int = 1
    values: int = 1  # of each name
    asked: int = 1  # names in the question

    @property
    def facts(self) -> int:
        return self.names * self.values


NEEDLES: Mapping[str, Needles] = {
    "niah_single_1": Needles(prose=False, uuids=False),
    "niah_single_2": Needles(prose=True, uuids=False),
    "niah_single_3": Needles(prose=True, uuids=True),
    "niah_multikey_1": Needles(prose=True, uuids=False, names=4),
    "niah_multivalue": Needles(prose=True, uuids=False, values=4),
    "niah_multiquery": Needles(prose=True, uuids=False, names=4, asked=4),
}


def number_fact(name: str, number: str) -> str:
    return f"A number that belongs to {name} is {number}."


def uuid_fact(name: str, uuid: str) -> str:
    return f"An identifier that belongs to {name} is {uuid}."


def answer_tokens(source: str) -> int | None:
    """Returns RULER's limit of an answer to a task of the source "ruler/NAME"; None of others."""
    family, _, name = source.partition("/")
    return ANSWER_TOKENS.get(name.partition("_")[0]) if family == "ruler" else None


def make_task(name: str, seed: int, length: int, haystack: Haystack, count: Count) -> Task:
    """Makes one sample of a task: a document of `length` tokens by `count`, and its question.

    `seed` (0 or more) alone says which sample: names, values, depths, and where in the
    haystack the document begins. `haystack` is what the tasks with prose hide in; the
    others do without. The document has more than 0.98 `length` and at most `length` tokens
    by any `count` that is additive over words: counters of words, sentencepiece, byte-level
    BPE (for whose first word, which has no space before it, two tokens are kept free).
    Give one and the same `count` for many samples: what it counts of a haystack is kept.

    Raises Unreachable, naming the task and the length, where the length cannot be reached;
    ValueError for an unknown task, a negative seed, or a `count` that is not additive.
    """
    if name not in NAMES:
        raise ValueError(f"RULER has no generated task {name!r}; there are {', '.join(NAMES)}")
    task = f"ruler/{name}"
    sample = recipe.sample(task, seed, length, haystack, count)
    try:
        document, question, answers, evidence = _TASKS[name](sample)
    except Exhausted as problem:
        raise recipe.Unreachable(
            f"{task} cannot be {length:,} tokens long: {problem}; ask for fewer tokens"
        ) from None
    return Task(
        id=f"ruler-{name}-{length}-{seed}",
        question=question,
        document=document,
        answers=answers,
        source=task,
        metric="ruler_all",
        evidence=evidence,
    )


def _needles(needles: Needles, sample: Sample) -> Made:
    haystack = sample.haystack if needles.prose else noise()
    opening, *depths = sample.rng.random(1 + needles.facts).tolist()
    return _hidden(needle_story(needles, sample.draws, depths, haystack.holds), haystack, opening,
                   sample)  # fmt: skip


def needle_story(
    needles: Needles, draws: SampleDraws, depths: Sequence[float], avoid: Callable[[str], bool]
) -> Story:
    """Tells of needles at the `depths`, of which there are `needles.facts`."""
    draw = draws.uuids if needles.uuids else draws.numbers
    fact = uuid_fact if needles.uuids else number_fact
    names = tuple(islice(one_by_one(draws.names, avoid), needles.names))
    values = tuple(islice(one_by_one(draw, avoid), needles.facts))
    answers = values[: needles.asked * needles.values]
    facts = []
    for i, (depth, value) in enumerate(zip(depths, values, strict=True)):
        name, wanted = names[i // needles.values], value in answers
        shown, note = (value, f"{name} is {value}") if wanted else ("", "")
        facts.append(Fact(depth, fact(name, value), shown, note))
    kind = "identifier" if needles.uuids else "number"
    question = _question(kind, names[: needles.asked], len(answers))
    return Story(facts, question, answers, "ruler_all")


def _hidden(story: Story, haystack: Haystack, opening: float, sample: Sample) -> Made:
    document, evidence = recipe.hide(
        sample.task, story.facts, haystack, opening, sample.length, sample.count
    )
    return document, story.question, story.answers, evidence


def _among_needles(
    draw: Callable[[SampleDraws, int, int], list[tuple[str, str]]],
    fact: Callable[[str, str], str],
    kind: str,
    sample: Sample,
) -> Made:
    """One fact among facts of its own kind and nothing else."""
    [(name, value)] = draw(sample.draws, 0, 1)
    document, evidence = recipe.hide_among(
        sample.task,
        [Fact(float(sample.rng.random()), fact(name, value), value)],
        functools.partial(_facts_after_the_first, draw, fact, sample.draws),
        sample.length,
        sample.count,
    )
    return document, _question(kind, (name,), 1), (value,), evidence


def _facts_after_the_first(
    draw: Callable[[SampleDraws, int, int], list[tuple[str, str]]],
    fact: Callable[[str, str], str],
    draws: SampleDraws,
    start: int,
    stop: int,
) -> list[str]:
    return [fact(name, value) for name, value in draw(draws, start + 1, stop + 1)]


def _names_and_numbers(draws: SampleDraws, start: int, stop: int) -> list[tuple[str, str]]:
    indices = np.arange(start, stop)
    return list(zip(draws.names(indices), draws.numbers(indices), strict=True))


def _uuids_and_uuids(draws: SampleDraws, start: int, stop: int) -> list[tuple[str, str]]:
    uuids = draws.uuids(np.arange(2 * start, 2 * stop))
    return list(zip(uuids[::2], uuids[1::2], strict=True))


def _question(kind: str, names: tuple[str, ...], values: int) -> str:
    if values == 1:
        return f"What {kind} belongs to {names[0]}? Answer with the {kind} alone."
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return (
        f"Which {kind}s belong to {listed}? "
        f"Answer with all {_HOW_MANY[values]} {kind}s, separated by commas."
    )


def _variables(sample: Sample) -> Made:
    opening, *depths = sample.rng.random(2 + HOPS).tolist()
    return _hidden(chain_story(sample.draws, depths), noise(), opening, sample)


def chain_story(draws: SampleDraws, depths: Sequence[float]) -> Story:
    """A chain: a register is given a value, the next one the value of that register, ..."""
    registers = draws.coded(np.arange(HOPS + 1), _REGISTER_LETTERS)
    registers = tuple(register.upper() for register in registers)
    value = int(draws.numbers(np.arange(1))[0]) % 90_000 + 10_000
    sources = (f"value {value}", *(f"value of register {register}" for register in registers))
    facts = [
        Fact(depth, f"Register {register} is given the {source}.", register)
        for depth, register, source in zip(sorted(depths), registers, sources, strict=False)
    ]
    question = (
        f"Which registers hold the value {value} once the whole text has been read? "
        f"Answer with the names of all {_HOW_MANY[HOPS + 1]} registers, separated by commas."
    )
    return Story(facts, question, registers, "ruler_all")


def _common_words(sample: Sample) -> Made:
    document, words = word_counts.common_words(
        sample.task, sample.draws, sample.length, sample.count
    )
    question = (
        "The text is a numbered list of words. Which ten words stand in it most often? "
        "Answer with the ten words, separated by commas."
    )
    return document, question, words, ()


def _frequent_words(sample: Sample) -> Made:
    document, words = word_counts.frequent_words(
        sample.task, sample.draws, sample.length, sample.count
    )
    question = (
        "The text consists of coded words with dots in between. Leaving out the dots, which "
        "three coded words stand in it most often? Answer with the three words, separated by "
        "commas."
    )
    return document, question, words, ()


_TASKS: Mapping[str, Callable[[Sample], Made]] = {
    "niah_single_1": functools.partial(_needles, NEEDLES["niah_single_1"]),
    "niah_single_2": functools.partial(_needles, NEEDLES["niah_single_2"]),
    "niah_single_3": functools.partial(_needles, NEEDLES["niah_single_3"]),
    "niah_multikey_1": functools.partial(_needles, NEEDLES["niah_multikey_1"]),
    "niah_multikey_2": functools.partial(_among_needles, _names_and_numbers, number_fact, "number"),
    "niah_multikey_3": functools.partial(_among_needles, _uuids_and_uuids, uuid_fact, "identifier"),
    "niah_multivalue": functools.partial(_needles, NEEDLES["niah_multivalue"]),
    "niah_multiquery": functools.partial(_needles, NEEDLES["niah_multiquery"]),
    "vt": _variables,
    "cwe": _common_words,
    "fwe": _frequent_words,
}
NAMES = tuple(_TASKS)
