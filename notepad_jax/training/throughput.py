"""Throughput metrics of a training step: tokens, model FLOPs, seconds and MFU.

Counts are metrics: the same run gives the same. What a clock says goes to `timings`. Model FLOPs
(`model.flops`) are of the work as it is shared: a prefix that a group has in common counts once.
Above: train; below: model.flops and planner.peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from notepad_jax.engine.metered import EngineStats
from notepad_jax.model import flops
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import hosts
from notepad_jax.planner.peak import Peak


@dataclasses.dataclass(frozen=True)
class Clock:
    """The seconds of a step's parts, and which of them went into compiling."""

    rollout: float
    update: float
    rollout_compiling: float
    update_compiling: float


def of_rollout(engine: EngineStats, policy: PolicyConfig, adapters: int) -> dict[str, float]:
    """Returns the rollout's metrics of the engines of all processes; `engine` counts our own.

    `adapters` are elements that lie beside the weights (`model.flops`).
    """
    found = hosts.all_sum(dataclasses.asdict(engine))
    sampled = found["draft_tokens"] + found["decode_tokens"]
    # A turn's last token is sampled and goes through no layer.
    through = found["prefix_tokens"] + found["tail_tokens"] + sampled - found["turns"]
    return {
        "rollout/prefix_tokens": found["prefix_tokens"],
        "rollout/prefix_tokens_saved": found["prefix_tokens_saved"],
        "rollout/tail_tokens": found["tail_tokens"],
        "rollout/draft_tokens": found["draft_tokens"],
        "rollout/decode_tokens": found["decode_tokens"],
        "rollout/model_flops": flops.forward(policy, through, found["pairs"], sampled, adapters),
    }


def timings(
    clock: Clock, metrics: Mapping[str, float], packed_tokens: int, peak: Peak | None
) -> dict[str, float]:
    """Returns a step's timings; no MFU where nothing was learnt or no peak is known.

    MFU is model FLOPs over what the devices compute at most in the update's seconds, of which
    those of packing and, in a run's first steps, of compiling are part.
    """
    sampled = sum(metrics[f"rollout/{kind}_tokens"] for kind in ("prefix", "tail", "decode"))
    found = {
        "rollout_seconds": clock.rollout,
        "update_seconds": clock.update,
        "rollout_compile_seconds": clock.rollout_compiling,
        "update_compile_seconds": clock.update_compiling,
        "rollout_tokens_per_second": sampled / clock.rollout,
        "update_tokens_per_second": packed_tokens / clock.update,
    }
    learnt = metrics.get("update/model_flops", 0)
    if peak is not None and learnt:
        found |= {"update/mfu": learnt / clock.update / peak.flops, "peak_flops": peak.flops}
    return found
