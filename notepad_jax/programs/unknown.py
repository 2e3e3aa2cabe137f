"""The filter of closed-book questions: those that a reader cannot answer without the document."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from notepad_jax import waiting
from notepad_jax.eval.measure import Item, measure
from notepad_jax.eval.methods import NOTEPAD
from notepad_jax.programs import measuring, subjects
from notepad_jax.reading.loop import Reader
from notepad_jax.setup import builders, eval_jobs
from notepad_jax.setup.config.whole import Config
from notepad_jax.tasks import suites
from notepad_jax.telemetry.identity import write_json
from notepad_jax.telemetry.screen import Screen

ASKED_AT_ONCE = 256  # questions put to the reader between two looks at what is left


def unknown_numbers(
    config: Config,
    folder: Path,
    name: str,
    sources: suites.SuiteSources,
    reader: subjects.Subject,
    screen: Screen,
) -> list[int]:
    """Returns as `unknown`, asked once for a folder: all its files hold the same questions."""
    path = folder / f"unknown-{name}.json"
    if not path.is_file():
        write_json(path, waiting.run(unknown(config, name, sources, reader, screen)))
    return json.loads(path.read_text(encoding="utf-8"))


async def unknown(
    config: Config,
    name: str,
    sources: suites.SuiteSources,
    subject: subjects.Subject,
    screen: Screen,
) -> list[int]:
    """Returns the numbers of the first questions that the reader never answers unaided.

    Each is asked `evaluate.repeats` times; one right answer and it is known. ValueError if
    the questions come to an end before there are as many samples, or a request fails.
    """
    e, rules = config.evaluate, builders.rules(config.reading)
    samples = eval_jobs.samples_of(config)
    found: list[int] = []
    bar = screen.bar(f"asking {subject.name} without a document", samples, "unknown")
    async with subject.opened(rules) as completer:
        reader = Reader(
            completer, subject.tokenizer, subject.template, rules,
            measuring.sampling(config, subject), lambda task: (), e.at_once,
        )  # fmt: skip
        for first in itertools.count(0, ASKED_AT_ONCE):
            numbers = range(first, first + ASKED_AT_ONCE)
            batch = dict(suites.unaided(e.suite, name, numbers, config.seed, sources))
            if not batch:
                raise ValueError(
                    f"{subject.name} does not know {len(found)} of the {first} questions of "
                    f"{name}; ask for as many --samples at most, or use a larger file"
                )
            items = [Item(t, NOTEPAD, 0, k) for t in batch.values() for k in range(e.repeats)]
            results = await measure(items, reader)
            if failed := [r for r in results if r.failed]:
                raise ValueError(
                    f"{len(failed)} of {len(results)} questions got no answer, so it is not known "
                    f"whether they are known; try again ({failed[0].problem})"
                )
            right = {r.task_id for r in results if r.correct > 0}
            left = [number for number, task in batch.items() if task.id not in right]
            bar.advance(min(len(left), samples - len(found)))
            found += left
            if len(found) >= samples:
                bar.finish()
                return found[:samples]
