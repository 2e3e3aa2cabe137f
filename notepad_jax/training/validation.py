"""Validation while a run trains: held-out tasks read every so many steps, by the run's own engine.

The agent, the rules and the engine are those of training, the measuring is that of `eval`; so
what the curve shows is what an evaluation will find. Tasks come from a suite (other questions
than `eval` asks), from files of their own, or from what is held out of the training files. Noise
belongs to the reading, and the engine forgets what it read, so a run that validates trains as
one that does not. Several processes take a share each.

What was found is a line of metrics.jsonl, and part of the next checkpoint: a run that goes on
knows it, and makes only a validation that was cut off anew. The best step is marked beside the
checkpoints (`checkpoint.best`). Above: train; below: eval_jobs, task_stream and eval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from notepad_jax.checkpoint.best import Best
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.data import formats, held_out
from notepad_jax.data.admission import RowCounts
from notepad_jax.data.rows import Pair
from notepad_jax.eval import methods, readings, summary
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.eval.measure import EvalProgress, Item, Judge, Result, check, check_task, measure
from notepad_jax.parallel import hosts
from notepad_jax.reading import shares
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.rollout import rewards
from notepad_jax.rollout.rewards import Scoring
from notepad_jax.setup import builders, eval_jobs, task_stream
from notepad_jax.setup.config.asking import SourceKeys
from notepad_jax.setup.config.whole import Training
from notepad_jax.setup.stopping import Stop
from notepad_jax.setup.task_stream import TaskStream
from notepad_jax.tasks import file_suite, suites
from notepad_jax.telemetry.screen import Screen
from notepad_jax.text.chunks import Documents
from notepad_jax.text.tokenizer import Tokenizer, counter
from notepad_jax.types import Task

SCORE = "validation/score"  # over all questions; and SCORE_2K, ... by length
OTHER_QUESTIONS = 2**19  # between the seeds of `eval` and those of validation
ABOUT_ONE = 4  # questions about a synthetic document


@dataclasses.dataclass
class Validation:
    """The validations of a run: the held-out items, and the scores so far."""

    every: int  # steps; 0: never
    steps: int  # of the run: the last is validated, too
    patience: int  # validations without a better one, after which a run ends; 0: none
    items: Sequence[Item] = ()
    reader: Reader | None = None
    judge: Judge | None = None  # of an answer; None: each task's metric
    reward: str = ""  # by which it judges, as a config says it
    found: list[Best] = dataclasses.field(default_factory=list)  # by step
    begun_anew: bool = False  # what an earlier process found was of other tasks

    def due(self, step: int) -> bool:
        return self.every > 0 and (step % self.every == 0 or step == self.steps)

    @property
    def best(self) -> Best | None:
        """The earliest of the steps that scored highest."""
        return max(self.found, key=lambda one: (one.score, -one.step), default=None)

    @property
    def without_better(self) -> int:
        """Validations since the best one."""
        return sum(one.step > self.best.step for one in self.found)

    @property
    def exhausted(self) -> bool:
        return 0 < self.patience <= self.without_better

    @property
    def ending(self) -> str:
        """The message for a run that is `exhausted`."""
        return (
            f"step {self.found[-1].step} is the last: {self.patience} validations brought nothing "
            f"better than step {self.best.step} (validation.patience)"
        )

    # ------------------------------------------------------------ one validation

    async def measure(self, step: int, stop: Stop, screen: Screen) -> dict[str, float]:
        """Reads all items with what the engine holds; raises Stopped if told to stop."""
        tasks, lengths = zip(*((item.task, item.length) for item in self.items), strict=True)
        dealt = shares.whole_documents(tasks, lengths, hosts.count())
        own = [self.items[number] for number in dealt[hosts.index()]]
        with _progress(step, len(own), screen) as on_progress:
            measuring = await stop.until(measure(own, self.reader, on_progress, judge=self.judge))
        stop.check_all(f"in the validation of step {step}, which is made again")
        every = hosts.all_gather(lambda: list(map(readings.told, measuring.result())))
        results = [readings.understood(fields) for part in every for fields in part]
        return _metrics(sorted(results, key=lambda result: result.key))

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.found.append(Best(step, metrics[SCORE]))

    def mark(self, checkpoints: Checkpoints) -> None:
        """Marks the best step so far among a run's steps."""
        checkpoints.mark(self.best)

    # ------------------------------------------------------------ in a checkpoint

    def saved(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps; {} where nothing is validated."""
        if not self.every:
            return {}
        done = [[one.step, one.score] for one in self.found]
        return {"validation": {"tasks": self.digest(), "found": done}}

    def restored(self, data: Mapping[str, Any], screen: Screen) -> bool:
        """Takes up what a checkpoint kept; False where it was of other tasks, which a line says."""
        kept = data.get("validation") or {}
        if not self.every or not kept:
            return False
        if kept["tasks"] != self.digest():
            screen.warn("validation reads other tasks than before, so its curve begins anew")
            self.begun_anew = True
            return False
        self.found = [Best(step, score) for step, score in kept["found"]]
        return True

    def digest(self) -> str:
        """A digest of what is read and how; scores of one digest may be compared."""
        told = [self.reader.sampling.temperature, self.reader.sampling.top_p]
        told += [(item.key, item.task.question, item.task.answers) for item in self.items]
        told += [self.reward] if self.reward else []
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _progress(step: int, readings: int, screen: Screen) -> Iterator[Callable[[EvalProgress], None]]:
    bar = screen.bar(f"validating step {step}", readings, "readings")
    before = 0

    def on_progress(now: EvalProgress) -> None:
        nonlocal before
        bar.advance(now.done - before)
        before = now.done

    try:
        yield on_progress
    finally:
        bar.finish()


def items(config: Training, stream: TaskStream, tokenizer: Tokenizer, screen: Screen) -> list[Item]:
    """Returns the held-out items that a run reads at each validation.

    Raises ValueError for tasks that cannot be had, and for questions that are too long.
    """
    v = config.validation
    if not v or not v.every:
        return []
    limits = {"tokenizer": tokenizer, "max_question": config.reading.max_question}
    admit = functools.partial(check_task, **limits)
    made = _tasks(config, stream, counter(tokenizer), screen, admit)
    found = [
        Item(task, methods.NOTEPAD, length, repeat)
        for length, of_length in sorted(made.items())
        for task in of_length
        for repeat in range(v.repeats)
    ]
    check(found, **limits)
    return found


def opened(
    config: Training, wanted: Sequence[Item], reader: Reader, scoring: Scoring = rewards.PLAIN
) -> Validation:
    """Returns the validations of a run, by the reader of its rollouts.

    Rows are judged as the run rewards answers (`scoring`); a suite has metrics of its own.
    """
    v = config.validation
    if not v or not v.every:
        return Validation(0, config.steps, 0)
    sampling = TurnSampling(v.temperature, v.top_p, reader.sampling.stop_ids, config.seed)
    reads = dataclasses.replace(
        reader,
        sampling=sampling,
        chunks_of=Documents(
            reader.tokenizer, reader.rules.chunk_size, chunk_ends=reader.rules.chunk_ends
        ),
        at_once=config.engine.slots * builders.engines(config.engine),
    )
    reward = "" if v.suite or rewards.is_metric(config.tasks.reward) else config.tasks.reward
    judge = scoring.worth if reward else None
    return Validation(v.every, config.steps, v.patience, wanted, reads, judge, reward)


def check_settings(config: Training, tokenizer: Tokenizer) -> None:
    """Raises ValueError for settings that cannot work, before any weight is loaded."""
    v, ways = config.validation, (held_out.DOCUMENTS, held_out.QUESTIONS)
    if v and v.suite not in ("", eval_jobs.SYNTHETIC, *suites.SUITES):
        raise ValueError(
            f"validation.suite is {v.suite!r}; use one of {eval_jobs.SYNTHETIC}, "
            f"{', '.join(suites.SUITES)}, or name task files (validation.files)"
        )
    if v and v.split_by not in ways:  # a share is held out, also where it is not read
        raise ValueError(f"validation.split_by is {v.split_by!r}; use {' or '.join(ways)}")
    if not v or not v.every:
        return
    named = [name for name in ("suite", "files", "split") if getattr(v, name)]
    if len(named) != 1:
        said = " and ".join(f"validation.{name}" for name in named) or "nothing"
        raise ValueError(
            f"validation.every is {v.every}, and {said} says on what; name one of "
            f"validation.split (a share of tasks.files), validation.files and validation.suite, "
            f"or switch it off with validation.every=0"
        )
    if v.split and not config.tasks.files:
        raise ValueError(
            "validation.split holds out a share of tasks.files, which is empty; name a "
            "validation.suite instead (synthetic, with validation.lengths)"
        )
    if v.suite == eval_jobs.SYNTHETIC and not task_stream.knows_starter(tokenizer):
        raise ValueError(
            f"validation.suite is {v.suite}, which is in the starter's language, whose words "
            f"{tokenizer.path} does not have; use one of {', '.join(suites.SUITES)}, or another "
            f"of validation.split and validation.files"
        )
    if v.suite and not v.lengths:
        raise ValueError(
            f"validation.suite is {v.suite}, and validation.lengths is empty; name lengths of its "
            f"documents, for example {format_length(config.data.tokens).lower()}"
        )
    if v.repeats > 1 and v.temperature == 0:
        raise ValueError(
            f"{v.repeats} repeats at temperature 0 would all be the same; raise "
            f"validation.temperature, or read once"
        )


# ---------------------------------------------------------------- tasks


def _tasks(
    config: Training, stream: TaskStream, count: Any, screen: Screen,
    admit: Callable[[Task], None],
) -> eval_jobs.TasksByLength:  # fmt: skip
    v = config.validation
    if v.suite:
        lengths = list(dict.fromkeys(map(parse_length, v.lengths)))
        seed = config.seed + OTHER_QUESTIONS  # than an evaluation's
        if v.suite == eval_jobs.SYNTHETIC:
            asked = (config.data, v.samples, ABOUT_ONE)
            return {length: eval_jobs.synthetic(seed, length, *asked) for length in lengths}
        sources = SourceKeys(text="stdlib", hotpotqa="", squad="")
        return eval_jobs.of_suite(
            v.suite, v.tasks, lengths, v.samples, seed, sources, count, screen, admit
        )
    sources = _of_files(v.files, stream, screen) if v.files else stream.held_out
    found: eval_jobs.TasksByLength = {}
    for pairs in sources.values():
        # In the order of their ranks, which chance decided: the first are as good as any.
        order = range(len(pairs))
        if v.files:
            order = sorted(order, key=lambda number, pairs=pairs: held_out.rank(pairs[number][0]))
        for number in order[: v.samples]:
            task, length = pairs[number]
            length = length or sum(map(count, task.document.pieces()))
            task = rewards.judged(config.tasks.reward, task)
            found.setdefault(file_suite.power_of_two(length), []).append(task)
    return found


def _of_files(
    paths: Sequence[str], stream: TaskStream, screen: Screen
) -> dict[str, Sequence[Pair]]:
    """Opens `validation.files`, and says what of them is left out, and what is trained on, too."""
    admission = RowCounts()
    found = {path: formats.read_any(path, on_fault=admission.leave_out) for path in paths}
    tasks = [task for pairs in found.values() for task, _ in pairs]
    for line in admission.lines(len(tasks)):
        screen.warn(f"validation.files: {line}")
    if stream.sources is None:
        return found
    drawn = stream.records.tasks
    words, documents = held_out.shared(stream.sources, drawn, tasks, screen)
    if words or documents:
        screen.warn(
            f"validation.files: of {len(tasks):,} tasks, {words:,} ask what a task of tasks.files "
            f"asks, in its words, and {documents:,} are about a document of tasks.files; what "
            f"they show is not only what was never trained on"
        )
    return found


# ---------------------------------------------------------------- words and numbers


def _metrics(results: Sequence[Result]) -> dict[str, float]:
    """Returns the scores of a validation, all of them and by length, and what went wrong."""
    lengths = summary.by_length(results)
    questions = sum(s.questions for s in lengths)
    return {
        SCORE: sum(s.questions * s.accuracy.mean for s in lengths) / questions,
        **{f"{SCORE}_{format_length(s.length)}": s.accuracy.mean for s in lengths},
        "validation/questions": questions,
        "validation/unanswered": sum(s.unanswered for s in lengths),
        "validation/truncated": sum(s.truncated for s in lengths),
    }


def told(lines: Iterable[Mapping[str, float]], step: int) -> dict[str, float] | None:
    """Returns the validation metrics of a step among a run's lines, if they are there."""
    found = [line for line in lines if line["step"] == step and SCORE in line]
    return {name: found[-1][name] for name in found[-1] if name != "step"} if found else None


def lines(done: Validation, metrics: Mapping[str, float], began: float) -> Iterator[str]:
    """Yields what is said of the validation that was added last."""
    last, best_one = done.found[-1], done.best
    lengths = [
        f"{name.removeprefix(SCORE + '_')} {100 * value:.1f}%"
        for name, value in metrics.items()
        if name.startswith(SCORE + "_")
    ]
    by_length = f" ({', '.join(lengths)})" if len(lengths) > 1 else ""
    yield (
        f"step {last.step}: {100 * last.score:.1f}% of {metrics['validation/questions']:,.0f} "
        f"held-out questions{by_length}, in {time.perf_counter() - began:.1f} s"
        + ("; the best so far" if last == best_one else "")
    )
    if done.exhausted:
        yield done.ending
