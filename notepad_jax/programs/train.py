"""`notepad-jax train`: rollout, reward, update, hand-off, again.

One step reads like this: draw documents; read every question G times with the engine;
drop groups that teach nothing; learn from the others (`learner`); save a checkpoint; the
engine adopts the new parameters. Every random number is a function of (seed, step, task,
sample, turn), and the position in the data is part of the checkpoint, so a run that was
killed continues with the same batches, noise and metrics. Above: cli and quickstart; below:
everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from notepad_jax.checkpoint.handoff import Handoff, InProcess, ThroughStorage
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.data.records import Records, by_source, generated, of_files
from notepad_jax.engine.service import EngineService
from notepad_jax.model import parameters
from notepad_jax.programs import configuration, learner, parts
from notepad_jax.programs.learner import Learner
from notepad_jax.rollout import archive, collector, groups, rewards
from notepad_jax.rollout.buffer import GroupBuffer
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.identity import write_json
from notepad_jax.telemetry.metrics import CONFIG, RunLog
from notepad_jax.telemetry.progress import Screen
from notepad_jax.types import Group, PolicySnapshot, Task

TRAINING_DOCUMENTS = range(2**30)  # document seeds; evaluation uses others
COLUMNS = ("step", "reward", "kept", "clip", "gap max", "entropy", "rollout s", "update s")


@dataclasses.dataclass
class Run:
    """What lives as long as a training run."""

    config: ConfigDict
    reader: collector.Reader
    score: rewards.Score
    records: Records
    driver: EngineService
    buffer: GroupBuffer
    learner: Learner
    checkpoints: Checkpoints
    handoff: Handoff
    step: int  # steps done
    good: int  # the last step whose update was finite, or that had none
    saved: int | None  # the last step on disk


class Diverged(ValueError):
    """Updates that are not finite, several in a row."""


def train(config: ConfigDict, folder: Path, screen: Screen, resume: bool = False) -> Path:
    """Runs the training in the new folder `folder`, or continues one; returns its checkpoints.

    Raises ValueError for a config that cannot work, and as `run_folder.opened` does. Whatever
    is refused, nothing that was in the folder has changed.
    """
    with run_folder.opened(folder, resume):
        return asyncio.run(_train(config, folder, screen, resume))


async def _train(config: ConfigDict, folder: Path, screen: Screen, resume: bool) -> Path:
    settings = configuration.plain(config)
    with contextlib.ExitStack() as stack:
        if not resume:
            write_json(folder / CONFIG, settings)  # so that a start that is killed can be resumed
        run = prepare(config, folder, resume, stack)
        log = stack.enter_context(RunLog(folder, resume_step=run.step + 1 if resume else None))
        write_json(folder / CONFIG, settings)  # nothing refused them
        table = screen.table("reinforcement learning", COLUMNS)
        bar = screen.bar("train", config.steps, "steps")
        bar.advance(run.step)
        async with run.driver:
            while run.step < config.steps:
                drawn = run.records.get_state()
                metrics, timings, sampled = await one_step(run)
                log.write(run.step, metrics, timings)
                archive.append(
                    folder / "trajectories.jsonl", sampled[: config.rollout.archive],
                    run.reader, run.step,
                )  # fmt: skip
                if _skipped(metrics):
                    _keep_last_good(run, drawn)
                else:
                    await save_and_hand_over(run)
                bar.advance(1, reward=metrics["reward"])
                table.row(**_shown(run.step, metrics, timings))
        bar.finish()
    return folder / "checkpoints"


def prepare(config: ConfigDict, folder: Path, resume: bool, stack: contextlib.ExitStack) -> Run:
    """Loads the policy and puts the parts together, where the last checkpoint left them."""
    # What can be wrong with a config is found out before anything is written or removed.
    learner.settings_of(config)
    policy = parts.load_policy(config.policy, config.dtype)
    template = parts.template(config.reading, policy)
    reading = parts.rules(config.reading)
    reader = collector.Reader(
        tokenizer=policy.tokenizer,
        template=template,
        rules=reading,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        group_size=config.rollout.group_size,
        max_document=config.data.tokens,
    )
    records, score = _records(config), rewards.by(config.tasks.reward)
    handoff = _handoff(config.checkpoint, folder, policy)
    driver = parts.service(config.engine, policy, reading, template, PolicySnapshot(-1, None))
    learning = learner.prepare(config, policy.config, policy.params)
    del policy  # the starting weights live on in the learner alone

    checkpoints = stack.enter_context(
        Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep)
    )
    step, fresh = 0, not resume or checkpoints.latest() is None
    if not fresh:
        saved = checkpoints.restore(*learner.restore_target(learning))
        records.set_state(saved.data)
        learner.resume(learning, saved)
        step = saved.step
    run = Run(
        config=config,
        reader=reader,
        score=score,
        records=records,
        driver=driver,
        buffer=GroupBuffer(config.rollout.max_staleness),
        learner=learning,
        checkpoints=checkpoints,
        handoff=handoff,
        step=step,
        good=step,
        saved=None if fresh else step,
    )
    params = learner.params(learning)
    if fresh:
        _save(run, params, records.get_state())
    run.driver.start_with(_published(run, params))
    return run


def _handoff(checkpoint: ConfigDict, folder: Path, policy: parts.LoadedPolicy) -> Handoff:
    """Returns the bridge to the engine, which asks for the dtype that it keeps weights in."""
    if checkpoint.rollout_dtype not in ("", *parameters.ROLLOUT_DTYPES):
        known = ", ".join(map(repr, parameters.ROLLOUT_DTYPES))
        raise ValueError(
            f"checkpoint.rollout_dtype is {checkpoint.rollout_dtype!r}; use one of {known}"
        )
    dtype = checkpoint.rollout_dtype or policy.config.dtype
    wanted = parameters.rollout_target(policy.config, policy.params, dtype)
    if checkpoint.handoff == "memory":
        return InProcess(wanted)
    if checkpoint.handoff != "storage":
        raise ValueError(f"checkpoint.handoff is {checkpoint.handoff!r}; use 'storage' or 'memory'")
    if checkpoint.every != 1:
        raise ValueError(
            f"checkpoint.every is {checkpoint.every}, but handoff='storage' reads each step's "
            f"checkpoint; use every=1, or handoff='memory'"
        )
    return ThroughStorage(folder / "checkpoints", wanted)


def _records(config: ConfigDict) -> Records:
    """Returns where the run draws its tasks: the files that are named, or the generator."""
    if config.tasks.files:
        sources = by_source(config.tasks.files)
        return of_files(sources, config.seed, _weights(config.tasks.weights))
    make = functools.partial(_document, config.data.to_dict())
    make(TRAINING_DOCUMENTS.start)
    return generated(make, config.seed, documents=TRAINING_DOCUMENTS)


def _weights(words: Sequence[str]) -> dict[str, float]:
    weights = {}
    for word in words:
        name, _, weight = word.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ValueError(f"tasks.weights has {word!r}; write SOURCE=NUMBER") from None
    return weights


def _document(data: dict[str, Any], seed: int) -> tuple[Task, ...]:
    return make_tasks(seed, **data)


# ---------------------------------------------------------------- one step


async def one_step(run: Run) -> tuple[dict[str, float], dict[str, float], list[Group]]:
    """Rollout and update; returns (metrics, timings, informative groups)."""
    config, now = run.config, run.driver.version
    began = time.perf_counter()
    kept, stats = await groups.collect_informative(
        lambda missing: _draw(run.records, config.rollout.documents),
        lambda tasks: collector.collect(
            tasks, run.driver, run.reader, config.seed, run.step, score=run.score
        ),
        wanted_groups=config.rollout.documents * _questions(config),
        max_rounds=config.rollout.max_rounds,
    )
    rolled = time.perf_counter()
    run.buffer.add(kept, now)
    batch_groups = run.buffer.take(len(kept), now)
    engine = run.driver.take_stats()
    metrics = stats.metrics() | {
        "rollout/prefix_tokens": engine.prefix_tokens,
        "rollout/prefix_tokens_saved": engine.prefix_tokens_saved,
        "rollout/tail_tokens": engine.tail_tokens,
        "rollout/draft_tokens": engine.draft_tokens,
        "rollout/decode_tokens": engine.decode_tokens,
        "groups/dropped_stale": run.buffer.dropped_stale,
    }
    packed_tokens = 0
    if batch_groups:
        learnt, packed_tokens = learner.learn(
            run.learner, batch_groups, metrics["groups/kept_share"]
        )
        metrics |= learnt
    run.step += 1
    ended = time.perf_counter()
    sampled = engine.prefix_tokens + engine.tail_tokens + engine.decode_tokens
    timings = {
        "rollout_seconds": rolled - began,
        "update_seconds": ended - rolled,
        "rollout_tokens_per_second": sampled / (rolled - began),
        "update_tokens_per_second": packed_tokens / (ended - rolled),
    }
    return metrics, timings, batch_groups


def _questions(config: ConfigDict) -> int:
    """Returns how many questions a sample asks; task files have one a document."""
    return 1 if config.tasks.files else config.data.questions


def _draw(records: Iterator[tuple[Task, ...]], documents: int) -> list[Task]:
    return [task for _ in range(documents) for task in next(records)]


# ---------------------------------------------------------------- checkpoint and hand-off


async def save_and_hand_over(run: Run) -> None:
    """Saves the step if it is due; the engine adopts its parameters either way."""
    params, run.good = learner.params(run.learner), run.step
    if run.step % run.config.checkpoint.every == 0 or run.step == run.config.steps:
        _save(run, params, run.records.get_state())
    snapshot = _published(run, params)
    del params  # with adapters it is a policy of its own, and the engine is about to hold two
    await run.driver.adopt(snapshot, drain=True)


def _skipped(metrics: dict[str, float]) -> bool:
    """Whether the step learnt nothing because none of its updates was finite."""
    return 0 < metrics.get("update/skipped", 0) == metrics["update/optimizer_steps"]


def _keep_last_good(run: Run, drawn: Any) -> None:
    """After a skipped step: the last good one is on disk, and nothing newer ever hides it.

    The weights are still that step's, so there is nothing to hand over. `drawn` is where the
    data stood before the step; a resumed run draws it again.
    """
    if run.saved != run.good:
        _save(run, learner.params(run.learner), drawn, step=run.good)
    in_a_row, most = run.step - run.good, run.learner.plan.max_skipped
    if in_a_row >= most:
        raise Diverged(
            f"no update of the last {in_a_row} rollouts was finite; they were skipped "
            f"(grpo.max_skipped is {most}); the last good step is {run.good}, kept in "
            f"{run.checkpoints.folder}: go on from it with a lower optimizer.learning_rate, or "
            f"look at what those steps read"
        )


def _save(run: Run, params: Any, drawn: Any, step: int | None = None) -> None:
    """Saves the learner as it is, as `step` (the current one), with the data at `drawn`."""
    learning, step = run.learner, run.step if step is None else step
    meta = {
        "seed": run.config.seed,
        "optimizer_steps": int(learning.state.step),
        "policy": dataclasses.asdict(learning.config),
    }
    beside = learner.saved_beside(learning, params)
    run.checkpoints.save(step, params, beside, drawn, meta)
    run.saved = step


def _published(run: Run, params: Any) -> PolicySnapshot:
    """Hands the trainer's parameters to the engine, in the dtype that it keeps them in.

    The hand-off compares checksums before it casts or quantises.
    """
    run.handoff.publish(PolicySnapshot(run.step, params))
    snapshot = run.handoff.adopt()
    if snapshot.version != run.step:
        raise RuntimeError(f"step {run.step} was published and step {snapshot.version} arrived")
    return snapshot


def _shown(step: int, metrics: dict[str, float], timings: dict[str, float]) -> dict[str, Any]:
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
