"""The seven training runs that `kills` kills: tiny, quick, and between them all that is saved.

Each is a `notepad-jax train` of the shipped starter with a few words of its own, and each says
of an uninterrupted run what it did not exercise: a setting in which nothing waits, or no
optimizer state moves, would be resumed correctly by a program that loses both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from notepad_jax.checkpoint import commit
from notepad_jax.checkpoint.steps import steps_in
from notepad_jax.data import files
from notepad_jax.reading.trace import Trace
from notepad_jax.rollout import archive
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import LEDGER, read_metrics
from tests import runs
from tests.support import same_run

ROOT = runs.ROOT
TASKS = ("one_hop.jsonl", "two_hop.jsonl")  # in the folder where a run is started
SMALL = (*runs.SMALL, "--config.optimizer.kind=muon", "--config.optimizer.decay=none")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One kind of run."""

    name: str
    about: str
    steps: int
    every: int  # steps between checkpoints
    words: tuple[str, ...]  # of the command line, beside SMALL
    unexercised: Callable[[Path], Iterator[str]]  # of an uninterrupted run: what it never did
    processes: int = 1  # of one run, with a device each
    bucket: bool = False  # its checkpoints lie in one, as this machine has it

    @property
    def command(self) -> tuple[str, ...]:
        """Everything that changes the config."""
        counts = (f"--config.steps={self.steps}", f"--config.checkpoint.every={self.every}")
        place = ("--config.checkpoint.folder=gs://bucket/runs",) if self.bucket else ()
        return (*SMALL, *counts, *place, *self.words)


def write_tasks(folder: Path) -> None:
    """Writes five tasks to two files, for the setting that reads them."""
    tasks = [task for seed in range(12) for task in make_tasks(seed, 512, 1, unanswerable=0)]
    for name, count in zip(TASKS, (3, 2), strict=True):
        kind = name.removesuffix(".jsonl")
        chosen = [task for task in tasks if task.source.endswith(kind)][:count]
        files.write(folder / name, chosen, itertools.repeat(512))


def _plain(run: Path) -> Iterator[str]:
    yield from _learning(run)
    if not _moved(run, "params"):
        yield "no weight moved between its last two checkpoints"


def _lora(run: Path) -> Iterator[str]:
    yield from _learning(run)
    metrics = read_metrics(run)
    if not any(line.get("kl", 0) > 0 for line in metrics):
        yield "it was never away from the starting policy, so the KL term was zero"
    saved = steps_in(run / "checkpoints")
    if len(metrics) in saved and len(metrics) - 1 in saved:
        yield "it saved every step"


def _files(run: Path) -> Iterator[str]:
    yield from _learning(run)
    ledger = [json.loads(line) for line in (run / LEDGER).open(encoding="utf-8")]
    if not any(line["waiting"] for line in ledger[1:-1:2]):  # of steps 2, 4, ... but not the last
        yield "no group waited in a checkpoint"
    tasks = sum(sum(1 for _ in (run.parents[1] / name).open()) for name in TASKS)
    if not any(line["drawn"][1] - line["drawn"][0] > tasks for line in ledger):
        yield "no step drew more tasks than there are"
    if not any(line["groups/rounds"] > 1 for line in read_metrics(run)):
        yield "dynamic sampling never went a second round"


def _guards(run: Path) -> Iterator[str]:
    yield from _learning(run)
    metrics = read_metrics(run)
    if not any(line["groups/passed_retired"] for line in metrics):
        yield "no draw was passed over because its task had retired"
    if not any(line["groups/passed_no_room"] for line in metrics):
        yield "no draw was passed over because its kind had no room"
    if not any(line["groups/waiting"] for line in metrics[:-1]):
        yield "no group waited"
    if len({line["data/max_chunks"] for line in metrics}) < 2:
        yield "its documents were of one length"


def _rounds(run: Path) -> Iterator[str]:
    yield from _learning(run)
    with Trace(run / archive.FILE) as trace:
        turns = [turn for number, _ in trace.readings() for turn in trace.whole(number).turns]
    if not any(turn.level for turn in turns):
        yield "no two notes were merged"
    if not any(turn.round for turn in turns):
        yield "no document was read in a second round"
    if not any(line.get("turn_advantage") for line in read_metrics(run)):
        yield "no turn had an advantage of its own"


def _learning(run: Path) -> Iterator[str]:
    if not _moved(run, "opt"):
        yield "no optimizer state moved between its last two checkpoints"
    kept = [line["groups/kept"] for line in read_metrics(run)]
    if sum(bool(one) for one in kept) < len(kept) / 2:
        yield "fewer than half of its steps learnt something"


def _moved(run: Path, item: str) -> bool:
    """Whether more than half of the leaves differ between the last two saved steps."""
    steps = steps_in(run / "checkpoints")[-2:]
    places = (commit.place(run / "checkpoints", step) for step in steps)
    first, last = (same_run.leaves(place, item) for place in places)
    return np.mean([not np.array_equal(first[name], last[name]) for name in first]) > 0.5


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "plain", "all weights, Muon, handed over through storage", 10, 1, (), _plain,
        ),
        Setting(
            "lora",
            "adapters, AdamW, KL to the start, bfloat16, handed over in memory, saved every 3rd",
            11,
            3,
            (
                "--config.dtype=bfloat16",
                "--config.grpo.lora.rank=4",
                "--config.grpo.kl_weight=0.1",
                "--config.optimizer.kind=adamw",
                "--config.checkpoint.handoff=memory",
            ),
            _lora,
        ),
        Setting(
            "files",
            "five tasks from files, several rounds and times round a step, groups that wait, "
            "two minibatches, saved every 2nd",
            10,
            2,
            (
                f"--config.tasks.files={','.join(TASKS)}",
                "--config.tasks.weights=synthetic/one_hop=2",
                "--config.rollout.documents=4",
                "--config.rollout.max_rounds=3",
                "--config.rollout.max_staleness=1",
                "--config.grpo.minibatches=2",
                "--config.checkpoint.handoff=memory",
            ),
            _files,
        ),
        Setting(
            "guards",
            "five tasks from files, cut by a curriculum, retired and balanced, with scales over "
            "rollouts and overlong shaping, saved every 2nd",
            10,
            2,
            (
                f"--config.tasks.files={','.join(TASKS)}",
                "--config.tasks.curriculum=1@0,2@5",
                "--config.tasks.retire_at=0.6",
                "--config.tasks.balanced=true",
                "--config.rollout.documents=4",
                "--config.rollout.max_rounds=3",
                "--config.rollout.max_staleness=1",
                "--config.grpo.advantage=task_std",
                "--config.grpo.scale_memory=0.9",
                "--config.grpo.overlong_window=4",
                "--config.grpo.overlong_weight=0.2",
                "--config.checkpoint.handoff=memory",
            ),
            _guards,
        ),
        Setting(
            "rounds",
            "documents read in two parallel rounds, what they note merged; turns kept as they end",
            6, 1,
            (
                "--config.reading.order=parallel",
                "--config.reading.passes=2",
                "--config.reading.memory_update=overwrite_or_keep",
                "--config.reading.chunk_size=64",
                "--config.tasks.memory_reward=recall_gain",
                "--config.grpo.memory_weight=0.25",
                "--config.checkpoint.handoff=memory",
                "--config.checkpoint.keep_turns=8",
            ),
            _rounds,
        ),
        Setting(
            "bucket", "all weights, checkpoints in a bucket, handed over through it", 6, 1, (),
            _plain, bucket=True,
        ),
        Setting(
            "pod", "two processes, of which one is ended and takes the other with it", 6, 1,
            (
                "--config.parallel.devices=0",
                "--config.checkpoint.handoff=memory",
                "--config.grpo.micro_batch_rows=2",
            ),
            _plain, processes=2,
        ),
    )
}  # fmt: skip
