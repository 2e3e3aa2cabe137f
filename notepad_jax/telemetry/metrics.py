"""The metrics of a run, on disk: one JSON line per step, the same for TensorBoard and `sinks`.

`metrics.jsonl` holds what the algorithm computed, `ledger.jsonl` what became of every draw,
`timings.jsonl` what the clock said. They are apart so that the promise "kill, resume, and the
metrics that follow are identical" can be checked with `cmp`: resuming at step k drops every
line of step k or later, also a line that a kill or a full disk cut in the middle, and the run
writes them again. Every line carries a digest of itself (`lines`), so a changed one is said.
TensorBoard events are written with parts of tensorboardX, which needs no TensorFlow: its
SummaryWriter writes from a thread, where a full disk ends the thread and the next steps wait for
ever. Above: the programs.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar, text

from notepad_jax.telemetry import lines
from notepad_jax.telemetry.identity import write_whole
from notepad_jax.telemetry.sinks import Sinks

METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
LEDGER = "ledger.jsonl"
CONFIG = "config.json"
EVENTS = "tensorboard"


class RunLog:
    """The metrics log of a run; owns the files of one run folder; a context manager.

    `resume_step` None starts a run (the folder must have no metrics yet); k continues one
    whose next step is k. `sinks` get a copy of the numbers and are closed with it.
    """

    def __init__(self, folder: str | Path, sinks: Sinks, resume_step: int | None = None) -> None:
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
        self._events = _open_events(self.folder / EVENTS, resume_step)
        self._sinks = sinks

    def _refuse_to_mix(self) -> None:
        found = read_metrics(self.folder)
        if found:
            raise ValueError(
                f"{self.folder} already holds {len(found)} lines of metrics, the last of step "
                f"{found[-1]['step']}; resume that run, or choose another run name"
            )

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float] | None = None,
        account: Mapping[str, Any] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Appends one line per file and flushes: a kill loses nothing that was written.

        `account` is what became of the step's draws, JSON values; `texts` are samples for
        TensorBoard's page of texts, by name.
        """
        _append(self._metrics, step, _numbers(metrics))
        if timings:
            _append(self._timings, step, _numbers(timings))
        if account:
            _append(self._ledger, step, account)
        numbers = {**metrics, **(timings or {})}
        summaries = [scalar(name, float(value)) for name, value in numbers.items()]
        summaries += [text(name, said) for name, said in (texts or {}).items()]
        for summary in summaries:
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()
        self._sinks.write(step, {name: float(value) for name, value in numbers.items()})

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._timings.close()
        self._ledger.close()
        self._events.close()
        self._sinks.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> IO[bytes]:
    return path.open("ab")


def _open_events(folder: Path, resume_step: int | None) -> EventsWriter:
    """Begins a file of events, which hides those of `resume_step` and later in older files."""
    folder.mkdir(exist_ok=True)
    events = EventsWriter(str(folder / "events"))
    if resume_step is not None:
        start = SessionLog(status=SessionLog.START)
        events.write_event(Event(wall_time=time.time(), step=resume_step, session_log=start))
    return events


def _append(file: IO[bytes], step: int, values: Mapping[str, Any]) -> None:
    file.write(lines.sealed({"step": step, **values}))
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
    if path.exists():
        write_whole(path, b"".join(line for line, found in _lines(path) if found["step"] < step))


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Returns the finished lines of a file, as they stand there and as values."""
    found = []
    for number, line, values in lines.lines(path):
        if values is None or not isinstance(values.get("step"), int):
            raise ValueError(
                f"line {number} of {path} is damaged; take it out: the run goes on without it"
            )
        found.append((line, values))
    return found


def read_metrics(folder: str | Path, file: str = METRICS) -> list[dict[str, float]]:
    """Returns the lines of a run's metrics (or of `TIMINGS`) in order, each with its "step"."""
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in line.items()}
        for _, line in _lines(Path(folder) / file)
    ]
