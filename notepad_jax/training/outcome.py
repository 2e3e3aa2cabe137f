"""The result of a training run: report.html, its best step, and the next commands.

Everything is read from the run's folder, so a page can be made again whenever one likes. Above:
commands; below: report.training_page and telemetry.metrics.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from notepad_jax import keys
from notepad_jax.checkpoint import best, steps
from notepad_jax.checkpoint.best import Best
from notepad_jax.parallel import hosts
from notepad_jax.report import training_page
from notepad_jax.report.origin import Next
from notepad_jax.setup import policies, provenance
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.metrics import TIMINGS, read_metrics
from notepad_jax.training import health, record
from notepad_jax.training.validation import SCORE


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """A training run that has ended, and where it lies."""

    folder: Path
    checkpoints: steps.Folder
    steps: tuple[int, ...]  # that are kept
    best: Best | None  # on held-out tasks; None without validation
    report: Path
    warnings: tuple[str, ...]  # what looked sick, with the mend
    next: Mapping[str, str]  # what for -> command


def outcome(config: Training, folder: Path) -> TrainingResult:
    """Writes the report of the run in `folder` (of several processes, the first one does)."""
    checkpoints = steps.place_of(folder, config.checkpoint.folder)
    try:
        marked = best.read(checkpoints)
    except OSError:  # of a bucket: what is done is told all the same
        marked = None
    lines = read_metrics(folder)
    after = _next(config, folder, marked)
    found = TrainingResult(
        folder, checkpoints, tuple(steps.steps_in(checkpoints)), marked,
        folder / training_page.REPORT, _warnings(config, lines), after,
    )  # fmt: skip
    if hosts.first():
        training_page.write(folder, _report(config, folder, lines, marked, after))
    return found


def text(found: TrainingResult) -> str:
    """Returns what the command prints at the end."""
    kept = ", ".join(map(str, found.steps))
    told = {
        "report": f"{found.report}",
        "checkpoints": f"{found.checkpoints}  (steps {kept})",
        "best": f"{found.folder}@best is step {found.best.step}, with "
        f"{100 * found.best.score:.1f}% on held-out tasks"
        if found.best is not None
        else "",
        **found.next,
    }
    width = max(map(len, told))
    rows = [f"{name:<{width}}  {words}" for name, words in told.items() if words]
    return "\n".join([*rows, *(f"looks sick: {words}" for words in found.warnings)])


def _warnings(config: Training, lines: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    found = health.course(health.lines_of(lines), health.limits_of(config))
    return tuple(str(one) for one in found)


def _next(config: Training, folder: Path, marked: Best | None) -> dict[str, str]:
    name = shlex.quote(f"{folder}{policies.AT}{policies.BEST}" if marked else f"{folder}")
    held = config.validation.files if config.validation else ()
    files, lengths = held or config.tasks.files, "--lengths 2k,8k,32k"
    suite, question = lengths, "'QUESTION'"
    if config.tasks.stories:
        suite = f"--suite stories {lengths}"
    elif not files:
        question = "'code of NAME ?'"
    elif policies.has_template(config.policy, default=True):
        suite = "--suite ruler-qa --lengths 8k,32k,128k"
    else:  # RULER's words are none of the starter's, nor is its template
        suite = f"--suite {shlex.quote(files[0])}"
    return {
        "measure it": f"notepad-jax eval --policy {name} {suite}",
        "ask it": f"notepad-jax ask --policy {name} FILE {question}",
        "export it": f"notepad-jax export-hf {name} exported",
    }


def _report(
    config: Training, folder: Path, lines: Sequence[Mapping[str, float]], marked: Best | None,
    after: Mapping[str, str],
) -> training_page.TrainingReport:  # fmt: skip
    validated = [line for line in lines if SCORE in line]
    by_length = f"{SCORE}_"
    names = [name for name in (validated[-1] if validated else ()) if name.startswith(by_length)]
    curves = {name: name.removeprefix(by_length) for name in names} or {SCORE: "all"}
    done = max((line["step"] for line in lines), default=0)
    recipe = f", recipe {config.recipe}" if config.recipe else ""
    told = f"{config.policy} after {done:,} of {config.steps:,} steps of GRPO{recipe}"
    if marked is not None:
        told += f"; best on held-out tasks is step {marked.step:,}, with {100 * marked.score:.1f}%"
    return training_page.TrainingReport(
        title=f"Training of {folder.name}",
        summary=f"{told}.",
        origin=provenance.origin([Next(why, command) for why, command in after.items()]),
        warnings=_warnings(config, lines),
        metrics=[*lines, *read_metrics(folder, TIMINGS)],
        curves=curves if validated else {},
        lengths=[name.removeprefix(by_length) for name in names],
        validations=[
            training_page.ValidationPoint(
                step=line["step"],
                score=line[SCORE],
                by_length=tuple(line.get(name, math.nan) for name in names),
                best=marked is not None and line["step"] == marked.step,
            )
            for line in validated
        ],
        config=keys.flat(keys.plain(config)),
        changes=record.shown(folder),
    )
