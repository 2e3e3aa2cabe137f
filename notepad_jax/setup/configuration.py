"""Config files: finding one, and changing it by a recipe and from the command line.

A config is a Python file with `get_config()` that returns an `ml_collections.ConfigDict`;
it imports nothing of ours. It is read once, here: what comes out is a frozen `Training`, `Suites`
or `Starter` (`config.whole`), whose fields say what there is, of which type and in which range.
`--config.steps=20`, or with a space, changes a value; a key that does not exist is an error that
names the nearest one, and a value that cannot be one that says what can, wherever it was written:
in a file, in a run's settings, on the command line or in Python.

The override `--config.recipe=dapo` (the option `--recipe`) changes several keys at once, by the
function `apply(config)` of a file in configs/recipes or of the user's; the other overrides win
over it. The name stays in the config, and with it in the run's.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ml_collections import ConfigDict

import configs
from notepad_jax import functions, keys, starter
from notepad_jax.near import meant
from notepad_jax.setup import habits
from notepad_jax.setup.config.whole import Config, Starter, Suites, Training

Read = TypeVar("Read", Training, Suites, Starter)

FLAG = "--config."
EVERY = {Training: "quickstart", Suites: "ruler", Starter: "starter"}
RECIPE = "recipe"  # the key, and what a file with `apply` is called
KINDS = {"grpo": Training, "lessons": Starter}  # by a section that no other kind has
# Sections without which a command has nothing to go by.
NEEDS = {
    **dict.fromkeys(("train", "plan"), ("grpo", "data")),
    "quickstart": ("grpo", "data", "evaluate"),
    **dict.fromkeys(("ask", "eval"), ("reading", "engine", "evaluate")),
    "serve": ("reading", "engine", "evaluate", "serve"),
    "build": ("sources",),
    "warmup": ("lessons",),
}
USUAL = {"build": "ruler", "warmup": "starter"}  # of the others: quickstart


class ConfigProblem(ValueError):
    """A config file, a saved value or an override that cannot be used."""


def load(
    name: str,
    overrides: Sequence[str] = (),
    saved: Mapping[str, Any] | None = None,
    lent: Mapping[str, Any] | None = None,
) -> Config | Starter:
    """Reads a config: a path, or the bare name of one in configs/ (`quickstart`).

    Args:
      overrides: words like `--config.grpo.clip_high=0.28`; they win over `saved`, and over a
        recipe among them, whatever their order.
      saved: the values of a run that goes on, as `keys.plain` wrote them; {} or None for none.
      lent: values of another config, of which those keys are taken that this one has.
    Raises:
      ConfigProblem: no such file, recipe, key or value, or a number out of its range; the
        message, one line, says what there is.
    """
    path = _find(name)
    config = _admitted(_made(path), str(path))
    values = keys.flat(config)
    values |= {key: value for key, value in keys.flat(lent or {}).items() if key in values}
    for key, value in keys.flat(saved or {}).items():
        if key in (f"engine.{name}" for name in habits.FORMER):  # saved by an earlier version
            continue
        if key not in values:
            where = "saved with the run, in its config.json"
            raise ConfigProblem(f"{keys.unknown(key, values)} ({where})")
        values[key] = value
    return _overridden(type(config), values, overrides)


def _admitted(config: Any, where: str) -> Config | Starter:
    """Reads a ConfigDict as a config of its kind. A training config has every key."""
    if not isinstance(config, ConfigDict):
        raise ConfigProblem(
            f"{where} gives {'nothing' if config is None else f'a {type(config).__name__}'} where "
            f"a ConfigDict belongs; get_config() ends with `return config`"
        )
    said = config.to_dict()
    kind = next((KINDS[section] for section in KINDS if section in said), Suites)
    if kind is Training:
        _refuse_unapplied(said, where)
    for line in keys.strangers(kind, said):
        raise ConfigProblem(f"{where}: {line}")
    if missing := list(keys.missing(kind, said)):
        raise ConfigProblem(
            f"{where} has no key {', '.join(missing)}; configs/{EVERY[kind]}.py has every key, "
            f"with its usual value"
        )
    return _read(kind, said, f"{where}: ")


def _read(kind: type[Read], said: Mapping[str, Any], where: str = "") -> Read:
    try:
        return keys.read(kind, said)
    except ValueError as problem:
        raise ConfigProblem(f"{where}{problem}") from None


def _made(path: Path) -> Any:
    get_config = _function(path, "config", "get_config")
    with _running(path):
        return get_config()


def _function(path: Path, kind: str, name: str) -> Callable[..., Any]:
    """Runs a Python file and returns its function `name`; ConfigProblem if it has none."""
    spec = importlib.util.spec_from_file_location(f"{kind}_{path.stem}", path)
    if spec is None:
        raise ConfigProblem(f"{path} is no Python file; a {kind} is one, named like my_{kind}.py")
    with _running(path):
        module = functions.executed(spec)
    if not callable(getattr(module, name, None)):
        raise ConfigProblem(f"{path} has no function {name}(); a {kind} file needs one")
    return getattr(module, name)


@contextlib.contextmanager
def _running(path: Path) -> Iterator[None]:
    """Says in one line where a user's file failed: its code may raise anything."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__)
                 if at.filename in (str(path), str(path.resolve()))]  # fmt: skip
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        there = f" at line {line}" if line else ""
        raise ConfigProblem(f"{path} cannot be run{there}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


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


def changed(config: ConfigDict | Read, overrides: Sequence[str]) -> Read:
    """Returns a copy of a config, with overrides. Raises as `load` does."""
    if isinstance(config, ConfigDict):  # not loaded yet: it is a caller's own
        config = _admitted(config, "this config")
    return _overridden(type(config), keys.flat(config), overrides)


def check_use(config: Config | Starter, command: str) -> None:
    """Raises ConfigProblem for a config of another kind than `command` reads."""
    lacking = [one for one in NEEDS.get(command, ()) if getattr(config, one, None) is None]
    if lacking:
        raise ConfigProblem(
            f"this config has no section {' and no '.join(lacking)}, which {command} goes by; take "
            f"one that has, as {USUAL.get(command, 'quickstart')}"
        )


def _find(name: str, kind: str = "config") -> Path:
    path = Path(name)
    if path.is_file():
        return path
    folder = _folder(kind)
    shipped = folder / f"{path.name.removesuffix('.py')}.py"
    if path.parent in (Path(), Path("configs"), Path("configs", folder.name)) and shipped.is_file():
        return shipped
    names = _names(kind)
    hint = meant(path.stem, names, f"there are {', '.join(names)}")
    raise ConfigProblem(f"there is no {kind} {name}; {hint}")


def _folder(kind: str) -> Path:
    folder = Path(next(iter(configs.__path__))).resolve()
    return folder / "recipes" if kind == RECIPE else folder


def _names(kind: str) -> list[str]:
    others = ("__init__", "models")
    return sorted(p.stem for p in _folder(kind).glob("*.py") if p.stem not in others)


# ---------------------------------------------------------------- recipes


def recipes() -> list[str]:
    """Returns the names of the recipes in configs/recipes."""
    return _names(RECIPE)


def _refuse_unapplied(said: Mapping[str, Any], where: str) -> None:
    """Refuses a recipe's name in a file: lines around it would be read as if in order."""
    if recipe := said.get(RECIPE):
        raise ConfigProblem(
            f"{where} sets recipe={recipe!r}, which --recipe alone does; say --recipe {recipe} "
            f"instead, or `from configs.recipes import {Path(recipe).stem}` and call its apply"
        )


def _applied(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what the recipe that values name makes of them; ConfigProblem where it cannot."""
    path = _find(values[RECIPE], RECIPE)
    apply = _function(path, RECIPE, "apply")
    tried = ConfigDict(_nested(values))
    with _running(path):
        returned = apply(tried)
    if returned is not None:
        raise ConfigProblem(
            f"apply(config) of recipe {path} returns something; it changes the config that it is "
            f"given, and what it returns is looked at by nobody"
        )
    found = keys.flat(tried.to_dict())
    for key in found.keys() - values.keys():
        raise ConfigProblem(f"recipe {path}: {keys.unknown(key, values)}")
    shipped_one = path.resolve().parent == _folder(RECIPE)
    return {**found, RECIPE: path.stem if shipped_one else str(path)}


# ---------------------------------------------------------------- overrides


def _overridden(kind: type[Read], values: dict[str, Any], overrides: Sequence[str]) -> Read:
    recipes_said = [word for word in overrides if word.startswith(f"{FLAG}{RECIPE}=")]
    if len(recipes_said) > 1:
        names = ", ".join(word.partition("=")[2] for word in recipes_said)
        raise ConfigProblem(
            f"two recipes are asked for ({names}), and each would undo some of the other; say one, "
            f"or call both in a file with apply(config)"
        )
    types = {key: hint for key, hint, _ in keys.leaves(kind)}
    said = dict(_override(types, values, word) for word in overrides)
    values |= said
    if recipes_said:
        values = _applied(values)  # it has seen the sizes that are asked for ...
        del said[RECIPE]
        values |= said  # ... and does not outdo what was
    config = _read(kind, _nested(values))
    if isinstance(config.policy, str):
        config = keys.changed(config, {"policy": starter.found(config.policy)})
    return config


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"grpo": {"clip_low": 0.2, ...}, ...} of {"grpo.clip_low": 0.2, ...}."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        place = out
        *sections, leaf = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return out


def _override(types: Mapping[str, Any], values: Mapping[str, Any], word: str) -> tuple[str, Any]:
    key, equals, text = word.removeprefix(FLAG).partition("=")
    if not word.startswith(FLAG) or not equals:
        raise ConfigProblem(f"{word!r} is no override; write {FLAG}KEY=VALUE, as {FLAG}steps=20")
    if key not in values:
        raise ConfigProblem(keys.unknown(key, values))
    if key not in types:
        raise ConfigProblem(f"{key} holds sections of its own; change it in a config file")
    return key, _parse(key, text, types[key])


def _parse(key: str, text: str, hint: Any) -> Any:
    """Reads `text` in the type of a key."""
    try:
        if hint is str:
            return text
        if hint is bool:
            return {"true": True, "false": False}[text.lower()]
        if hint is int:
            return int(text.replace("_", ""))
        if hint is float:
            return float(text)
        if text[:1] not in ("(", "["):
            return tuple(item.strip() for item in text.split(",") if item.strip())
        value = ast.literal_eval(text)
        return tuple([value] if isinstance(value, str) else value)
    except (ValueError, KeyError, SyntaxError, TypeError):
        raise ConfigProblem(keys.unlike(key, hint, text)) from None
