"""The numbers of a run, on disk: one JSON line per step, and the same for TensorBoard.

`metrics.jsonl` holds what the algorithm computed, `ledger.jsonl` what became of every draw,
`timings.jsonl` what the clock said. They are apart so that the promise "kill, resume, and the
metrics that follow are identical" can be checked with `cmp`: resuming at step k drops every
line of step k or later, also a line that a kill cut in the middle, and the run writes them
again. TensorBoard events are written by tensorboardX, which needs no TensorFlow. Above: the
programs.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tensorboardX import SummaryWriter

from notepad_jax.telemetry.identity import write_json

METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
LEDGER = "ledger.jsonl"
CONFIG = "config.json"
EVENTS = "tensorboard"


class RunLog:
    """Owns the metric files of one run folder; a context manager.

    `resume_step` None starts a run (the folder must have no metrics yet); k continues one
    whose next step is k.
    """

    def __init__(
        self, folder: str | Path, resume_step: int | None = None, tensorboard: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            self._refuse_to_mix()
        else:
            for name in (METRICS, TIMINGS, LEDGER):
                truncate(self.folder / name, resume_step)
        self._metrics = _open(self.folder / METRICS)
        self._timings = _open(self.folder / TIMINGS)
        self._ledger = _open(self.folder / LEDGER)
        self._events = (
            SummaryWriter(str(self.folder / EVENTS), purge_step=resume_step)
            if tensorboard
            else None
        )

    def _refuse_to_mix(self) -> None:
        found = read_metrics(self.folder)
        if found:
            raise ValueError(
                f"{self.folder} already holds {len(found)} lines of metrics, the last of step "
                f"{found[-1]['step']}; resume that run, or choose another run name"
            )

    def config(self, config: Mapping[str, Any]) -> None:
        """Writes config.json, replacing it in one rename."""
        write_json(self.folder / CONFIG, config)

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float] | None = None,
        account: Mapping[str, Any] | None = None,
    ) -> None:
        """Appends one line per file and flushes: a kill loses nothing that was written.

        `account` is what became of the step's draws, JSON values.
        """
        _append(self._metrics, step, _numbers(metrics))
        if timings:
            _append(self._timings, step, _numbers(timings))
        if account:
            _append(self._ledger, step, account)
        if self._events is not None:
            for name, value in {**metrics, **(timings or {})}.items():
                self._events.add_scalar(name, float(value), step)
            self._events.flush()

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._timings.close()
        self._ledger.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8")


def _append(file: TextIO, step: int, values: Mapping[str, Any]) -> None:
    file.write(json.dumps({"step": step, **values}) + "\n")
    file.flush()


def _numbers(values: Mapping[str, float]) -> dict[str, int | float | str]:
    return {name: _number(name, value) for name, value in values.items()}


def _number(name: str, value: Any) -> int | float | str:
    """Returns a JSON number; JSON knows no nan and no inf, which become those words."""
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {name!r} is {value!r}; metrics are numbers") from None
    return number if math.isfinite(number) else str(number)


def truncate(path: Path, step: int) -> None:
    """Drops the lines of `step` and later, and whatever a kill left behind half-written."""
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in _lines(path) if line["step"] < step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Parses the finished lines of a file; one without its newline was never finished."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_metrics(folder: str | Path, file: str = METRICS) -> list[dict[str, float]]:
    """Returns the lines of a run's metrics (or of `TIMINGS`) in order, each with its "step"."""
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in line.items()}
        for line in _lines(Path(folder) / file)
    ]
