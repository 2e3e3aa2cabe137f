"""A training run between two steps: its state, and how a step is saved and handed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from notepad_jax.checkpoint.handoff import Handoff
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.engine.engines import Engines
from notepad_jax.engine.service import EngineService
from notepad_jax.parallel import hosts
from notepad_jax.planner.peak import Peak
from notepad_jax.rollout.dynamic_sampling import Rollout
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.setup import learner
from notepad_jax.setup.config.whole import Training
from notepad_jax.setup.learner import Learner
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import callbacks, partial_rollout
from notepad_jax.training.callbacks import Callback
from notepad_jax.training.fleet import Fleet
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.training.validation import Validation
from notepad_jax.types import PolicySnapshot


@dataclasses.dataclass
class Run:
    """The state of a training run, alive as long as the run."""

    config: Training
    rollouts: Rollouts
    driver: EngineService | Engines
    ledger: Ledger
    learner: Learner
    start: Mapping[str, str]  # the policy that it began with, by content
    checkpoints: Checkpoints
    handoff: Handoff
    fleet: Fleet | None  # whose readers read; None: the engine here does
    under_way: partial_rollout.UnderWay
    validation: Validation
    screen: Screen
    step: int  # steps done
    good: int  # the last step whose update was finite, or that had none
    saved: int | None  # the last step on disk
    seen: Mapping[str, float]  # what of the policy the engine samples with (`learner.seen`)
    peak: Peak | None  # of the devices that learn


class Diverged(ValueError):
    """Updates that are not finite, several in a row."""


async def save_and_hand_over(run: Run) -> None:
    """Saves the step if it is due; the engine adopts its parameters either way.

    What it read with is let go by then, or, without `engine.give_back`, when it has adopted.
    """
    run.good, last = run.step, run.step == run.config.steps
    if run.step % run.config.checkpoint.every == 0 or last or run.validation.due(run.step):
        save(run, run.ledger)
    if run.fleet:
        hand_to_readers(run)
    else:
        await run.driver.adopt(published(run, run.step), drain=True)


def start_reading(run: Run, anew: bool) -> None:
    """Hands the first policy over; where a run goes on, what readers had begun is taken up.

    Not where it begins `anew` at a step that it was past.
    """
    if run.fleet:
        run.fleet.begin(run.step, anew)
        hand_to_readers(run)
    else:
        run.driver.start_with(published(run, run.step))


def learning_version(run: Run) -> int:
    """Returns the version of the policy that learns: of readers each step has one of its own."""
    return run.step if run.fleet else run.driver.version


async def rolled(run: Run, version: int) -> tuple[Rollout, dict[str, float]]:
    """Returns the next step's rollout and its metrics: read here, or when readers have.

    Raises Stopped if the run was told to stop; what has ended is kept, here or by readers.
    """
    rolling, step = run.rollouts.step(run.ledger, version), run.step + 1
    if run.fleet is None:
        return await run.under_way.rolled(step, version, run.ledger.next, rolling)
    run.under_way.replays.begin({})  # the engine here validates: it asks no turn of the last time
    waited = await run.under_way.stop.until(rolling)
    if waited.cancelled():
        run.under_way.stop.check(f"while step {step} was read, which readers go on with")
    return waited.result()


def hand_to_readers(run: Run) -> None:
    """Publishes the step; one that learnt nothing, too, or readers would wait for it."""
    snapshot = PolicySnapshot(run.step, run.learner.state.masters)
    run.fleet.publish(snapshot, run.ledger, run.saved)


def end_here(run: Run) -> None:
    """Saves what was learnt since the last step that was due: the run ends here, or stops."""
    if run.saved != run.good:
        save(run, run.ledger, step=run.good)
    run.under_way.done(run.saved)


def called(run: Run, callback: Sequence[Callback], metrics: Mapping[str, float]) -> bool:
    """Calls what is called after a step; returns whether the run goes on.

    The step is saved first where it does not, and where a callback fails: CallbackFailed.
    """
    try:
        more = callbacks.go_on(callback, run.step, metrics)
    except callbacks.CallbackFailed:
        if hosts.count() == 1:  # saving is done by all together, and others may be elsewhere
            end_here(run)
        raise
    if not more:
        end_here(run)
    return more


def skipped(metrics: dict[str, float]) -> bool:
    """Whether the step learnt nothing because none of its updates was finite."""
    return 0 < metrics.get("update/skipped", 0) == metrics["update/optimizer_steps"]


async def keep_last_good(run: Run, before: Ledger) -> None:
    """After a skipped step: the last good one is on disk, and nothing newer ever hides it.

    The weights are still that step's: there is nothing to hand over, but to an engine that gave
    them back. `before` is the account before the step; a resumed run draws again what it drew.
    """
    if run.saved != run.good:
        save(run, before, step=run.good)
    in_a_row, most = run.step - run.good, run.learner.plan.max_skipped
    if in_a_row >= most:
        raise Diverged(
            f"no update of the last {in_a_row} rollouts was finite; they were skipped "
            f"(grpo.max_skipped is {most}); the last good step is {run.good}, kept in "
            f"{run.checkpoints.folder}: go on from it with a lower optimizer.learning_rate, or "
            f"look at what those steps read"
        )
    if run.fleet:
        hand_to_readers(run)
    elif run.config.engine.give_back:
        await run.driver.adopt(published(run, run.good))


def save(run: Run, ledger: Ledger, step: int | None = None) -> None:
    """Saves the learner as it is, as `step` (the current one), with the account `ledger`."""
    learning, step = run.learner, run.step if step is None else step
    meta = {
        "seed": run.config.seed,
        "optimizer_steps": int(learning.state.step),
        "policy": dataclasses.asdict(learning.config),
        "start": run.start,
    }
    params, opt = learner.saved(learning)
    data = {
        **run.rollouts.saved(ledger),
        **run.validation.saved(),
        **learner.saved_data(learning),
    }
    run.checkpoints.save(step, params, opt, data, meta)
    run.saved = step


def published(run: Run, step: int) -> PolicySnapshot:
    """Hands what is trained, step `step`, to the engine, in its dtype; returns the whole."""
    run.handoff.publish(PolicySnapshot(step, run.learner.state.masters))
    snapshot = run.handoff.adopt()
    if snapshot.version != step:
        raise RuntimeError(f"step {step} was published and step {snapshot.version} arrived")
    run.seen = learner.seen(run.learner, snapshot.params)
    return snapshot
