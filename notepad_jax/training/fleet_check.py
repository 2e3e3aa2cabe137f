"""Checks of settings that cannot go with a fleet's readers. Above: train; beside: fleet."""

from __future__ import annotations

from notepad_jax.setup import learner
from notepad_jax.setup.config.whole import Training


def check(config: Training) -> None:
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
