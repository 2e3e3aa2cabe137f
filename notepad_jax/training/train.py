"""The training loop (`notepad-jax train`): rollout, reward, update, hand-off, again.

One step reads like this: draw documents; read every question G times with the engine; replace
groups that teach nothing; learn from the others (`learner`); save a checkpoint; the engine adopts
the new parameters. Every random number is a function of (seed, ordinal of the draw, question,
sample, turn), and the account of all draws, with the groups that wait, is part of the checkpoint,
so a run that was killed continues with the same batches, noise and metrics; one that is told to
stop (`stopping`) keeps the turns of the rollout under way, too (`partial_rollout`). What a run is
between two steps, and how it is saved, is `run`. Above: commands, `api` and quickstart; below:
everything.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from notepad_jax import keys, waiting
from notepad_jax.checkpoint.handoff import Handoff, InProcess, ThroughStorage
from notepad_jax.checkpoint.steps import check_place, place_of, steps_in
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.engine.metered import Metered
from notepad_jax.grpo import algorithm, micro_batches
from notepad_jax.parallel import hosts, mesh
from notepad_jax.planner import peak
from notepad_jax.rollout import dynamic_sampling, groups
from notepad_jax.rollout.dynamic_sampling import Rollout
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.setup import builders, compiled, learner, sizes, stopping, task_stream
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry import sinks
from notepad_jax.telemetry.identity import write_sealed
from notepad_jax.telemetry.metrics import CONFIG, read_metrics
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import (
    base_fingerprint,
    decided,
    fleet,
    partial_rollout,
    record,
    rollout_settings,
    run_log,
    throughput,
    validation,
)
from notepad_jax.training.callbacks import Callback
from notepad_jax.training.fleet import Fleet
from notepad_jax.training.fleet_processes import beside
from notepad_jax.training.profiling import Profiler
from notepad_jax.training.run import (
    Run,
    called,
    end_here,
    keep_last_good,
    learning_version,
    rolled,
    save,
    save_and_hand_over,
    skipped,
    start_reading,
)
from notepad_jax.training.run_log import Tell
from notepad_jax.types import PolicySnapshot


def train(
    config: Training, folder: Path, screen: Screen, resume: bool = False,
    step: int | None = None, told: Sequence[Callback] = (), mended: bool = False,
    profiled: range = range(0),
) -> Path | epath.Path:  # fmt: skip
    """Runs the training in the new folder `folder`, or continues one; returns its checkpoints.

    With `resume` it goes on from the newest good checkpoint, or from `step`; with `mended` also
    where rows of task files were mended since, as they stand. `told` are called
    after every step, and may end the run there (`callbacks`). Of the steps `profiled` there is a
    profile in the folder (`profiling`). Raises ValueError
    for a config that cannot work, a checkpoint that is damaged, a policy or task files that are
    not those that the run began with, and as `run_folder.opened` does. Whatever is refused,
    nothing that was in the folder has changed. On Ctrl-C and SIGTERM it keeps what was begun
    and raises `stopping.Stopped`.
    """
    stop = stopping.Stop()
    with run_log.opened(folder, resume), stop.watching():
        profiler = Profiler(profiled, folder, screen.say)
        return waiting.run(
            _train(config, folder, screen, resume, step, stop, told, mended, profiler)
        )


async def _train(
    config: Training, folder: Path, screen: Screen, resume: bool, step: int | None,
    stop: stopping.Stop, callback: Sequence[Callback], mended: bool, profiler: Profiler,
) -> Path | epath.Path:  # fmt: skip
    if not resume and hosts.first():  # so that a start that is killed can be resumed
        write_sealed(folder / CONFIG, keys.plain(config))
    run = prepare(config, folder, screen, resume, step, stop, mended)
    told = run_log.telling(
        _named(config, run), folder, screen, run.rollouts.reader, run.step, resume
    )
    keeping = hosts.keeping(run.under_way.keep)
    with stop.patiently(), keeping, told as tell, profiler, beside(run, folder):
        async with run.driver:
            await validate(run, tell, folder, stop)
            while run.step < config.steps and not run.validation.exhausted:
                before = run.ledger
                try:
                    with profiler.step(run.step + 1):
                        metrics, timings, rollout = await one_step(run)
                except stopping.Stopped as stopped:
                    # Others may be in the middle of something, and saving is done by all together.
                    if stopped.patient and hosts.count() == 1:
                        end_here(run)
                    raise
                done = tell.step(run.step, metrics, timings, before, rollout)
                if skipped(metrics):
                    await keep_last_good(run, before)
                else:
                    await save_and_hand_over(run)
                done()
                run.under_way.done(run.saved)
                stop.check_all(f"after step {run.step}", lambda: end_here(run))
                validated = await validate(run, tell, folder, stop)
                if not called(run, callback, {**metrics, **validated}):
                    break
        if run.fleet:
            run.fleet.end()
    return run.checkpoints.folder


def _named(config: Training, run: Run) -> Training:
    """Returns the config with the step of a run that it began with: it may have newer ones."""
    return keys.changed(config, {"policy": run.start["folder"]})


def check(
    config: Training, folder: Path, resume: bool, step: int | None, mended: bool = False
) -> builders.Words:
    """Raises ValueError for what is wrong and can be known before any weight is loaded.

    That is also whether checkpoints can be written where they are to lie.
    """
    hosts.broadcast(lambda: sinks.check(config.sinks))
    _, settings, _ = learner.settings_of(config)
    there = builders.trainers_mesh(config)
    micro_batches.check_parts(settings.micro_batch_rows, there.shape["fsdp"])
    builders.engines_mesh(config.engine)
    rollout_settings.check(config)
    if not resume and step is not None:
        raise ValueError(f"step {step} is where a run goes on: say --resume as well")
    if not resume and mended:
        raise ValueError("--mended is for a run that goes on: say --resume as well")
    learner.check_start(config.grpo.lora, config.policy)
    words = builders.words(config.policy, config.dtype, builders.to_learn(config))
    task_stream.check_files(config, words.tokenizer)
    validation.check_settings(config, words.tokenizer)
    reading = builders.rules(config.reading, words.tokenizer)
    template = builders.template(config.reading, words)
    sizes.settled(config, template, reading)
    builders.engine_settings(config.engine, words.config, reading, template)
    where = place_of(folder, config.checkpoint.folder)
    if config.checkpoint.folder or hosts.count() > 1:
        check_place(where)
    if not resume and (there := hosts.broadcast(lambda: steps_in(where))):
        raise ValueError(
            f"{where} has steps of an earlier run ({there[-1]} is the last); "
            f"{record.how_to_go_on(config.checkpoint.folder, where)}choose another name (--name), "
            f"or remove them"
        )
    if resume and step is None:
        hosts.broadcast(lambda: record.check_steps(folder, where))
    return words


def prepare(
    config: Training, folder: Path, screen: Screen, resume: bool, step: int | None,
    stop: stopping.Stop | None = None, mended: bool = False,
) -> Run:  # fmt: skip
    """Loads the policy and builds the run, restored from a checkpoint where there is one."""
    asked, anew = config, step is not None
    words = check(config, folder, resume, step, mended)  # before anything is written or removed
    waiting.look()
    config = decided.kept(config, folder, words, resume, screen)
    where = place_of(folder, config.checkpoint.folder)
    checkpoints = Checkpoints(where, keep=config.checkpoint.keep)
    before = hosts.broadcast(lambda: task_stream.before(folder) if resume else {})
    stream = task_stream.opened(config, words.tokenizer, screen, before)
    held_out = validation.items(config, stream, words.tokenizer, screen)
    waiting.look()
    policy = builders.load_policy(
        config.policy, config.dtype, builders.to_learn(config), screen.warn
    )
    waiting.look()
    template = builders.template(config.reading, policy)
    reading = builders.rules(config.reading, policy.tokenizer)
    config = sizes.settled(config, template, reading)
    start, stored = base_fingerprint.content(policy), policy.stored
    digests = [file["digest"] for file in stream.admitted.get("files", ())]
    identity = {**keys.plain(config), "start": start, "bytes of tasks.files": digests}
    begun = partial_rollout.UnderWay(
        folder, identity, stop or stopping.Stop(), screen.warn, config.checkpoint.keep_turns
    )
    nobody = PolicySnapshot(-1, None)
    driver = builders.service(
        config.engine, policy, reading, template, nobody,
        lambda executor: begun.around(Metered(executor, screen.work)),
    )  # fmt: skip
    sampled = rollout_settings.rollouts(config, stream, driver, policy.tokenizer, template, reading)
    held_out = validation.opened(config, held_out, sampled.reader, sampled.probe)
    learning = learner.prepare(config, policy.config, policy.params)
    said = algorithm.idle(learning.plan, learning.settings, rollout_settings.oldest(config))
    for idle in (*said, *rollout_settings.idle(config)):
        screen.say(idle)
    waiting.look()
    wanted = builders.adopted(config, policy.config)
    del policy  # the starting weights live on in the learner alone

    ledger, fresh = Ledger(), step is None and not (resume and checkpoints.steps())
    if fresh:
        step = 0
    else:
        saved = checkpoints.restore(*learner.restore_target(learning), screen.warn, step)
        base_fingerprint.compare(saved.meta.get("start", {}), start, folder)
        ledger = sampled.restored(saved.data, mended)
    checkpoints.take_over()  # nothing is refused from here on
    handoff, apart = _handoff(config, checkpoints, wanted, learning.frozen), None
    if config.fleet.on:
        files = {"files": stream.admitted.get("files", ())}  # alike in all lives of the run
        terms = fleet.terms(config, start, stream.records.identity, files)
        apart = Fleet(where.parent, checkpoints.life, terms, sampled, handoff, screen.say)
        sampled = dataclasses.replace(sampled, apart=apart)
    if not fresh:
        checkpoints.keep_base(learner.base(learning, stored))
        learner.resume(learning, saved)
        step = saved.step
        if held_out.restored(saved.data, screen):
            held_out.mark(checkpoints)
        checkpoints.go_on_from(step)
    waiting.look()
    if hosts.first():
        task_stream.keep(folder, stream, before, step, screen)
    if resume:
        begun.take_up(step)
    run = Run(
        config=config,
        rollouts=sampled,
        driver=driver,
        ledger=ledger,
        learner=learning,
        start=start,
        checkpoints=checkpoints,
        handoff=handoff,
        fleet=apart,
        under_way=begun,
        validation=held_out,
        screen=screen,
        step=step,
        good=step,
        saved=None if fresh else step,
        seen={},
        peak=peak.of(mesh.of(learning.state.masters).devices.flat),
    )
    if run.peak is not None:
        screen.say(f"update/mfu is the share of {run.peak}")
    if fresh:
        named = _named(asked, run)
        record.put_beside(folder, named)  # before there is a step without settings
        checkpoints.keep_base(learner.base(learning, stored))
        save(run, ledger)
        record.begin(folder, named)
    start_reading(run, anew)
    return run


def _handoff(config: Training, checkpoints: Checkpoints, wanted: Any, frozen: Any) -> Handoff:
    """Returns the bridge to the engine, which asks for `wanted`; `frozen` is handed over once."""
    if config.fleet.on:
        kept = config.fleet.lead + config.checkpoint.every + 1
        place = checkpoints.folder.parent / fleet.POLICY
        return ThroughStorage(place, wanted, kept, checkpoints.life, frozen, narrow=True)
    if config.checkpoint.handoff == "memory":
        return InProcess(wanted, frozen)
    return ThroughStorage(checkpoints.folder, wanted, life=checkpoints.life)


# ---------------------------------------------------------------- one step


async def one_step(run: Run) -> tuple[dict[str, float], dict[str, float], Rollout]:
    """One training step, rollout and update; returns (metrics, timings, what was sampled)."""
    began, before, compiling = time.perf_counter(), run.ledger, compiled.watched()
    compiled_before, version = compiling.seconds, learning_version(run)
    rollout, metrics = await rolled(run, version)
    rolled_at, compiled_then = time.perf_counter(), compiling.seconds
    if run.config.engine.give_back:
        run.driver.rest(weights=True)
    metrics |= throughput.of_rollout(
        (run.fleet or run.driver).take_stats(), run.learner.config, learner.adapters(run.learner)
    )
    metrics |= run.seen
    packed_tokens = 0
    if rollout.batch:
        learnt, packed_tokens = learner.learn(
            run.learner, rollout.batch, rollout.share, version,
            groups.by_task(rollout.stats.tasks, rollout.batch),
        )  # fmt: skip
        metrics |= learnt
        if skipped(metrics):
            rollout = dynamic_sampling.without_update(rollout, before)
        rollout = dataclasses.replace(rollout, proximal=run.learner.proximal)
    run.step, run.ledger = run.step + 1, rollout.ledger
    clock = throughput.Clock(
        rollout=rolled_at - began,
        update=time.perf_counter() - rolled_at,
        rollout_compiling=compiled_then - compiled_before,
        update_compiling=compiling.seconds - compiled_then,
    )
    timings = throughput.timings(clock, metrics, packed_tokens, run.peak)
    timings["replayed_turns"] = run.under_way.replays.replayed  # of a rollout that was stopped
    return metrics, timings, rollout


async def validate(run: Run, tell: Tell, folder: Path, stop: stopping.Stop) -> dict[str, float]:
    """Validates the step that the engine holds, if it is due and was not skipped.

    Returns what was found; nothing where nothing was read.
    """
    held_out, step = run.validation, run.step
    if not held_out.due(step) or step != run.good or any(b.step == step for b in held_out.found):
        return {}
    began = time.perf_counter()
    metrics = hosts.broadcast(lambda: validation.told(read_metrics(folder), step))
    if metrics is None or held_out.begun_anew:
        if run.fleet:  # its engine reads nothing else
            await run.driver.adopt(run.handoff.adopt(step), drain=True)
        metrics = await held_out.measure(step, stop, run.screen)
        # Nothing that it read is there when the next rollout begins.
        run.driver.rest(weights=run.fleet is not None)
        run.driver.take_stats()
        tell.validated(step, metrics)
    held_out.add(step, metrics)
    held_out.mark(run.checkpoints)
    for line in validation.lines(held_out, metrics, began):
        run.screen.say(line)
    return metrics
