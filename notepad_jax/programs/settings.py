"""What a caller from Python says, as a config: a name and a mapping of changes.

The changes are read as the command line's overrides are, so that types, ranges and misspelt keys
are found in the same way. `to_read` also finds the config that suits a policy. Above: `api` and
`reader`; below: configuration and policies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from notepad_jax.programs import configuration, policies
from notepad_jax.text import chat

OURS, PUBLISHED, SERVED = "quickstart", "ruler", "ruler"  # the config of a policy that has none
Config = str | os.PathLike[str] | ConfigDict


def loaded(
    config: Config, changes: Mapping[str, Any], saved: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Returns a config by name, by file or as it is, with changes: {"rollout.documents": 4}.

    `saved` are the settings of a run that goes on. Raises ConfigProblem as
    `configuration.load` does.
    """
    words = overrides(changes)
    if isinstance(config, ConfigDict):
        return configuration.changed(config, words)
    return configuration.load(os.fspath(config), words, saved)


def to_read(
    source: str | os.PathLike[str],
    step: int | str | None,
    config: Config,
    changes: Mapping[str, Any],
) -> ConfigDict:
    """Returns the config of whoever reads with `source`: a policy by name, or an endpoint's URL.

    `step` is one of a run: a number, or "best". Without a `config`, a run is read with its own
    settings, a published policy (one with a chat template) and an endpoint with those of
    evaluation, and any other as the starter is. Raises ValueError as `policies.resolved` does.
    """
    name = os.fspath(source)
    if name.startswith(("http://", "https://")):
        if step is not None:
            raise ValueError(f"{name} is a server, which has no step {step}; leave `step` out")
        return loaded(config or SERVED, {"endpoint.url": name, **configuration.flat(changes)})
    found = policies.resolved(name if step is None else f"{name}{policies.AT}{step}")
    folder, saved = policies.folder_of(found), {}
    if not config:
        config = PUBLISHED if chat.has_template(folder) else OURS
        own = policies.settings(found.home)
        if "model_type" not in own and "reading" in own:  # a run of ours, and no model
            config, saved = OURS, own
    return loaded(config, {**configuration.flat(changes), "policy": found.name}, saved)


def overrides(changes: Mapping[str, Any]) -> list[str]:
    """Returns the words that would change a config so on the command line."""
    flat = configuration.flat(changes)
    return [f"{configuration.FLAG}{key}={_text(value)}" for key, value in flat.items()]


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return repr(tuple(os.fspath(v) if isinstance(v, os.PathLike) else v for v in value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
