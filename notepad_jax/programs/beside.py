"""Several LoRA policies on one base: adapters of runs and folders, served beside a policy's own.

An engine multiplies by the base once for all requests, and by the adapters that each names.
Above: `serve`; below: `builders`, and `model.lora`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from notepad_jax.checkpoint import checksums
from notepad_jax.model import lora, lora_merge
from notepad_jax.setup import builders, configuration, policies, settings
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen


@dataclasses.dataclass(frozen=True)
class Beside:
    """Another policy on the same base: its name, its settings, and, once it was read, itself."""

    name: str
    config: Config
    adapters: lora.Lora | None  # None: it has none, and will be refused
    policy: builders.LoadedPolicy | None = None  # of its weights the adapters alone
    fingerprint: str = ""


def named(config: Config, given: Sequence[str], first: str) -> list[Beside]:
    """Returns the policies, NAME=POLICY in `given`, to be served beside `first`, none read yet.

    Each reads as its run did, or as the config says. Raises ValueError for what names none.
    """
    found: list[Beside] = []
    for said in given:
        own, _, place = said.partition("=")
        if not own or not place:
            raise ValueError(f"--adapters {said}: write NAME=POLICY, as mine=runs/mine")
        if own in (first, *(one.name for one in found)):
            raise ValueError(f"--adapters {said}: there is another model {own}; choose a NAME")
        reads = policies.reads_as(place)
        lent = {key: reads[key] for key in ("reading", "evaluate") if key in reads}
        theirs = configuration.changed(config, settings.overrides({**lent, "policy": place}))
        found.append(Beside(own, theirs, policies.adapted(place)))
    return found


def adapted(
    config: Config, policy: builders.LoadedPolicy, others: Sequence[Beside], screen: Screen
) -> tuple[builders.LoadedPolicy, list[Beside]]:
    """Reads the adapters of `others`; returns the policy with all of them beside its own.

    Each is read whole, and its base let go once it was found to be the policy's: for that long,
    and for one at a time, there are two. Raises ValueError where it is another, or nothing is
    adapted.
    """
    read = []
    for one in others:
        place, where = one.config.policy, builders.to_read(config.engine)
        found = builders.load_policy(place, config.dtype, where, screen.warn)
        if lora.of(found.params) is None:
            raise ValueError(f"{place} has no adapters; serve it as a --policy of its own")
        if found.config != policy.config or not _alike(found.params, policy.params):
            raise ValueError(
                f"{place} has its adapters on another base than {config.policy}; serve it as a "
                f"--policy of its own"
            )
        fingerprint, kept = fingerprint_of(found), lora_merge.alone(found.params)
        found = dataclasses.replace(found, params=kept)
        read.append(dataclasses.replace(one, policy=found, fingerprint=fingerprint))
    if read:
        every = [policy.params, *(one.policy.params for one in read)]
        policy = dataclasses.replace(policy, params=lora.several(policy.params, every))
    return policy, read


def _alike(params: Any, others: Any) -> bool:
    """Whether two policies have the same base."""
    bases = (jax.tree.leaves(lora.plain(one)) for one in (params, others))
    return all(bool(jnp.array_equal(a, b)) for a, b in zip(*bases, strict=True))


def fingerprint_of(policy: builders.LoadedPolicy) -> str:
    """A checksum of all weights, short enough to be read."""
    sums = json.dumps(checksums.leaf_checksums(policy.params), sort_keys=True)
    return f"np-{hashlib.blake2b(sums.encode(), digest_size=8).hexdigest()}"
