"""The names, numbers and people of a memory task's story, drawn from its seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from notepad_jax.tasks.draws import one_by_one
from notepad_jax.tasks.recipe import Sample


@dataclasses.dataclass(frozen=True)
class Cast:
    """The seeded source of a story's chances, names, numbers and people: one sample's own."""

    rng: np.random.Generator
    names: Iterator[str]
    numbers: Iterator[str]
    people: Iterator[str]

    def depth(self) -> float:
        return float(self.rng.random())

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def one_of(self, choices: Sequence[str]) -> str:
        return choices[int(self.rng.integers(len(choices)))]


def casting(sample: Sample) -> Cast:
    """Returns the cast of one sample."""
    draws, held = sample.draws, sample.haystack.holds
    return Cast(
        rng=sample.rng,
        names=one_by_one(draws.names, held),
        numbers=one_by_one(draws.numbers, held),
        people=one_by_one(draws.people, held),
    )
