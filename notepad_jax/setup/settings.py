"""Configs for callers from Python: a config by name, and a mapping of changes.

The changes are read as the command line's overrides are, so that types, ranges and misspelt keys
are found in the same way. `to_read` also finds the config that suits a policy. Above: `api` and
`reader`; below: configuration and policies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from notepad_jax import functions, keys
from notepad_jax.reading.memory_rules import Note, Returned
from notepad_jax.rollout import rewards
from notepad_jax.setup import configuration, policies
from notepad_jax.setup.config.whole import Config, Suites, Training
from notepad_jax.setup.eval_jobs import SYNTHETIC

OURS, PUBLISHED, SUITES = "quickstart", "chat", "ruler"  # configs of callers that give none
# Of one reading, or of a batch; awaitable or not; a number, or one a turn (scoring.own).
Reward = str | Callable[[Any], Any]
Rewards = Reward | Sequence[tuple[float, Reward]]
MemoryRule = str | Callable[[Note, Note], Returned]
MADE = ConfigDict | Training | Suites  # a caller's own, or one that was read before
Given = str | os.PathLike[str] | MADE


def loaded(
    config: Given,
    changes: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
    lent: Mapping[str, Any] | None = None,
) -> Config:
    """Returns a config by name, by file or as it is, with changes: {"rollout.documents": 4}.

    `saved` are the settings of a run that goes on, `lent` those of another config. Raises
    ConfigProblem as `configuration.load` does.
    """
    words = overrides(changes)
    if isinstance(config, MADE):
        return configuration.changed(config, words)
    return configuration.load(os.fspath(config), words, saved, lent)


def check(config: Given, command: str) -> None:
    """Raises ValueError for what is no config, or one of another kind than `command` reads."""
    if not isinstance(config, str | os.PathLike | MADE):
        raise ValueError(
            f"config is {config!r:.80}; give the name of a config, a path, or a ConfigDict"
        )
    if config:
        configuration.check_use(loaded(config, {}), command)


def changes_of(changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns {"grpo.clip_low": 0.2, ...} of what a caller gave as `changes`."""
    if changes is not None and not isinstance(changes, Mapping | ConfigDict):
        raise ValueError(f'changes is {changes!r:.80}; give a mapping, as {{"steps": 40}}')
    for key in changes or ():
        if not isinstance(key, str):
            raise ValueError(f"changes has the key {key!r:.80}; keys are texts, as 'steps'")
    return keys.flat(changes.to_dict() if isinstance(changes, ConfigDict) else changes or {})


def to_read(
    source: str | os.PathLike[str],
    step: int | str | None,
    config: Given,
    changes: Mapping[str, Any],
    measured: bool = False,
    saved: Mapping[str, Any] | None = None,
) -> Config:
    """Returns the config for reading with `source`: a policy by name, or an endpoint's URL.

    `step` is one of a run: a number, or "best". Without a `config`, a run is read with its own
    settings, a published policy (one with a chat template) with those of config chat, an
    endpoint with those of evaluation, and any other as the starter is. It is `measured` in an
    evaluation: a suite other than the starter's own needs the keys of the config for suites; how
    a run of ours reads stays its own. `saved` are the settings of one that goes on. Raises
    ValueError as `policies.resolved` does.
    """
    if saved and not config:
        config = OURS if "grpo" in saved else SUITES  # which has all of their keys
    check(config, "eval" if measured else "ask")
    name, said = at(source, step), dict(changes)
    before = (saved or {}).get("policy", "")
    if step is None and before.rpartition(policies.AT)[0] == name:
        name = before  # the step that has read so far
    if _served(name):
        return loaded(config or SUITES, {"endpoint.url": name, **said}, saved)
    found = policies.resolved(name)
    said["policy"] = found.name
    if config:
        return loaded(config, said, saved)
    suite = said.get("evaluate.suite", SYNTHETIC) if measured else ""
    suits = SUITES if measured and policies.chats(name) else suited(name, "", suite)
    return loaded(suits, said, lent=policies.reads_as(name))


def suited(policy: str | None, endpoint: str | None, suite: str) -> str:
    """Returns the config, by name, that suits who reads and the suite; "": nothing is measured."""
    if endpoint or suite not in ("", SYNTHETIC):
        return SUITES
    return PUBLISHED if policy and not suite and policies.chats(policy) else OURS


def at(source: str | os.PathLike[str], step: int | str | None) -> str:
    """Returns the name of a policy at a step (None: the newest), as the commands know it."""
    name = path_of(source, "a policy")
    if step is None:
        return name
    if _served(name):
        raise ValueError(f"{name} is a server, which has no step {step}; leave `step` out")
    return f"{name}{policies.AT}{step}"


def path_of(path: str | os.PathLike[str], what: str) -> str:
    """Returns a path as a text; ValueError, which says of `what`, for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"{what} is named by a text or a path, and this is of type {type(path).__name__}"
        )
    return os.fspath(path)


def _served(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def overrides(changes: Mapping[str, Any]) -> list[str]:
    """Returns the words that would change a config so on the command line."""
    flat = keys.flat(changes)
    if without := [key for key, value in flat.items() if value is None]:
        raise ValueError(f"{without[0]} is None; give it a value, or leave it out")
    return [f"{configuration.FLAG}{key}={_text(value)}" for key, value in flat.items()]


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return repr(tuple(os.fspath(v) if isinstance(v, os.PathLike) else v for v in value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


# ---------------------------------------------------------------- functions


def lent(
    stack: contextlib.ExitStack,
    reward: Rewards | None,
    memory_update: MemoryRule | None,
    memory_reward: Rewards | None = None,
    key: str = rewards.KEY,
) -> dict[str, str]:
    """Lends functions until the stack closes; returns the config keys, and what they hold now.

    `key` is where the reward belongs.

    Raises ValueError for what is neither a function nor a name.
    """
    said = {}
    if memory_update is not None:
        said["reading.memory_update"] = _name(stack, memory_update)
    for where, one in ((key, reward), (rewards.MEMORY_KEY, memory_reward)):
        if one is not None:
            said[where] = _reward(stack, one, where.partition(".")[2])
    return said


def _reward(stack: contextlib.ExitStack, reward: Rewards, what: str) -> str:
    if isinstance(reward, str) or callable(reward):
        return _name(stack, reward)
    try:
        parts = [(float(weight), one) for weight, one in reward]
    except (TypeError, ValueError):
        parts = []
    if not parts:
        raise ValueError(
            f"{what} is {reward!r:.80}; give a function of a reading, the name of a "
            f"metric, or a list of (weight, one of these)"
        )
    return ",".join(f"{_name(stack, one)}={weight!r}" for weight, one in parts)


def _name(stack: contextlib.ExitStack, function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function
    return stack.enter_context(functions.lending([function]))[0]
