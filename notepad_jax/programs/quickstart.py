"""`notepad-jax quickstart`: measures, trains and measures again, at laptop scale, in one command.

Measure the starter by length; teach it with GRPO on short documents, handing every new policy to
the engine through an orbax checkpoint; export it to Hugging Face layout; measure that again, up to
3.5 million tokens; print the table and where the report lies. The starter is a tiny network whose
habits were spoilt on purpose: this shows that the machinery learns, not how good a language model
gets.
Above: commands; below: train, evaluate, eval_jobs and report.quickstart_page.
"""

from __future__ import annotations

import dataclasses
import resource
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax import keys, waiting
from notepad_jax.eval import lengths, summary
from notepad_jax.eval.measure import Result
from notepad_jax.eval.readings import Readings
from notepad_jax.programs import evaluate, export, subjects
from notepad_jax.report import numerals, quickstart_page
from notepad_jax.report.examples import Example, example, spread
from notepad_jax.report.origin import Next
from notepad_jax.setup import builders, compiled, eval_jobs, provenance
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.identity import write_sealed
from notepad_jax.telemetry.metrics import CONFIG, TIMINGS, read_metrics
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import decided, health, record, train

STEP = "readings/step_{}"  # where the readings of the policy after that many steps lie
BEFORE, AFTER = "before RL", "after RL"  # the policies' labels
COMPILING, TRAINING = "compiling", "training"  # where time goes
STARTER = (
    "The starting policy is a network of 225 thousand parameters that was taught, on purpose, "
    "sound skills and bad habits: it finds facts and copies notes, but often does not write down "
    "what it found and drops its notes when a new chapter begins. The curve shows that the "
    "machinery teaches it better habits; it says nothing about how good a language model gets."
)


@dataclasses.dataclass(frozen=True)
class QuickstartResult:
    """The results of the quick start, and where they lie."""

    folder: Path
    report: Path
    exported: Path
    before: list[summary.Summary]
    after: list[summary.Summary]
    examples: list[Example]  # three readings of the longest documents
    pairs: list[Example]  # the same questions before and after, where they were read before
    timings: dict[str, float]
    peak_memory: float  # bytes, of the largest process


def run(
    config: Training, folder: Path, screen: Screen, resume: bool = False, step: int | None = None
) -> QuickstartResult:
    """Runs the quick start; with `resume`, an earlier run in `folder` is continued.

    Its training goes on from the newest good checkpoint, or from `step`. Raises as `train.train`
    does.
    """
    with run_folder.opened(folder, resume):
        return _run(config, folder, screen, resume, step)


def _run(
    config: Training, folder: Path, screen: Screen, resume: bool, step: int | None
) -> QuickstartResult:
    timings, compiling = dict[str, float](), compiled.watched()

    def timed(name: str, work: Any) -> Any:
        began, before = time.perf_counter(), compiling.seconds
        result = work()
        spent = compiling.seconds - before
        timings[COMPILING] = timings.get(COMPILING, 0.0) + spent
        timings[name] = time.perf_counter() - began - spent
        return result

    check_meant(config)
    words = train.check(config, folder, resume, step)  # before the first measurement
    decided.fitted(config, words, screen)
    where = builders.to_read(config.engine)
    policy = builders.load_policy(config.policy, config.dtype, where)
    e = config.evaluate
    if not resume:  # then training says it, once nothing has refused the settings
        write_sealed(folder / CONFIG, keys.plain(config))
    screen.phase("1/4  the starter, before reinforcement learning")
    before, _ = timed(
        "measuring before",
        lambda: measured(
            config, policy, e.lengths_before, "before", folder / STEP.format(0), screen
        ),
    )
    screen.say(evaluate.table(summary.by_length(before)))

    screen.phase(f"2/4  GRPO on documents of {config.data.tokens:,} tokens")
    timed(TRAINING, lambda: train.train(config, folder, screen, resume, step))

    screen.phase("3/4  the trained policy, exported")
    # As others would load it. Its adapters are added in: a turn costs a tenth less without their
    # products beside the weights'.
    exported = folder / "hf"
    export.export_hf(folder, str(exported), screen, "float32", overwrite=True)
    last = builders.load_policy(exported, config.dtype, where, screen.warn)
    # Computed in what the policy was: the export says float32, which an accelerator would take.
    trained = dataclasses.replace(policy, params=last.params, name=last.name)
    after, read = timed(
        "measuring after",
        lambda: measured(
            config, trained, e.lengths, "after", folder / STEP.format(config.steps), screen
        ),
    )

    screen.phase("4/4  the report")
    outcome = QuickstartResult(
        folder=folder,
        report=folder / "report.html",
        exported=exported,
        before=summary.by_length(before),
        after=summary.by_length(after),
        examples=read,
        pairs=pairs(config, folder, before, after),
        timings=_apart(timings, read_metrics(folder, TIMINGS)),
        peak_memory=max(map(_peak_memory, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))),
    )
    _report(config, outcome)
    return outcome


def check_meant(config: Training) -> None:
    """Raises ValueError for measurements that the table before and after cannot show."""
    e = config.evaluate
    if e.suite != eval_jobs.SYNTHETIC:
        raise ValueError(
            f"evaluate.suite is {e.suite!r}, and the quick start measures on "
            f"{eval_jobs.SYNTHETIC}; measure its policy with eval afterwards"
        )
    evaluate.check_meant(config)
    if len(set(e.methods)) > 1:
        raise ValueError(
            f"evaluate.methods has {', '.join(e.methods)}, and the quick start measures with one; "
            f"measure its policy with eval afterwards"
        )
    for key in ("lengths_before", "lengths"):
        if not getattr(e, key):
            raise ValueError(f"evaluate.{key} is empty; name at least one")


def _peak_memory(whose: int) -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # of what getrusage counts in
    return float(resource.getrusage(whose).ru_maxrss * unit)


def _apart(timings: Mapping[str, float], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by what was done, training by its parts; those of all its `steps` add up.

    What was compiled on the way is counted once, under its own name.
    """

    def without_compiling(part: str) -> float:
        return sum(s[f"{part}_seconds"] - s.get(f"{part}_compile_seconds", 0.0) for s in steps)

    found: dict[str, float] = {}
    for name, seconds in timings.items():
        if name == TRAINING:
            parts = {part: without_compiling(part) for part in ("rollout", "update")}
            # After --resume the steps of the process before count, and what else it did does not.
            found |= {**parts, "saving, handing over": max(0.0, seconds - sum(parts.values()))}
        else:
            found[name] = seconds
    return found


def measured(
    config: Training,
    policy: builders.LoadedPolicy,
    names: Sequence[str],
    label: str,
    folder: Path,
    screen: Screen,
) -> tuple[list[Result], list[Example]]:
    """Reads at the lengths `names` ("2k", "3.5m"); the readings stay in `folder`."""
    subject = subjects.engine(config, policy, screen)
    tasks = {n: eval_jobs.tasks_of_length(config, n) for n in map(lengths.parse_length, names)}
    planned = eval_jobs.jobs(config, tasks)
    with Readings(folder, evaluate.identity(config)) as readings:
        results = waiting.run(evaluate.read(config, subject, planned, label, readings, screen))
        return results, examples(results, readings)


def examples(results: Sequence[Result], readings: Readings) -> list[Example]:
    """Returns three example readings of the longest documents: one hop, two hops, no answer."""
    longest = max(r.length for r in results)
    there = [r for r in results if r.length == longest]
    kinds = {
        "one hop": lambda r: r.question.startswith("code") and r.gold != ("nothing",),
        "two hops": lambda r: r.question.startswith("ruler") and r.gold != ("nothing",),
        "no answer in the document": lambda r: r.gold == ("nothing",),
    }
    chosen = ((kind, next(filter(fits, there), None)) for kind, fits in kinds.items())
    return [example(kind, r, readings.trace(r)) for kind, r in chosen if r is not None]


def pairs(
    config: Training, folder: Path, before: Sequence[Result], after: Sequence[Result]
) -> list[Example]:
    """Returns examples of every kind of question, each as read before and after, for the page."""
    identity = evaluate.identity(config)
    with (
        Readings(folder / STEP.format(0), identity) as old,
        Readings(folder / STEP.format(config.steps), identity) as new,
    ):
        readings = {BEFORE: old, AFTER: new}
        return [
            example(who, result, readings[who].trace(result))
            for sides in spread({BEFORE: before, AFTER: after})
            for who, result in sides
        ]


def _next(config: Training, outcome: QuickstartResult) -> list[Next]:
    """Suggested next commands after the quick start."""
    policy = shlex.quote(str(outcome.exported))
    seed = f"--config.seed={config.seed + 1}"
    return [
        Next("ask it about a file", f"notepad-jax ask --policy {policy} FILE 'code of NAME ?'"),
        Next(
            "measure it at other lengths, beside methods without a memory",
            f"notepad-jax eval --policy {policy} --lengths 2k,32k,512k "
            "--methods notepad,full-context,recent-only",
        ),
        Next("the same from another seed", f"notepad-jax quickstart --name second {seed}"),
    ]


def _report(config: Training, outcome: QuickstartResult) -> None:
    train_length = config.data.tokens
    last = outcome.after[-1]
    metrics = read_metrics(outcome.folder)
    lines = health.lines_of(metrics)
    quickstart_page.write(
        outcome.folder,
        quickstart_page.QuickstartReport(
            title="Quick start: reading without limit",
            summary=(
                f"Trained with GRPO on documents of {train_length:,} tokens; read documents of up "
                f"to {last.length:,} tokens in chunks, with a memory of "
                f"{config.reading.max_memory} tokens."
            ),
            origin=provenance.origin(_next(config, outcome)),
            starter=STARTER,
            train_length=train_length,
            before=outcome.before,
            after=outcome.after,
            warnings=[str(one) for one in health.course(lines, health.limits_of(config))],
            metrics=metrics,
            examples=outcome.pairs,
            config=keys.flat(keys.plain(config)),
            changes=record.shown(outcome.folder),
            timings=outcome.timings,
        ),
    )


def text(outcome: QuickstartResult) -> str:
    """Returns what the command prints at the end."""
    before = {s.length: s for s in outcome.before}
    lines = ["", f"{'tokens':>8}  {BEFORE:>24}  {AFTER:>24}  {'n':>4}"]
    for s in outcome.after:
        old = before.get(s.length)
        lines.append(
            f"{lengths.format_length(s.length):>8}  {_share(old):>24}  {_share(s):>24}  {s.n:>4}"
        )
    for one in outcome.examples:
        r = one.result
        lines += ["", f"{one.label}, {r.length:,} tokens: {r.question}"]
        lines += [f"  chunk {c.chunk + 1:>5,}: {c.memory}" for c in one.first[:8]]
        right = "right" if r.correct else f"wrong, it is {r.gold[0]}"
        lines.append(f"  answer: {r.answer} ({right})")
    spent = ", ".join(f"{name} {numerals.duration(s)}" for name, s in outcome.timings.items())
    lines += [
        "",
        f"report    {outcome.report}",
        f"plot      {outcome.folder / quickstart_page.ACCURACY}",
        f"policy    {outcome.exported}  (Hugging Face layout)",
        f"try it    notepad-jax ask --policy {outcome.exported} FILE 'code of NAME ?'",
        f"{spent}; peak memory {outcome.peak_memory / 1e9:.1f} GB",
    ]
    return "\n".join(lines)


def _share(summary: summary.Summary | None) -> str:
    if summary is None:
        return "-"
    a = summary.accuracy
    return f"{100 * a.mean:.1f}% ({100 * a.low:.1f}-{100 * a.high:.1f}%)"
