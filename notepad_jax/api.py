"""The Python API of `import notepad_jax` beside `Reader`: train, evaluate, export_hf.

Each calls the program of the command with that name and adds nothing that it cannot do: what is
given as an object is put where the command line would look for it. Rows become a task file in the
run's folder (`data.datasets`), functions are lent under the names that the config holds
(`functions`), changes are overrides (`setup.settings`). So a run that was begun here is gone
on with there, and the other way round. Everything works inside a running event loop, too.
Above: code that imports notepad_jax; below: programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.data import datasets
from notepad_jax.eval.readings import READINGS
from notepad_jax.parallel import hosts
from notepad_jax.programs import evaluate as evaluation
from notepad_jax.programs import export, measuring, subjects
from notepad_jax.setup import process, settings
from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.identity import read_sealed
from notepad_jax.telemetry.metrics import CONFIG, read_metrics
from notepad_jax.telemetry.progress import choose
from notepad_jax.training import outcome, record, run_log
from notepad_jax.training import train as training
from notepad_jax.training.callbacks import Callback, checked

RUNS = Path("runs")
VALIDATIONS = 10  # of a run whose config has no wish of its own
DATASET, VALIDATION = "dataset.jsonl", "validation.jsonl"

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training run: its folder, best step, report and metrics."""

    name: str  # of the policy, for Reader.load, evaluate and export_hf: "runs/mine"
    folder: Path
    best: int | None  # the step that did best on held-out rows; None without validation
    report: Path  # report.html
    metrics: list[dict[str, float]] = dataclasses.field(repr=False)  # of steps and validations


def train(
    config: settings.Given = "",
    *,
    dataset: Any = None,
    reward: settings.Rewards | None = None,
    memory_reward: settings.Rewards | None = None,
    memory_update: settings.MemoryRule | None = None,
    validation: Any = None,
    callbacks: Sequence[Callback] = (),
    policy: PathLike | None = None,
    name: str | None = None,
    resume: bool = False,
    step: int | None = None,
    mended: bool = False,
    changes: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Trained:
    """Trains a policy, as `notepad-jax train` does; the run lies in runs/NAME.

    Args:
      config: a config by name ("chat") or file; "" is "quickstart", or, with `resume`, nothing
        but the run's own settings.
      dataset: rows to train on (`data.datasets.write` says which), or paths of task files.
      reward: what an answer is worth: the name of a metric, a function of a `ReadingRecord` that
        returns a number from 0 to 1 or one for each turn (`scoring.own`), "module:function", or
        (weight, one of these) several times. Validation rows are judged by it, too.
      memory_reward: what each memory on the way is worth, said as `reward` is, but that a function
        returns a number for each memory; its turn learns from it, beside what the answer was
        worth. None: nothing.
      memory_update: what becomes the memory: a name of the config's, a function of (memory,
        written) as `reading.memory_rules` says, or "module:function".
      validation: held-out rows, or paths, to read every `validation.every` steps (where the
        config has 0: ten times in a run); `Reader.load(..., step="best")` reads with the best.
      callbacks: functions that are called with (step, metrics) after each step; False or `Stop`
        ends the run there.
      policy: instead of the config's: a run, a Hugging Face folder.
      name: of the run; None takes the first of train, train-2, ... that is free.
      resume: goes on with the run `name`, from the newest good checkpoint or from `step`. Rows,
        functions and changes that are left out are those of before; functions that are no part
        of a module, and callbacks, have to be given again.
      mended: with `resume`, rows may have other words than when the run began, where they stand;
        none may come or go, and those of a file that were left out stay so.
      changes: values of the config, as {"steps": 40, "rollout.documents": 4}.
      quiet: shows no progress.
    Raises ValueError for whatever is wrong with these, in one line; KeyboardInterrupt where it was
    stopped: then `resume=True` goes on.
    """
    _named(name, resume)
    callbacks = checked(callbacks)
    settings.check(config, "train")
    if resume:
        elsewhere = settings.changes_of(changes).get("checkpoint.folder", "")
        record.bring_back(RUNS / run_folder.plain_name(name), elsewhere)
    with contextlib.ExitStack() as stack:
        folder = _opened(stack, name, "train", resume)
        saved = _saved(folder, config) if resume else {}
        said = settings.changes_of(changes)
        said |= {} if policy is None else {"policy": settings.path_of(policy, "a policy")}
        said |= settings.lent(stack, reward, memory_update, memory_reward)
        said |= _files(dataset, "tasks.files", folder, DATASET, resume, mended)
        said |= _validation(
            _files(validation, "validation.files", folder, VALIDATION, resume, mended)
        )
        wanted = settings.loaded(config or settings.OURS, said, saved)
        if validation is not None and not wanted.validation.every:
            every = {"validation.every": max(1, wanted.steps // VALIDATIONS)}
            wanted = settings.loaded(wanted, every)
        process.prepared(wanted)
        screen = stack.enter_context(choose(quiet=quiet or not hosts.first()))
        training.train(wanted, folder, screen, resume, step, callbacks, mended)
        found = outcome.outcome(wanted, folder)
    best = None if found.best is None else found.best.step
    return Trained(str(folder), folder, best, found.report, read_metrics(folder))


def evaluate(
    source: PathLike,
    *,
    dataset: Any = None,
    step: int | str | None = None,
    reward: settings.Rewards | None = None,
    memory_update: settings.MemoryRule | None = None,
    config: settings.Given = "",
    name: str | None = None,
    resume: bool = False,
    changes: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> evaluation.EvaluationResult:
    """Measures how well a policy or an endpoint reads, as `notepad-jax eval` does.

    Args:
      source, step: the policy or endpoint that reads, as in `Reader.load`.
      dataset: rows with answers, or the path of a task file; None reads the suite of the config.
      reward: what an answer is worth, as in `train`; None: by the metric of its row.
      memory_update: as in `train`; a run that was trained with a function of a module has it.
      config: how it is read; "" takes what suits `source`.
      name: of the folder in runs/ where readings and report lie; None takes eval, eval-2, ...
      resume: goes on with the evaluation `name`; what is left out is as before, as in `train`.
      changes: values of the config, as {"evaluate.lengths": ("8k", "32k")}.
      quiet: shows no progress.
    Raises ValueError for whatever is wrong with these, in one line.
    """
    _named(name, resume)
    with contextlib.ExitStack() as stack:
        folder = _opened(stack, name, "eval", resume)
        lent = settings.lent(stack, reward, memory_update, key=measuring.REWARD)
        said = settings.changes_of(changes) | lent
        paths = _files(dataset, "paths", folder, DATASET, resume).get("paths", ())
        if len(paths) > 1:
            raise ValueError(f"one file or folder is evaluated at a time, and here are {paths}")
        said |= {"evaluate.suite": paths[0]} if paths else {}
        begun = resume and (folder / READINGS).exists()  # or killed before anything was read
        saved = _saved(folder, config) if begun else {}
        wanted = settings.to_read(source, step, config, said, measured=True, saved=saved)
        evaluation.check_meant(wanted)
        process.prepared(wanted)
        screen = stack.enter_context(choose(quiet=quiet))
        reader = subjects.named(wanted, screen, wanted.evaluate.suite)
        return evaluation.run(wanted, reader, folder, screen)


def export_hf(
    source: PathLike,
    target: PathLike,
    *,
    step: int | str | None = None,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    quiet: bool = False,
) -> Any:
    """Writes a policy as transformers and vLLM load it, as `notepad-jax export-hf` does.

    `source` and `step` are as in `Reader.load`; `target` is a new local folder or a gs:// URL.
    Returns what was written. Raises ValueError as the command does.
    """
    named, place = settings.at(source, step), settings.path_of(target, "the folder of an export")
    if not place:
        raise ValueError("target is empty; name a new folder, or a gs:// URL")
    with choose(quiet=quiet) as screen:
        return export.export_hf(named, place, screen, dtype, overwrite=overwrite)


# ---------------------------------------------------------------- what is given, put in its place


def _named(name: str | None, resume: bool) -> None:
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name is {name!r:.80}; a run is named by a text")
    if resume and name is None:
        raise ValueError("which run goes on? Say name=..., and resume=True as well")


def _opened(stack: contextlib.ExitStack, name: str | None, usual: str, resume: bool) -> Path:
    if name is None:
        return stack.enter_context(run_folder.numbered(RUNS / usual))
    return stack.enter_context(run_log.opened(RUNS / run_folder.plain_name(name), resume))


def _saved(folder: Path, config: settings.Given) -> Mapping[str, Any]:
    """The settings of a run that goes on; a ConfigDict that is given takes their place."""
    if isinstance(config, settings.MADE):
        return {}
    try:
        return read_sealed(folder / CONFIG, "say config= again, with all that was changed")
    except ValueError:
        if config:
            return {}
        raise


def _files(
    dataset: Any, key: str, folder: Path, file: str, resume: bool, mended: bool = False
) -> dict[str, tuple[str, ...]]:
    """Returns the config key that names the files of a dataset; rows are written down for it."""
    if dataset is None:
        return {}
    if isinstance(dataset, str | os.PathLike):
        dataset = [dataset]
    if isinstance(dataset, list | tuple) and not dataset:
        raise ValueError(
            f"{dataset!r} has no rows; give rows, or the paths of task files, or leave it out, and "
            f"the config's own are taken"
        )
    if isinstance(dataset, list | tuple) and all(isinstance(p, str | os.PathLike) for p in dataset):
        return {key: tuple(os.fspath(path) for path in dataset)}
    path = folder / run_folder.GIVEN / file
    settle = functools.partial(datasets.settle, mended=mended)
    write = settle if resume else datasets.write
    hosts.broadcast(lambda: write(dataset, path))
    return {key: (str(path),)}


def _validation(files: Mapping[str, Any]) -> dict[str, Any]:
    """Files that are given take the place of whatever else a config validates on."""
    return {"validation.split": 0.0, "validation.suite": "", **files} if files else {}
