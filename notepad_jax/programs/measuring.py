"""The readings of an evaluation, made in this process: a subject opened, and read job by job.

`here` is what an evaluation reads with, and each of its worker processes, too (`eval_workers`).
Above: evaluate, eval_workers and `reader`; below: subjects, setup and eval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from notepad_jax.eval import methods
from notepad_jax.eval.measure import EvalProgress, Item, Judge, Result, measure
from notepad_jax.eval.readings import OpenTrace
from notepad_jax.programs.subjects import Subject
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.turns import Turns
from notepad_jax.rollout import rewards
from notepad_jax.setup import builders
from notepad_jax.setup.config.whole import Config
from notepad_jax.text.chunks import Documents
from notepad_jax.text.pieces import Pieces

REWARD = "evaluate.reward"

# Measures some items of a job, and calls back as they go on.
Measured = Callable[[Sequence[Item], Callable[[EvalProgress], None]], Coroutine[Any, Any, Any]]


class Keeps(Protocol):
    """Where readings go as they are made (`eval.readings.Readings`)."""

    def trace_of(self, item: Item) -> OpenTrace:
        """Returns the trace of a reading that begins now."""

    def add(self, result: Result) -> None:
        """Takes a reading that has ended."""


def sampling(config: Config, reader: Subject) -> TurnSampling:
    """Returns the sampling of an evaluation; each reading gets a seed of its own from it."""
    e = config.evaluate
    return TurnSampling(e.temperature, e.top_p, reader.template.stop_ids, config.seed)


def judge_of(config: Config) -> Judge | None:
    """Returns the judge in a metric's place, a user's reward; ValueError for an unknown name."""
    said = config.evaluate.reward
    return rewards.of(said, REWARD).worth if said else None


def within(config: Config, subject: Subject, limits: Rules) -> Rules:
    """Returns the rules of readings within `limits`: with the config's memory rule."""
    update = builders.rules(config.reading, subject.tokenizer).memory_update
    return dataclasses.replace(limits, memory_update=update)


def turns_of(config: Config, subject: Subject, limits: Rules) -> Callable[[], Turns]:
    """Returns what makes the recorder of all turns of a reading within `limits`."""
    rules = within(config, subject, limits)
    return functools.partial(Turns, Pieces(subject.tokenizer), rules, subject.template)


@contextlib.asynccontextmanager
async def here(
    config: Config, subject: Subject, readings: Keeps, on_failure: Callable[[Exception], None],
    at_once: int | None, limits: Rules,
) -> AsyncIterator[Measured]:  # fmt: skip
    """Opens the subject for readings within `limits`, `at_once` at a time (None: all)."""
    tokenizer, template = subject.tokenizer, subject.template
    rules = within(config, subject, limits)
    excerpts = methods.Excerpts(tokenizer, config.evaluate.context)
    chunks_of = Documents(tokenizer, rules.chunk_size, chunk_ends=rules.chunk_ends)
    judge = judge_of(config)
    async with subject.opened(rules) as completer:
        reader = Reader(
            completer, tokenizer, template, rules, sampling(config, subject), chunks_of, at_once
        )
        yield lambda items, on_progress: measure(
            items, reader, on_progress, excerpts, readings.trace_of, readings.add, on_failure, judge
        )
