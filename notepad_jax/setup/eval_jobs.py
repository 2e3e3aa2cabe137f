"""The jobs of an evaluation, and the tasks of each length that they are made of.

A suite gives the tasks; the suite `synthetic` asks about documents that training never
draws, and reads the training length exactly as in training. A job is one method at one
length, with every question and its repeats. Nothing is written or read here: tasks are
recipes until a job reads them. Above: evaluate, quickstart and build; below:
tasks.suites and eval.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from notepad_jax.data import formats
from notepad_jax.data.admission import RowCounts
from notepad_jax.data.sources import is_remote
from notepad_jax.eval import methods
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.eval.measure import Item
from notepad_jax.near import meant
from notepad_jax.reading.rules import Rules
from notepad_jax.setup import builders
from notepad_jax.setup.config.asking import MadeKeys, SourceKeys
from notepad_jax.setup.config.reading import DataKeys
from notepad_jax.setup.config.whole import Config
from notepad_jax.setup.task_stream import TRAINING_DOCUMENTS
from notepad_jax.starter.mixed import make_tasks
from notepad_jax.tasks import file_suite, ruler, suites
from notepad_jax.telemetry.screen import Screen
from notepad_jax.types import Task

TasksByLength = dict[int, list[Task]]

SYNTHETIC = "synthetic"
HELD_OUT = TRAINING_DOCUMENTS.stop  # document seeds from here on are never trained on
LONG = 2**20  # tokens from which on the synthetic suite asks fewer questions
# Published benchmarks whose answers a model judges, and here a metric, unless `evaluate.reward`
# names a model that judges (it sees the question, the gold answers and `Task.extra`).
BY_A_MODEL = {  # what a source begins with: the benchmark
    "longmemeval/": "LongMemEval",
    "beam/": "BEAM",
    "memory_agent_bench/longmemeval": "MemoryAgentBench's LongMemEval",
    "memory_agent_bench/infbench_sum": "MemoryAgentBench's InfBench-sum",
}


@dataclasses.dataclass(frozen=True)
class EvalJob:
    """A job of an evaluation: one method at one length."""

    method: str
    length: int
    rules: Rules
    items: tuple[Item, ...]

    @property
    def turns(self) -> int:
        """Those of a reading, about: a file's documents may be shorter than it says."""
        chunks = -(-self.length // self.rules.chunk_size) if self.method == methods.NOTEPAD else 0
        return chunks + 1


def tasks_of_length(config: Config, length: int) -> list[Task]:
    """Makes the questions about documents of `length` tokens; the same for every policy."""
    e, long = config.evaluate, length >= LONG
    wanted, each = (
        (e.questions_longest, e.questions_per_longest)
        if long
        else (e.questions, e.questions_per_document)
    )
    return synthetic(config.seed, length, e.data, wanted, each)


def synthetic(
    seed: int, length: int, data: DataKeys | MadeKeys, wanted: int, each: int
) -> list[Task]:
    """Makes `wanted` questions about documents of `length` tokens, `each` about one of them."""
    # A short document has no room for the facts of many questions among its other sentences.
    each = min(each, wanted, max(1, length // 256))
    tasks: list[Task] = []
    for number in range(-(-wanted // each)):
        its_own = {"tokens": length, "questions": min(each, wanted - len(tasks))}
        tasks += make_tasks(HELD_OUT + (seed * 1009 + number) % HELD_OUT, **(vars(data) | its_own))
    return tasks


def lengths_of(config: Config) -> list[int]:
    """Returns the lengths that are asked for, in tokens, each once.

    None are named: of a suite that is made here the usual ones, of a file none, which is all.
    """
    e = config.evaluate
    names = e.lengths or (() if is_file(e.suite) else e.usual_lengths)
    return list(dict.fromkeys(parse_length(name) for name in names))


def samples_of(config: Config) -> int:
    """Returns how many questions are made of each task and length; of a file: taken, 0 is all."""
    e = config.evaluate
    samples = e.samples or (0 if is_file(e.suite) else e.usual_samples)
    if samples < 1 and not is_file(e.suite):
        raise ValueError(f"there are {samples} samples of each task to be made; ask for 1 or more")
    return samples


def is_file(suite: str) -> bool:
    """Whether a suite is a file or folder of tasks, and not made here."""
    return suite not in (SYNTHETIC, *suites.SUITES)


def existing(suite: str) -> str:
    """Returns the path of a suite that is a file or folder; ValueError if there is none."""
    if is_remote(suite) or (suite and Path(suite).exists()):
        return suite
    if Path(suite).suffix.lstrip(".").lower() in formats.FORMS:
        raise ValueError(f"{suite} is missing")
    known = (SYNTHETIC, *suites.SUITES)
    near = meant(suite, known, "give a suite's name or the path of a task file")
    raise ValueError(f"there is no suite {suite!r} (there are {', '.join(known)}); {near}")


def tasks_of(
    config: Config, lengths: Sequence[int], count: suites.Count, screen: Screen,
    admit: Callable[[Task], None] = lambda task: None,
) -> TasksByLength:  # fmt: skip
    """Returns the tasks of the config's suite at each length; recipes, not yet texts.

    A suite takes minutes to make, so `admit` is given each task as it is made, to refuse it. Of a
    file, those of all lengths if none is given; a Fault of `admit` leaves a task of it out. What of
    it is not read is said.
    A task that a length does not suit is left out there, with a warning.
    """
    e = config.evaluate
    if e.suite == SYNTHETIC:
        return {length: tasks_of_length(config, length) for length in lengths}
    if config.sources is None:
        raise ValueError(f"suite {e.suite} needs a config with `sources`: --config ruler, or none")
    samples = samples_of(config)
    if is_file(e.suite):
        return _of_file(config, lengths, samples, count, screen, admit)
    return of_suite(
        e.suite, e.tasks, lengths, samples, config.seed, config.sources, count, screen, admit
    )


def of_suite(
    suite: str, tasks: Sequence[str], lengths: Sequence[int], samples: int, seed: int,
    sources: SourceKeys, count: suites.Count, screen: Screen, admit: Callable[[Task], None],
) -> TasksByLength:  # fmt: skip
    """Returns `samples` of each of a suite's tasks (of all, if none is named) at each length.

    `admit` as in `tasks_of`.
    """
    made_of = suites.SuiteSources(count, **vars(sources), warn=screen.warn)
    names = suites.names(suite, tasks, made_of)
    bar = screen.bar(f"making {suite}", len(lengths) * len(names) * samples, "tasks")

    def on_task(task: Task) -> None:
        admit(task)
        bar.advance()

    found, left_out = suites.by_length(suite, names, lengths, samples, seed, made_of, on_task)
    bar.finish()
    for problem in left_out:
        screen.warn(f"left out: {problem}")
    return found


def _of_file(
    config: Config, lengths: Sequence[int], samples: int, count: suites.Count, screen: Screen,
    admit: Callable[[Task], None],
) -> TasksByLength:  # fmt: skip
    e = config.evaluate
    bar = screen.bar(f"opening {Path(e.suite).name}", None, "rows")
    admission = RowCounts()
    found = file_suite.read(
        existing(e.suite), lengths, e.tasks, samples, count, bar.advance, admission.leave_out, admit
    )
    bar.finish()
    for line in admission.lines(found.rows):
        screen.warn(line)
    for problem in found.damaged:
        screen.warn(f"not read, and not asked for by --tasks: {problem}")
    if found.elsewhere:
        names = ", ".join(map(format_length, sorted(lengths)))
        screen.warn(
            f"{found.elsewhere:,} of {found.rows:,} rows are left out: they have none of the "
            f"lengths {names}; leave out --lengths to read all"
        )
    every = itertools.chain(*found.tasks.values())
    for line in judged_by_a_model((task.source, task.metric) for task in every):
        screen.say(line)
    bands = "; ".join(f"{format_length(n)}: {len(own):,}" for n, own in found.tasks.items())
    screen.say(f"{found.rows:,} rows of {e.suite}, questions by length: {bands}")
    return dict(found.tasks)


def judged_by_a_model(found: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each benchmark that (source, metric) of tasks belong to."""
    used: dict[str, set[str]] = {}
    for source, metric in found:
        for beginning, benchmark in BY_A_MODEL.items():
            if source.startswith(beginning):
                used.setdefault(benchmark, set()).add(metric)
    return [
        f"{benchmark} is judged by a model as published, and here by {' and '.join(sorted(own))}: "
        f"not comparable with its figures; --config.evaluate.reward names a judge of yours"
        for benchmark, own in used.items()
    ]


def jobs(config: Config, tasks: TasksByLength) -> list[EvalJob]:
    """Returns what is to be read: every method at every length."""
    e = config.evaluate
    limited = e.ruler_limits
    limits = builders.rules(config.reading)
    found = []
    several = itertools.product(dict.fromkeys(e.methods), sorted(tasks.items()))
    for method, (length, of_length) in several:
        first = {id(task.document): task.id for task in reversed(of_length)}
        items = (
            Item(
                task, method, length, k,
                ruler.answer_tokens(task.source) if limited else None,
                first[id(task.document)],
            )
            for task in of_length
            for k in range(e.repeats)
        )  # fmt: skip
        size = e.chunk_size if method == methods.NOTEPAD else e.context
        if method == methods.NOTEPAD and e.suite == SYNTHETIC and length <= config.data.tokens:
            size = config.reading.chunk_size
        rules = dataclasses.replace(limits, chunk_size=size)
        found.append(EvalJob(method, length, rules, tuple(items)))
    return found
