"""Builds a training run's rollouts from its config, and checks what goes together.

Above: train; below: rollouts, which this builds.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from notepad_jax.reading.loop import Reader
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.trace import Trace
from notepad_jax.rollout import imitation, overlong, rewards
from notepad_jax.rollout.dynamic_sampling import Wanted
from notepad_jax.rollout.overlong import Overlong
from notepad_jax.rollout.rewards import Scoring
from notepad_jax.setup import builders, learner, lengths, trace_files
from notepad_jax.setup.config.whole import Training
from notepad_jax.setup.task_stream import TaskStream
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import Completer

_PLAIN = (  # what an error asks for
    "reading.order, passes and heads to serial, 1 and 1, and exits and exit_after to False and 0"
)


def rollouts(
    config: Training, stream: TaskStream, completer: Completer, tokenizer: Tokenizer,
    template: Template, rules: Rules,
) -> Rollouts:  # fmt: skip
    """Returns a run's rollouts. Raises ValueError for a config that cannot work."""
    r = config.rollout
    stream, length = lengths.in_windows(stream, tokenizer, r.window, r.documents, config.seed)
    answers = scoring(config, rewards.Shown(tokenizer, template, rules))
    return Rollouts(
        stream=stream,
        reader=Reader(
            completer, tokenizer, template, rules,
            TurnSampling(r.temperature, r.top_p, template.stop_ids, 0),
            stream.documents(tokenizer, rules.chunk_size, rules.chunk_ends),
        ),
        scoring=rewards.with_memories(answers, config.tasks.memory_reward),
        probe=answers,
        wanted=Wanted(
            r.documents, stream.questions, r.max_rounds, waits(config), stream.balanced,
            config.grpo.advantage == "imitation",
        ),
        group_size=r.group_size,
        seed=config.seed,
        max_failed_share=r.max_failed_share,
        local=r.local,
        shaped=bool(config.grpo.overlong_window),
        retire_at=config.tasks.retire_at if stream.records.tasks else 0.0,
        teacher=_teacher(r.teacher),
        length=length,
    )  # fmt: skip


def _teacher(said: str) -> imitation.Teacher | None:
    """Returns the teacher to imitate. Raises ValueError for a run that has no right reading."""
    if not said:
        return None
    if said == imitation.SCRIPT:
        return imitation.of_script
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(Trace(file))
            for file in trace_files.files(trace_files.existing(said), False)
        ]
        teacher, tasks = imitation.of_readings(found)
    if not tasks:
        raise ValueError(f"{said} has no reading that was right, so there is nothing to imitate")
    return teacher


def check(config: Training) -> None:
    """Raises ValueError for rewards that there are not, and for what does not go together."""
    rewards.with_memories(scoring(config), config.tasks.memory_reward)
    plain, r = builders.rules(config.reading).plain, config.rollout
    if r.local.samples and not plain:
        raise ValueError(
            f"rollout.local.samples is {r.local.samples}, which writes single turns of a serial "
            f"reading again; set it to 0, or {_PLAIN}"
        )
    if r.teacher and not plain:
        raise ValueError(
            f"rollout.teacher is {r.teacher}, whose notes are those of one serial reading; set "
            f"{_PLAIN}"
        )
    if r.window > 1 and config.tasks.balanced and config.tasks.files:
        raise ValueError(
            f"rollout.window is {r.window}, and tasks.balanced passes over draws of a source that "
            f"a batch has no room for, which in a window are those of one length; use one of them"
        )
    _check_fleet(config)


def _check_fleet(config: Training) -> None:
    """Raises ValueError for settings that a run with separate readers cannot have."""
    f = config.fleet
    if not f.on:
        if f.live:
            raise ValueError(
                "fleet.live is true, and nobody reads apart from the trainer; set fleet.readers or "
                "fleet.apart"
            )
        return
    _check_live(config)
    r, g, lead, oldest = config.rollout, config.grpo, f.lead, f.lead + f.slack
    if r.max_rounds > 1:
        raise ValueError(
            f"rollout.max_rounds is {r.max_rounds}, and a fleet reads what was planned, and "
            f"replaces nothing; set it to 1 (grpo.full_rate_at scales a step that is short)"
        )
    if r.local.samples:
        raise ValueError(
            f"rollout.local.samples is {r.local.samples}, which are of turns that a step has "
            f"chosen, and its readers are apart; set it to 0"
        )
    if not oldest:
        return
    if config.tasks.retire_at and lead:
        raise ValueError(
            f"tasks.retire_at is {config.tasks.retire_at:g}, by which a step's draws depend on the "
            f"one before, and fleet.lead={lead} plans ahead of it; set one of them to 0"
        )
    plan, settings, _ = learner.settings_of(config)
    unbounded = plan.needs_proximal(settings) or settings.proximal == "interpolated"
    if unbounded and not settings.tis_cap and g.ratio != "likelihood":
        slack = f" and fleet.slack {f.slack}" if f.slack else ""
        raise ValueError(
            f"fleet.lead is {lead}{slack}, and nothing bounds what is learnt from turns that are "
            f"so old: the ratio is to the trainer's own logprobs; set grpo.tis_cap (2 is usual), "
            f"or fleet.lead=0"
        )


def _check_live(config: Training) -> None:
    """Raises ValueError for settings that go with `fleet.live` or `fleet.slack` alone."""
    f, r, slack = config.fleet, config.rollout, config.fleet.slack
    if not f.live:
        if slack:
            raise ValueError(
                f"fleet.slack is {slack}, and readers are pinned: a step's version reads its own "
                f"draws; set fleet.live=true, or fleet.slack=0"
            )
        return
    if not f.lead and not slack:
        raise ValueError(
            "fleet.live is true with fleet.lead=0 and fleet.slack=0, so no newer policy comes "
            "while a step is read; set one of them to 1, or fleet.live=false"
        )
    if r.teacher:
        raise ValueError(
            f"rollout.teacher is {r.teacher}, who writes the turns, and fleet.live is about which "
            f"policy does; set fleet.live=false"
        )
    if not slack:
        return
    clash = {
        "fleet.bundles": (f.bundles, "0: a step is filled document by document"),
        "tasks.balanced": (
            config.tasks.balanced and bool(config.tasks.files), "false: it makes up each step's own"
        ),
        "tasks.curriculum": (config.tasks.curriculum, "empty: a step has documents of one stage"),
        "tasks.retire_at": (
            config.tasks.retire_at, "0: it passes over draws by the step before"
        ),
    }  # fmt: skip
    for key, (value, mend) in clash.items():
        if value:
            raise ValueError(
                f"fleet.slack is {slack}, by which a step has draws of several steps, and {key} is "
                f"{value}; set it to {mend}"
            )


def scoring(config: Training, shown: rewards.Shown | None = None) -> Scoring:
    """Returns a run's reward function. Raises ValueError for what does not go together."""
    found, g = rewards.of(config.tasks.reward, shown=shown), config.grpo
    if not g.overlong_window:
        return found
    if g.mask_truncated:
        raise ValueError(
            f"grpo.overlong_window is {g.overlong_window} and grpo.mask_truncated is true: the "
            f"first punishes turns that were cut and the second does not learn from them; use one"
        )
    rules = builders.rules(config.reading)
    limits = rules.max_memory, rules.longest_answer
    how = Overlong(g.overlong_window, g.overlong_weight, *limits)
    return dataclasses.replace(found, score=overlong.shaped(found.score, how))


def waits(config: Training) -> int:
    """Returns for how many versions a group may wait: in a fleet a step learns what was planned."""
    return 0 if config.fleet.on else config.rollout.max_staleness


def oldest(config: Training) -> int:
    """Returns by how many versions a turn may be older than the policy that learns from it."""
    return config.fleet.lead + config.fleet.slack if config.fleet.on else waits(config)


def idle(config: Training) -> Iterator[str]:
    """Yields, in words, settings of rewards and draws that cannot act."""
    g = config.grpo
    if (asked := config.rollout.max_staleness) != waits(config):
        yield (
            f"rollout.max_staleness={asked} cannot act: a fleet learns what was planned, and no "
            f"group waits; turns are up to fleet.lead + fleet.slack, {oldest(config)}, versions old"
        )
    for key in ("bundles", "keep", "slack"):
        if (said := getattr(config.fleet, key)) and not config.fleet.on:
            yield (
                f"fleet.{key}={said} cannot act: nobody reads apart from the trainer "
                f"(fleet.readers, fleet.apart)"
            )
    if g.overlong_window and not g.overlong_weight:
        yield f"grpo.overlong_window={g.overlong_window} cannot act: grpo.overlong_weight is 0"
    if g.memory_weight != 1 and not config.tasks.memory_reward and ":" not in config.tasks.reward:
        yield f"grpo.memory_weight={g.memory_weight} cannot act: tasks.memory_reward is empty"
    yield from _idle_window(config)
    if config.tasks.retire_at and config.tasks.curriculum:
        yield (
            "tasks.retire_at counts readings of every stage of tasks.curriculum: a task that "
            "retires while its document is short does not come back when it is whole"
        )


def _idle_window(config: Training) -> Iterator[str]:
    r, said = config.rollout, f"rollout.window={config.rollout.window}"
    if r.window == 1:
        return
    if not (config.tasks.min_tokens if config.tasks.stories else config.tasks.files):
        yield f"{said} cannot act: documents that are made are all of one length (data.tokens)"
        return
    if config.steps % r.window:
        yield (
            f"{said}: a run of {config.steps} steps ends within a window, of which some lengths "
            f"are read and others are not; a multiple is better"
        )
    moves = {"rollout.max_rounds": r.max_rounds > 1, "rollout.max_staleness": r.max_staleness > 0}
    moves |= {"tasks.retire_at": config.tasks.retire_at > 0}
    if moving := [key for key, moves_it in moves.items() if moves_it]:
        yield (
            f"{said} saves less with {' and '.join(moving)}: steps then draw more documents than "
            f"rollout.documents, or fewer, and the longest of a window fall into two of them"
        )
