"""Experiment trackers that get a run's metrics, too: Weights & Biases and MLflow, if installed.

A config names them (`sinks`); one that is not named is not imported. The record stays
metrics.jsonl: a sink that fails is told of once and left out from then on, because no outage of
another server should end a run. Which page there belongs to the run stands in
`sinks.json` in its folder, so a resumed run goes on on the same one. Above: metrics, which
writes to them, and the programs, which check that they are there.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from notepad_jax.telemetry.identity import read_json, write_json

NAMES = ("wandb", "mlflow")
PROJECT = "notepad-jax"  # of W&B, and the experiment of MLflow
FILE = "sinks.json"
LONGEST = 500  # characters of a setting that every MLflow server takes


class Sink(Protocol):
    """A run's page at an experiment tracker."""

    id: str  # of the page, by which it is found again

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check(names: Sequence[str]) -> None:
    """Raises ValueError, naming the mend, for a sink that is not known or cannot be imported."""
    for name in names:
        _module(name)


class Sinks:
    """The open sinks of a run; they are closed with it.

    `settings` are the config's values by key; `say` is told what goes wrong with a sink.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, settings: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._say = say
        self._open: dict[str, Sink] = {}
        path = folder / FILE
        mend = "remove it, and the run goes on on a new page"
        known = read_json(path, mend) if names and path.is_file() else {}
        for name in names:
            begin = functools.partial(
                _WandB if name == "wandb" else _MLflow,
                _module(name), folder, settings, known.get(name),
            )  # fmt: skip
            if (sink := self._guarded(name, begin)) is not None:
                self._open[name] = sink
        if self._open:
            write_json(path, known | {name: sink.id for name, sink in self._open.items()})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends a step's numbers to every sink that has not failed."""
        for name, sink in list(self._open.items()):
            self._guarded(name, functools.partial(sink.write, step, numbers))

    def close(self) -> None:
        for name, sink in list(self._open.items()):
            self._guarded(name, sink.close)

    def _guarded(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as problem:  # theirs, of any kind
            self._open.pop(name, None)
            said = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
            self._say(f"sink {name} failed and is left out from here on ({said})")
            return None


def _module(name: str) -> types.ModuleType:
    if name not in NAMES:
        raise ValueError(f"sinks has {name!r}; there are {' and '.join(NAMES)}")
    try:
        return importlib.import_module(name)
    except Exception as problem:
        raise ValueError(
            f"sinks has {name!r}, which cannot be imported ({problem}); "
            f"pip install {name}, or leave it out"
        ) from None


class _WandB:
    """A run at Weights & Biases; its offline mode and its key are those of wandb's variables."""

    def __init__(
        self, wandb: Any, folder: Path, settings: Mapping[str, Any], before: str | None
    ) -> None:
        self._run = wandb.init(
            project=PROJECT, name=folder.name, id=before, resume="allow", dir=str(folder),
            config=dict(settings), settings=wandb.Settings(console="off"),
        )  # fmt: skip
        # Its own count of steps only grows, and a resumed run may repeat some.
        self._run.define_metric("*", step_metric="step")
        self.id = str(self._run.id)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says."""

    def __init__(
        self, mlflow: Any, folder: Path, settings: Mapping[str, Any], before: str | None
    ) -> None:
        self._mlflow = mlflow
        mlflow.set_experiment(PROJECT)
        named = {"run_id": before} if before else {"run_name": folder.name}
        self.id = str(mlflow.start_run(**named).info.run_id)
        if not before:  # they cannot be changed later
            mlflow.log_params({key: str(value)[:LONGEST] for key, value in settings.items()})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
