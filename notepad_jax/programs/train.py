"""`notepad-jax train`: rollout, reward, update, hand-off, again.

One step reads like this: draw documents; read every question G times with the engine;
drop groups that teach nothing; give each trajectory its advantage; pack; one optimizer
step; save a checkpoint; the engine adopts the new parameters. Every random number is a
function of (seed, step, task, sample, turn), and the position in the data is part of the
checkpoint, so a run that was killed continues with the same batches, noise and metrics.
Above: cli and quickstart; below: everything.
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

import jax
from ml_collections import ConfigDict

from notepad_jax.checkpoint.handoff import Handoff, InProcess, ThroughStorage
from notepad_jax.checkpoint.manager import Checkpoints, abstract
from notepad_jax.data.records import Records, by_source, generated, of_files
from notepad_jax.engine.driver import EngineDriver
from notepad_jax.grpo import advantages, packing, update
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer
from notepad_jax.model import lora, parameters
from notepad_jax.programs import configuration, parts
from notepad_jax.rollout import archive, collector, groups, rewards
from notepad_jax.rollout.buffer import GroupBuffer
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import RunLog
from notepad_jax.telemetry.progress import Screen
from notepad_jax.types import Group, PolicySnapshot, Task

TRAINING_DOCUMENTS = range(2**30)  # document seeds; evaluation uses others
COLUMNS = ("step", "reward", "kept", "clip", "gap max", "entropy", "rollout s", "update s")


@dataclasses.dataclass
class Run:
    """What lives as long as a training run."""

    config: ConfigDict
    policy: parts.LoadedPolicy
    reader: collector.Reader
    score: rewards.Score
    records: Records
    driver: EngineDriver
    buffer: GroupBuffer
    optimizer: Any
    settings: update.UpdateSettings
    state: update.TrainState  # of the policy's parameters, or of adapters
    frozen: update.Frozen | None  # what the adapters adapt
    checkpoints: Checkpoints
    handoff: Handoff
    step: int  # steps done


def train(config: ConfigDict, folder: Path, screen: Screen, resume: bool = False) -> Path:
    """Runs (or continues) the training in `folder`; returns the folder of its checkpoints.

    Raises ValueError for a config that cannot work, or a folder that already holds a run.
    """
    return asyncio.run(_train(config, folder, screen, resume))


async def _train(config: ConfigDict, folder: Path, screen: Screen, resume: bool) -> Path:
    with contextlib.ExitStack() as stack:
        run = prepare(config, folder, resume, stack)
        log = stack.enter_context(RunLog(folder, resume_step=run.step + 1 if resume else None))
        log.config(configuration.plain(config))
        table = screen.table("reinforcement learning", COLUMNS)
        bar = screen.bar("train", config.steps, "steps")
        bar.advance(run.step)
        async with run.driver:
            while run.step < config.steps:
                metrics, timings, sampled = await one_step(run)
                log.write(run.step, metrics, timings)
                archive.append(
                    folder / "trajectories.jsonl", sampled[: config.rollout.archive],
                    run.reader, run.step,
                )  # fmt: skip
                await save_and_hand_over(run)
                bar.advance(1, reward=metrics["reward"])
                table.row(**_shown(run.step, metrics, timings))
        bar.finish()
    return folder / "checkpoints"


def prepare(config: ConfigDict, folder: Path, resume: bool, stack: contextlib.ExitStack) -> Run:
    """Loads the policy and puts the parts together, where the last checkpoint left them."""
    # What can be wrong with a config is found out before the run's folder exists.
    advantages.of_groups(config.grpo.advantage, ())
    if config.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is {config.rollout.group_size}; an advantage compares the "
            f"readings of a group, so use at least 2"
        )
    policy = parts.load_policy(config.policy)
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
    settings = update.UpdateSettings(
        clip_low=config.grpo.clip_low,
        clip_high=config.grpo.clip_high,
        dual_clip=config.grpo.dual_clip,
        kl_weight=config.grpo.kl_weight,
        temperature=config.rollout.temperature,
        micro_batch_rows=config.grpo.micro_batch_rows,
        remat=config.grpo.remat,
    )
    optimizer = make_optimizer(OptimizerSettings(**config.optimizer))
    records, score = _records(config), rewards.by(config.tasks.reward)
    frozen, trained = _adapters(config.grpo.lora, config.seed, policy)
    state = update.start(trained, optimizer)
    handoff = _handoff(config.checkpoint, folder)
    driver = parts.driver(config.engine, policy, reading, template, PolicySnapshot(-1, None))

    checkpoints = stack.enter_context(
        Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep)
    )
    step, fresh = 0, not resume or checkpoints.latest() is None
    if not fresh:
        like = abstract(policy.params), abstract(_beside_params(frozen, state))
        saved = checkpoints.restore(*like)
        records.set_state(saved.data)
        step, done = saved.step, saved.meta["optimizer_steps"]
        trained, opt_state = (saved.params, saved.opt) if frozen is None else saved.opt
        state = update.TrainState(jax.numpy.int32(done), trained, opt_state)
    run = Run(
        config=config,
        policy=policy,
        reader=reader,
        score=score,
        records=records,
        driver=driver,
        buffer=GroupBuffer(config.rollout.max_staleness),
        optimizer=optimizer,
        settings=settings,
        state=state,
        frozen=frozen,
        checkpoints=checkpoints,
        handoff=handoff,
        step=step,
    )
    params = _whole(run)
    if fresh:
        _save(run, params)
    run.driver.start_with(_published(run, params))
    return run


def _adapters(
    settings: ConfigDict, seed: int, policy: parts.LoadedPolicy
) -> tuple[update.Frozen | None, Any]:
    """Returns what is frozen, if anything, and what is trained."""
    if not settings.rank:
        return None, policy.params
    chosen = lora.Lora(settings.rank, settings.alpha, tuple(settings.targets))
    adapters = lora.init(policy.config, chosen, jax.random.key(seed))
    return update.Frozen(policy.params, chosen), adapters


def _handoff(checkpoint: ConfigDict, folder: Path) -> Handoff:
    if checkpoint.rollout_dtype not in parameters.ROLLOUT_DTYPES:
        known = ", ".join(map(repr, parameters.ROLLOUT_DTYPES))
        raise ValueError(
            f"checkpoint.rollout_dtype is {checkpoint.rollout_dtype!r}; use one of {known}"
        )
    if checkpoint.handoff == "memory":
        return InProcess()
    if checkpoint.handoff != "storage":
        raise ValueError(f"checkpoint.handoff is {checkpoint.handoff!r}; use 'storage' or 'memory'")
    if checkpoint.every != 1:
        raise ValueError(
            f"checkpoint.every is {checkpoint.every}, but handoff='storage' reads each step's "
            f"checkpoint; use every=1, or handoff='memory'"
        )
    return ThroughStorage(folder / "checkpoints")


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
        packed = _pack(run, batch_groups)
        packed_tokens = packed.stats.packed_tokens
        scale = min(1.0, metrics["groups/kept_share"] / config.grpo.full_rate_at)
        run.state, learnt = update.step(
            run.policy.config, run.optimizer, run.settings, run.state, packed.batch, scale,
            run.frozen,
        )  # fmt: skip
        metrics |= learnt | {
            "update/rate_scale": scale,
            "update/packed_tokens": packed_tokens,
            "update/prefix_tokens_saved": packed.stats.prefix_tokens_saved,
            "update/fill": packed.stats.fill,
        }
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


def _pack(run: Run, batch_groups: list[Group]) -> packing.PackedBatch:
    config = run.config
    packed = packing.pack(
        batch_groups,
        advantages.of_groups(config.grpo.advantage, batch_groups),
        row_length=config.grpo.row_length,
        rows_multiple=config.grpo.micro_batch_rows,
        length_multiple=config.grpo.row_length,  # one width: each further one compiles anew
    )
    if config.grpo.kl_weight:
        reference = update.token_logprobs_of(
            run.policy.config, run.policy.params, packed.batch, config.rollout.temperature,
            config.grpo.micro_batch_rows,
        )  # fmt: skip
        packed = dataclasses.replace(packed, batch=packing.add_reference(packed.batch, reference))
    return packed


# ---------------------------------------------------------------- checkpoint and hand-off


async def save_and_hand_over(run: Run) -> None:
    """Saves the step if it is due; the engine adopts its parameters either way."""
    params = _whole(run)
    if run.step % run.config.checkpoint.every == 0 or run.step == run.config.steps:
        _save(run, params)
    await run.driver.adopt(_published(run, params))


def _whole(run: Run) -> Any:
    """The policy's parameters as of now, adapters added in."""
    if run.frozen is None:
        return run.state.params
    return lora.whole(run.frozen.lora, run.frozen.base, run.state.params)


def _beside_params(frozen: update.Frozen | None, state: update.TrainState) -> Any:
    """What a checkpoint keeps as `opt`: with adapters, them too, for `params` is the sum."""
    return state.opt_state if frozen is None else (state.params, state.opt_state)


def _save(run: Run, params: Any) -> None:
    meta = {
        "seed": run.config.seed,
        "optimizer_steps": int(run.state.step),
        "policy": dataclasses.asdict(run.policy.config),
    }
    run.checkpoints.save(
        run.step, params, _beside_params(run.frozen, run.state), run.records.get_state(), meta
    )


def _published(run: Run, params: Any) -> PolicySnapshot:
    """Hands the trainer's parameters to the engine, in the dtype that it keeps them in.

    The hand-off compares checksums before it casts or quantises.
    """
    run.handoff.publish(PolicySnapshot(run.step, params))
    wanted = parameters.rollout_target(
        run.policy.config, params, run.config.checkpoint.rollout_dtype
    )
    snapshot = run.handoff.adopt(wanted)
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
