"""`notepad-jax eval`: evaluates a policy on documents of growing length.

A suite gives the tasks (`eval_jobs`), a method says how a document is put before the reader, and
the reader is an engine of ours or an API endpoint (`subjects`): the memory agent and its
prompts are those of training either way. Every reading is on disk as soon as it ends, so a killed
evaluation goes on where it stood and reports the same numbers. Above: commands and quickstart;
below: measuring, eval_workers, eval_jobs, eval and report.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from notepad_jax import keys, waiting
from notepad_jax.eval import methods, summary
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.eval.measure import EvalProgress, Result, check, check_task
from notepad_jax.eval.readings import Readings
from notepad_jax.programs import eval_workers
from notepad_jax.programs.eval_workers import EvalWorkers
from notepad_jax.programs.measuring import here, judge_of, turns_of
from notepad_jax.programs.subjects import Subject
from notepad_jax.report import evaluation_page
from notepad_jax.report.examples import Example, example, spread
from notepad_jax.report.origin import Next
from notepad_jax.setup import eval_jobs, policies, provenance
from notepad_jax.setup.config.whole import Config
from notepad_jax.setup.eval_jobs import SYNTHETIC, EvalJob
from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.identity import write_json, write_sealed
from notepad_jax.telemetry.metrics import CONFIG
from notepad_jax.telemetry.screen import Screen
from notepad_jax.text.tokenizer import counter
from notepad_jax.types import Finish

REPORT = "report.json"
FEW = 4  # lengths of which it is told what they lack
HOPELESS = 256  # readings, all failed, after which an evaluation stops before its end


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The results of an evaluation, and where they lie."""

    folder: Path
    report: Path
    by_length: list[summary.Summary]
    by_task: list[summary.Summary]
    failed: int  # readings whose completer failed; going on makes them again


# ---------------------------------------------------------------- reading

_IDENTITY = ("seed", "policy", "reading", "sources", "endpoint", "evaluate")
_ALSO = ("dtype", "kernels", "engine.cache_dtype", "data.tokens")  # the last: how it was trained
# What may change between two halves of an evaluation: how much is read, and how fast.
_FREE = (
    "lengths", "lengths_before", "usual_lengths", "methods", "repeats", "samples",
    "usual_samples", "tasks", "at_once", "train_length", "archive_turns",
)  # fmt: skip


def identity(config: Config) -> dict[str, Any]:
    """Returns what all readings of a folder have in common, for `Readings`."""
    free = {f"evaluate.{name}" for name in _FREE}
    free |= {"endpoint.at_once", "endpoint.timeout", "endpoint.key_variable"}
    return {
        name: keys.plain(value)
        for name, value in keys.flat(config).items()
        if name not in free and (name.split(".")[0] in _IDENTITY or name in _ALSO)
    }


async def read(
    config: Config,
    subject: Subject,
    planned: Sequence[EvalJob],
    label: str,
    readings: Readings,
    screen: Screen,
) -> list[Result]:
    """Makes the readings that `readings` lacks; returns those of all jobs, in their order."""
    e = config.evaluate
    left = [
        dataclasses.replace(job, items=tuple(items))
        for job in planned
        if (items := readings.missing(job.items))
    ]
    for job in planned if e.archive_turns else ():
        turns = turns_of(config, subject, job.rules)
        readings.keep_turns(job.items[: e.archive_turns], turns)
    failures: list[Exception] = []  # the first; more would keep their readings alive

    def on_failure(failure: Exception) -> None:
        if not failures:
            failures.append(failure)

    async with contextlib.AsyncExitStack() as stack:
        workers = eval_workers.count(config, subject, left)
        opened = functools.partial(here, config, subject, readings, on_failure, e.at_once)
        if workers > 1:
            every = EvalWorkers(config, subject.policy, workers, readings, on_failure, screen)
            if await (await stack.enter_async_context(every)).begun():
                opened = every.opened
            else:
                screen.warn(
                    "the worker processes did not load the policy that is here: one process reads"
                )
        for limits, group in itertools.groupby(left, lambda job: job.rules):
            async with opened(limits) as measured:
                for job in group:
                    with _progress(job, label, len(e.methods) > 1, screen) as on_progress:
                        await measured(job.items, on_progress)
                    _give_up(readings, failures, HOPELESS)
    _give_up(readings, failures, 1)
    return readings.of(item for job in planned for item in job.items)


def _give_up(readings: Readings, failures: Sequence[Exception], after: int) -> None:
    """Raises the first failure where nothing else came of `after` readings or more.

    A reading that fails is a result, and so is a method that always does; but where nothing
    succeeds at all, the completer is at fault. Documents that do not fit never reached it.
    """
    asked = [one for one in readings.all() if one.failed or one.finish is not Finish.CANCELLED]
    if failures and len(asked) >= after and all(result.failed for result in asked):
        raise failures[0]


@contextlib.contextmanager
def _progress(
    job: EvalJob, label: str, several: bool, screen: Screen
) -> Iterator[Callable[[EvalProgress], None]]:
    name = f"{label} {job.method}" if several else label
    bar = screen.bar(f"{name} {format_length(job.length)}", len(job.items) * job.turns, "turns")
    before = 0

    def on_progress(progress: EvalProgress) -> None:
        nonlocal before
        shown = {"right": f"{progress.correct:.0f}/{progress.done}"} if progress.done else {}
        left = (progress.total - progress.done) * job.turns
        bar.expect(max(progress.turns, progress.ended + left))
        bar.advance(progress.turns - before, **shown)
        before = progress.turns

    try:
        yield on_progress
    finally:
        bar.finish()


# ---------------------------------------------------------------- the program


def run(config: Config, reader: Subject, folder: Path, screen: Screen) -> EvaluationResult:
    """Evaluates into `folder` (or goes on there): readings, traces, report.json, report.html.

    Raises ValueError for settings that cannot work or are not those of the folder's readings,
    and as `run_folder.opened` does.
    """
    if reader.policy is not None and policies.AT in reader.name:  # a run may have a newer step soon
        config = keys.changed(config, {"policy": reader.name})
    with run_folder.opened(folder, resume=folder.is_dir()):
        return _run(config, reader, folder, screen)


def _run(config: Config, reader: Subject, folder: Path, screen: Screen) -> EvaluationResult:
    e = config.evaluate
    check_meant(config)
    lengths = eval_jobs.lengths_of(config)
    limits = {"tokenizer": reader.tokenizer, "max_question": config.reading.max_question}
    admit = functools.partial(check_task, **limits)
    tasks = eval_jobs.tasks_of(config, lengths, counter(reader.tokenizer), screen, admit)
    planned = eval_jobs.jobs(config, tasks)
    check([item for job in planned for item in job.items], **limits)
    who = {"reader": reader.name, **reader.dtypes}
    with Readings(folder, identity(config) | who) as readings:
        write_sealed(folder / CONFIG, keys.plain(config))
        results = waiting.run(read(config, reader, planned, "eval", readings, screen))
        outcome = evaluation_page.EvaluationReport(
            title=f"Reading {e.suite}, by length",
            summary=_summary(reader, results, config),
            origin=provenance.origin(_next(config, folder, results), here=not config.by_endpoint),
            suite=e.suite,
            policy=reader.name,
            train_length=_train_length(config),
            by_length=summary.by_length(results),
            by_task=summary.by_task(results),
            examples=examples(results, readings),
            settings=keys.flat(keys.plain(config)),
            published=True,
        )
    page = evaluation_page.write(folder, outcome)
    write_json(folder / REPORT, evaluation_page.report_json(outcome))
    failed = sum(result.failed for result in results)
    return EvaluationResult(folder, page, list(outcome.by_length), list(outcome.by_task), failed)


def check_meant(config: Config) -> None:
    """Raises ValueError for a config with nothing to read, or with an unknown judge."""
    e = config.evaluate
    judge_of(config)
    if e.repeats > 1 and e.temperature == 0:
        raise ValueError(
            f"{e.repeats} repeats at temperature 0 would all be the same; raise "
            "evaluate.temperature, or read once"
        )
    if eval_jobs.is_file(e.suite):
        eval_jobs.existing(e.suite)
    if not e.methods:
        raise ValueError("evaluate.methods is empty; name at least one")
    if not eval_jobs.lengths_of(config) and not eval_jobs.is_file(e.suite):
        raise ValueError("evaluate.lengths is empty; name at least one")
    if e.suite == SYNTHETIC and config.data is None:
        raise ValueError(
            "the suite synthetic is in the starter's language, which a policy on our engine may "
            "know (--policy) and no endpoint; choose another --suite"
        )


def _summary(reader: Subject, results: Sequence[Result], config: Config) -> str:
    e, r = config.evaluate, config.reading
    longest = format_length(max(result.length for result in results))
    told = f"{reader.name} read documents of up to {longest} tokens"
    if methods.NOTEPAD in e.methods:
        told += f" in chunks of {e.chunk_size:,}, with a memory of {r.max_memory:,} tokens"
    if set(e.methods) - {methods.NOTEPAD}:
        told += f"; methods without a memory saw {e.context:,} tokens at once"
    return f"{told}.{_gaps(results)}"


def _gaps(results: Sequence[Result]) -> str:
    """Says which tasks some length lacks: an average over all tasks is over fewer there."""
    sources = {r.source for r in results}
    by_length: dict[int, set[str]] = collections.defaultdict(set)
    for result in results:
        by_length[result.length].add(result.source)
    gaps = [
        f"{format_length(length)} is without {', '.join(sorted(sources - there))}"
        for length, there in sorted(by_length.items())
        if there != sources
    ]
    more = [f"and {len(gaps) - FEW} more lengths"] if len(gaps) > FEW else []
    told = "; ".join([*gaps[:FEW], *more])
    return f" Not every task has every length: {told}." if gaps else ""


def _train_length(config: Config) -> int | None:
    if config.evaluate.suite == SYNTHETIC:
        return config.data.tokens
    told = config.evaluate.train_length
    return parse_length(told) if told else None


def examples(results: Sequence[Result], readings: Readings) -> list[Example]:
    """Returns examples of every kind of question, each as every method read it."""
    by_method = {
        method: [result for result in results if result.method == method]
        for method in dict.fromkeys(result.method for result in results)
    }
    return [
        example(method, result, readings.trace(result))
        for sides in spread(by_method)
        for method, result in sides
    ]


def _next(config: Config, folder: Path, results: Sequence[Result]) -> list[Next]:
    """Suggested next commands after this evaluation."""
    again = f"notepad-jax eval --name {shlex.quote(folder.name)} --resume"
    commands = []
    if not eval_jobs.is_file(config.evaluate.suite):  # a file has the lengths that it has
        longest = max(result.length for result in results)
        named = config.evaluate.lengths or config.evaluate.usual_lengths
        lengths = ",".join((*named, format_length(4 * longest).lower()))
        longer = "read longer documents too; what was read is kept"
        commands.append(Next(longer, f"{again} --lengths {lengths}"))
    if any(result.failed for result in results):
        commands.insert(0, Next("make the readings that failed again", again))
    if not config.by_endpoint:
        policy = shlex.quote(str(config.policy))
        commands.append(
            Next("ask it about a file", f"notepad-jax ask --policy {policy} FILE 'QUESTION'")
        )
    return commands


def text(outcome: EvaluationResult) -> str:
    """Returns what the command prints at the end."""
    lines = [table(outcome.by_length), ""]
    if outcome.failed:
        again = f"notepad-jax eval --name {shlex.quote(outcome.folder.name)} --resume"
        lines.append(f"{outcome.failed:,} readings failed and count as wrong; again with: {again}")
    return "\n".join([*lines, f"report  {outcome.report}"])


def table(summaries: Sequence[summary.Summary]) -> str:
    """Returns a plain-text table of accuracies with 95% intervals."""
    head = f"{'method':<15}  {'tokens':>8}  {'n':>5}  {'accuracy':>8}  95% interval    seconds"
    unanswered = any(s.unanswered for s in summaries)
    lines = [head + ("  unanswered" if unanswered else "")]
    for s in summaries:
        a = s.accuracy
        lines.append(
            f"{s.method:<15}  {format_length(s.length):>8}  {s.n:>5}  {100 * a.mean:7.1f}%  "
            f"{100 * a.low:5.1f} - {100 * a.high:5.1f}%  {s.seconds:8.1f}"
            + (f"  {s.unanswered:10,}" if unanswered else "")
        )
    return "\n".join(lines)
