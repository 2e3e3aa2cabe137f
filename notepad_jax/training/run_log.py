"""A training run's log: its JSONL files and the printed table, step by step.

Of several processes the first tells; the others would say the same. Above: train; below:
telemetry and rollout.archive.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from notepad_jax import keys
from notepad_jax.grpo import advantages, algorithm
from notepad_jax.parallel import hosts
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.trace import TraceFile
from notepad_jax.rollout import archive
from notepad_jax.rollout.dynamic_sampling import Rollout
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.setup import curriculum, task_stream
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry import run_folder, sinks
from notepad_jax.telemetry.identity import write_sealed
from notepad_jax.telemetry.metrics import CONFIG, METRICS, RunLog, read_metrics
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import health, record, rollouts
from notepad_jax.types import Group

COLUMNS = ("step", "reward", "kept", "clip", "gap max", "entropy", "rollout s", "update s")


@dataclasses.dataclass(frozen=True)
class Tell:
    """The functions that log a run's steps and validations."""

    # (step, metrics, timings, the account before the step, what was sampled): writes the step's
    # lines and returns what shows that it is done, to be called when it is saved.
    step: Callable[
        [int, Mapping[str, float], Mapping[str, float], Ledger, Rollout], Callable[[], None]
    ]
    validated: Callable[[int, Mapping[str, float]], None]  # a line of its own, of this step


@contextlib.contextmanager
def opened(folder: Path, resume: bool) -> Iterator[Path]:
    """Opens and locks the run's folder for all processes: the first one does, and tells if not.

    Raises as `run_folder.opened` does; where there are several processes, in all of them.
    """
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(run_folder.opened(folder, resume))

        hosts.broadcast(begin)
        yield folder


@contextlib.contextmanager
def telling(
    config: Training, folder: Path, screen: Screen, reader: Reader, done: int, resume: bool
) -> Iterator[Tell]:
    """Opens the run's log files and yields the functions that log; `done` steps lie behind."""
    if not hosts.first():
        yield Tell(lambda *step: lambda: None, lambda *validated: None)
        return
    with (
        RunLog(folder, _sinks(config, folder, screen), done + 1 if resume else None) as log,
        TraceFile(folder / archive.FILE) as archived,
    ):
        if resume:
            record.change(folder, done, config, record.saved(folder))
        write_sealed(folder / CONFIG, keys.plain(config))  # nothing refused it
        record.put_beside(folder, config)
        _say_what_is_missing(folder, done, screen)
        for problem in archive.take_back(archived, done + 1):
            screen.warn(str(problem))
        table = screen.table("reinforcement learning", COLUMNS, config.steps, done)
        truncated, began, retiring, stage = False, False, True, None
        limits = health.limits_of(config)
        lines = health.lines_of(read_metrics(folder))
        said = {one.name for one in health.course(lines, limits)}

        def tell(
            step: int, metrics: Mapping[str, float], timings: Mapping[str, float],
            before: Ledger, rollout: Rollout,
        ) -> Callable[[], None]:  # fmt: skip
            nonlocal truncated, began, retiring, stage
            if retiring and (kept := rollout.ledger.rates.kept):
                retiring = False
                screen.say(task_stream.not_retired(kept))
            if (chunks := metrics.get(task_stream.MOST_CHUNKS)) != stage:
                stage = chunks
                screen.say(curriculum.told(step, int(chunks)))
            if not began and rollout.batch:
                began = True
                for idle in algorithm.idle_on(config.grpo.advantage, rollout.batch):
                    screen.say(idle)
            if metrics["data/truncated_documents"] and not truncated:
                truncated = True
                screen.say(task_stream.truncated(metrics, step, config))
            texts = {"reading": archive.sample(rollout.batch[0], reader)} if rollout.batch else {}
            log.write(step, metrics, timings, rollouts.account(before, rollout), texts)
            kept = rollout.batch[: config.rollout.archive]
            found = _advantages(config, rollout.batch)[: len(kept)]
            turns = config.rollout.archive_turns
            archive.append(archived, kept, reader, step, found, turns, rollout.proximal)
            for one in rollout.failed:
                screen.say(f"step {step}: nothing is learnt from one group: {one}")
            lines.append({**metrics, "step": step})
            for one in health.at_last(lines, limits):
                if one.name not in said:
                    said.add(one.name)
                    screen.warn(str(one))

            def done() -> None:
                table.row(**_shown(step, metrics, timings))

            return done

        yield Tell(tell, log.write)
        table.finish()


def _sinks(config: Training, folder: Path, screen: Screen) -> sinks.Sinks:
    values = keys.flat(keys.plain(config))
    return sinks.Sinks(config.sinks, folder, values, screen.warn)


def _advantages(config: Training, batch: Sequence[Group]) -> list[np.ndarray]:
    """Returns what readings were learnt from by, [G] of each group; nothing where others knew it.

    A KL that is taken off rewards, and scales that are remembered, are the trainer's.
    """
    g = config.grpo
    others = (g.kl_weight and g.kl_in == "reward") or (
        g.scale_memory and g.advantage in advantages.SCALES
    )
    if not batch or others:
        return []
    return advantages.of_groups(g.advantage, batch)


def _say_what_is_missing(folder: Path, done: int, screen: Screen) -> None:
    """Checkpoints in a bucket outlive the disk on which the run's lines are."""
    lines = read_metrics(folder)
    last = lines[-1]["step"] if lines else 0
    if last < done:
        screen.warn(
            f"{folder / METRICS} ends at step {last}, and the run goes on after step {done}: what "
            f"was told of the steps between was lost with its disk"
        )


def _shown(step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> dict[str, Any]:
    return {
        "step": step,
        "reward": metrics["reward"],
        "kept": f"{metrics['groups/kept']}/{metrics['groups/sampled']}",
        "clip": metrics.get("clip_share", 0.0),
        "gap max": metrics.get("logprob_gap_max", 0.0),
        "entropy": metrics.get("entropy_update", 0.0),
        "rollout s": timings["rollout_seconds"],
        "update s": timings["update_seconds"],
    }
