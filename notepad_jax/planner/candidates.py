"""The search space of the fastest settings: rows, meshes and engines that a policy allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from notepad_jax.planner import lowering
from notepad_jax.planner.planned_policy import PlannedPolicy
from notepad_jax.setup import builders, sizes
from notepad_jax.setup.config.whole import Training
from pallas_kernels import aot

TRAINERS = ("parallel.tensor", "grpo.micro_batch_rows", "grpo.row_length", "grpo.remat")
ENGINES = ("engine.tensor", "engine.replicas")
CUTS = 8  # most rows that a group's tails are cut into
ROWS = (1, 2)  # of a micro-batch on a device


def of_trainer(config: Training, name: str, policy: PlannedPolicy) -> list[Mapping[str, Any]]:
    """Every mesh, row length and micro-batch that is worth a try; some cannot run."""
    devices = config.parallel.devices or len(aot.sketch_of(name))
    heads, lengths = policy.config.kv_heads, row_lengths(config, policy)
    found = []
    for tensor in (n for n in range(1, devices + 1) if devices % n == heads % n == 0):
        parts_of_it = devices // tensor
        rows = {parts_of_it * n for n in ROWS}
        if config.grpo.micro_batch_rows % parts_of_it == 0:
            rows.add(config.grpo.micro_batch_rows)
        every = itertools.product([tensor], sorted(rows), lengths, (True, False))
        found += [dict(zip(TRAINERS, values, strict=True)) for values in every]
    return found


def row_lengths(config: Training, policy: PlannedPolicy) -> list[int]:
    """Returns lengths of rows that hold whole groups, or a prefix and an even cut of its tails.

    Also one with room for a group and its share of answers, which lie in any row; and the config's.
    """
    turns = sizes.turns(policy.template, builders.rules(config.reading))
    members, turn = config.rollout.group_size, turns.update
    tail, prefix = turn.private + turn.completion - turn.common, turn.shared + turn.common
    whole = prefix + members * tail
    found = {prefix + math.ceil(members / cuts) * tail for cuts in range(1, CUTS + 1)}
    found |= {2 * whole, 4 * whole}
    reading = lowering.workload.readings(config, policy.template)
    answers = sum(one.private + one.completion for one in turns.answers)
    found.add(whole + math.ceil(members / reading.chunks) * answers)
    longest = max(one.whole for one in turns.all)
    found = {_rounded(length) for length in found if length >= longest}
    if config.grpo.row_length:
        found.add(config.grpo.row_length)
    return sorted(found)


def _rounded(length: int) -> int:
    """Up to what attention's kernel walks anyway: its blocks, in long rows of 512 or more."""
    block = 128 if length <= 8 * 1024 else 512
    return block * math.ceil(length / block)


def of_engine(config: Training, name: str, policy: PlannedPolicy) -> list[Mapping[str, Any]]:
    there = aot.sketch_of(name)
    host = sum(device.process_index == 0 for device in there)
    heads = policy.config.kv_heads
    tensors = [n for n in range(host, 0, -1) if host % n == heads % n == 0]
    # As many engines as there is room for; fewer leave devices without work.
    return [dict(zip(ENGINES, (tensor, 0), strict=True)) for tensor in tensors]
