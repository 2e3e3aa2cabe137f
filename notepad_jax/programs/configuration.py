"""Config files: finding one, and changing it from the command line.

A config is a Python file with `get_config()` that returns an `ml_collections.ConfigDict`;
it imports nothing of ours. `--config.steps=20`, or with a space, changes a value and
keeps its type; a key that does not exist is an error that names the nearest one, and a
number out of its range (`ranges`) one that names the range, wherever it was written.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import configs
from notepad_jax.programs import ranges
from notepad_jax.starter import shipped

FLAG = "--config."
# Sections of which training reads every key: one that a file lacks was forgotten, or is newer.
WHOLE = ("reading", "tasks", "rollout", "grpo", "optimizer", "parallel", "checkpoint", "engine")


class ConfigProblem(ValueError):
    """A config file, a saved value or an override that cannot be used."""


def load(
    name: str, overrides: Sequence[str] = (), saved: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Reads a config: a path, or the bare name of one in configs/ (`quickstart`).

    Args:
      overrides: words like `--config.grpo.clip_high=0.28`; they win over `saved`.
      saved: the values of a run that goes on, as `plain` wrote them; {} or None for none.
    Raises:
      ConfigProblem: no such file, key or value, or a number out of its range; the message,
        one line, says what there is.
    """
    path = _find(name)
    config = _made(path)
    known = flat(config)
    if "grpo" in config:  # it is for training
        shipped = flat(_made(_find("quickstart")))
        wanted = (key for key in shipped if key.partition(".")[0] in WHOLE)
        if missing := [key for key in wanted if key not in known]:
            raise ConfigProblem(
                f"{path} has no key {', '.join(missing)}; configs/quickstart.py has every key that "
                f"training reads, with what it means"
            )
    for key, value in flat(saved or {}).items():
        if key in known:
            listed = isinstance(known[key], tuple) and isinstance(value, list)
            _set(config, key, tuple(value) if listed else value)
    return _overridden(config, overrides)


def _made(path: Path) -> ConfigDict:
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigProblem(f"{path} has no function get_config(); a config file needs one")
    return module.get_config()


def joined(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line, those like `--config.steps 3` as `--config.steps=3`."""
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":  # behind it nothing is an option
            return [*out, word, *rest]
        last = out[-1] if out else ""
        lacking = last.startswith(FLAG) and "=" not in last
        if lacking and not word.startswith("--"):
            out[-1] = f"{last}={word}"
        else:
            out.append(word)
    return out


def changed(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Returns a copy of a config that was loaded, with overrides. Raises as `load` does."""
    return _overridden(config.copy_and_resolve_references().unlock(), overrides)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"grpo.clip_low": 0.2, ...}."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def plain(value: Any) -> Any:
    """Returns a config as dicts, lists and scalars, for JSON."""
    if isinstance(value, Mapping | ConfigDict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    folder = Path(next(iter(configs.__path__)))
    shipped = folder / f"{path.name.removesuffix('.py')}.py"
    if str(path.parent) in (".", "configs") and shipped.is_file():
        return shipped
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "models"))
    near = difflib.get_close_matches(path.stem, names, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
    raise ConfigProblem(f"there is no config {name}{hint}")


def _overridden(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    for word in overrides:
        _override(config, word)
    if problem := next(ranges.problems(config), None):
        raise ConfigProblem(problem)
    if isinstance(config.get("policy"), str):
        config.policy = shipped.found(config.policy)
    return config.lock()


def _override(config: ConfigDict, word: str) -> None:
    key, equals, text = word.removeprefix(FLAG).partition("=")
    if not word.startswith(FLAG) or not equals:
        raise ConfigProblem(f"{word!r} is no override; write {FLAG}KEY=VALUE, as {FLAG}steps=20")
    known = flat(config)
    if key not in known:
        near = difflib.get_close_matches(key, known, 1, 0.5)
        near = near or [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]][:1]
        hint = f"did you mean {near[0]}?" if near else "see the config file for its keys"
        raise ConfigProblem(f"there is no config key {key!r}; {hint}")
    _set(config, key, _parse(key, text, known[key]))


def _set(config: ConfigDict, key: str, value: Any) -> None:
    section, _, leaf = key.rpartition(".")
    place = config[section] if section else config
    old = place[leaf]
    try:
        if old is not None and (value is None or isinstance(value, bool) != isinstance(old, bool)):
            raise TypeError("a ConfigDict would take these for anything")
        place[leaf] = value
    except (TypeError, OverflowError):
        raise _unlike(key, old, value) from None


def _parse(key: str, text: str, old: Any) -> Any:
    """Reads `text` in the type of the value it replaces."""
    try:
        if isinstance(old, str):
            return text
        if isinstance(old, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(old, int):
            return int(text.replace("_", ""))
        if isinstance(old, float):
            return float(text)
        if any(isinstance(item, Mapping | ConfigDict) for item in old):
            raise ConfigProblem(f"{key} holds sections of its own; change it in a config file")
        if all(isinstance(item, str) for item in old) and text[:1] not in ("(", "["):
            return type(old)(item.strip() for item in text.split(",") if item.strip())
        value = ast.literal_eval(text)
        return type(old)([value] if isinstance(value, str | int | float) else value)
    except ConfigProblem:
        raise
    except (ValueError, KeyError, SyntaxError, TypeError):
        raise _unlike(key, old, text) from None


def _unlike(key: str, old: Any, value: Any) -> ConfigProblem:
    kind = type(old).__name__
    return ConfigProblem(f"{key} needs a value like {old!r} ({kind}), and got {value!r}")
