"""Config files: finding one, and changing it by a recipe and from the command line.

A config is a Python file with `get_config()` that returns an `ml_collections.ConfigDict`;
it imports nothing of ours. `--config.steps=20`, or with a space, changes a value and
keeps its type; a key that does not exist is an error that names the nearest one, and a
number out of its range (`ranges`) one that names the range, wherever it was written: in a
file, in a run's settings, on the command line or in Python.

The override `--config.recipe=dapo` (the option `--recipe`) changes several keys at once, by the
function `apply(config)` of a file in configs/recipes or of the user's; the other overrides win
over it. The name stays in the config, and with it in the run's.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import configs
from notepad_jax.setup import ranges
from notepad_jax.starter import shipped

FLAG = "--config."
RECIPE = "recipe"  # the key, and what a file with `apply` is called
# By a section that no other kind has; all else measures suites, as config ruler does.
KINDS = {"grpo": "quickstart", "lessons": "starter"}
# Sections without which a command has nothing to go by.
NEEDS = {
    **dict.fromkeys(("train", "quickstart", "plan"), ("grpo",)),
    **dict.fromkeys(("ask", "eval"), ("reading", "engine", "evaluate")),
    "serve": ("reading", "engine", "evaluate", "serve"),
    "build": ("sources",),
    "warmup": ("lessons",),
}
USUAL = {"build": "ruler", "warmup": "starter"}  # of the others: quickstart
# Sections of which training reads every key: one that a file lacks was forgotten, or is newer.
WHOLE = ("reading", "tasks", "rollout", "grpo", "optimizer", "parallel", "checkpoint", "engine")


class ConfigProblem(ValueError):
    """A config file, a saved value or an override that cannot be used."""


def load(
    name: str,
    overrides: Sequence[str] = (),
    saved: Mapping[str, Any] | None = None,
    lent: Mapping[str, Any] | None = None,
) -> ConfigDict:
    """Reads a config: a path, or the bare name of one in configs/ (`quickstart`).

    Args:
      overrides: words like `--config.grpo.clip_high=0.28`; they win over `saved`, and over a
        recipe among them, whatever their order.
      saved: the values of a run that goes on, as `plain` wrote them; {} or None for none.
      lent: values of another config, of which those keys are taken that this one has.
    Raises:
      ConfigProblem: no such file, recipe, key or value, or a number out of its range; the
        message, one line, says what there is.
    """
    path = _find(name)
    config = _admitted(_made(path), str(path))
    known = flat(config)
    for key, value in flat(lent or {}).items():
        if key in known:
            _restore(config, key, value)
    for key, value in flat(saved or {}).items():
        if key not in known:
            raise ConfigProblem(f"{_no_key(key, known)} (saved with the run, in its config.json)")
        _restore(config, key, value)
    return _overridden(config, overrides)


def _restore(config: ConfigDict, key: str, value: Any) -> None:
    """Sets what JSON gave back; it knows no tuples."""
    listed = isinstance(value, list) and isinstance(flat(config)[key], tuple)
    _set(config, key, tuple(value) if listed else value)


def _admitted(config: Any, where: str) -> ConfigDict:
    """Returns somebody's config if its keys and their types are those of the shipped one.

    Of its kind, that is. A training config has all that training reads; others may leave keys out.
    """
    if not isinstance(config, ConfigDict):
        raise ConfigProblem(
            f"{where} gives {'nothing' if config is None else f'a {type(config).__name__}'} where "
            f"a ConfigDict belongs; get_config() ends with `return config`"
        )
    config, training = config.copy_and_resolve_references().unlock(), "grpo" in config
    kind = next((one for section, one in KINDS.items() if section in config), "ruler")
    if training:
        config[RECIPE] = config.get(RECIPE, "")
        _refuse_unapplied(config, where)
    shipped = _made(_find(kind))
    known, ours = flat(shipped) | ({RECIPE: ""} if training else {}), flat(config)
    for key, value in ours.items():
        if key not in known:
            raise ConfigProblem(f"{where}: {_no_key(key, known)}")
        if key != RECIPE:
            try:
                _set(shipped, key, value)
            except ConfigProblem as problem:
                raise ConfigProblem(f"{where}: {problem}") from None
    wanted = (key for key in known if training and key.partition(".")[0] in WHOLE)
    if missing := [key for key in wanted if key not in ours]:
        raise ConfigProblem(
            f"{where} has no key {', '.join(missing)}; configs/quickstart.py has every key that "
            f"training reads, with what it means"
        )
    return config


def _made(path: Path) -> Any:
    get_config = _function(path, "config", "get_config")
    with _running(path):
        return get_config()


def _function(path: Path, kind: str, name: str) -> Callable[..., Any]:
    """Runs a Python file and returns its function `name`; ConfigProblem if it has none."""
    spec = importlib.util.spec_from_file_location(f"{kind}_{path.stem}", path)
    if spec is None:
        raise ConfigProblem(f"{path} is no Python file; a {kind} is one, named like my_{kind}.py")
    module = importlib.util.module_from_spec(spec)
    with _running(path):
        spec.loader.exec_module(module)
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


def changed(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Returns a copy of a config, with overrides. Raises as `load` does."""
    if not config.is_locked:  # nobody has loaded it: it is somebody's own
        config = _admitted(config, "this config")
    return _overridden(config.copy_and_resolve_references().unlock(), overrides)


def check_use(config: ConfigDict, command: str) -> None:
    """Raises ConfigProblem for a config of another kind than `command` reads."""
    if lacking := [section for section in NEEDS[command] if section not in config]:
        raise ConfigProblem(
            f"this config has no section {' and no '.join(lacking)}, which {command} goes by; take "
            f"one that has, as {USUAL.get(command, 'quickstart')}"
        )


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


def _find(name: str, kind: str = "config") -> Path:
    path = Path(name)
    if path.is_file():
        return path
    folder = _folder(kind)
    shipped = folder / f"{path.name.removesuffix('.py')}.py"
    if path.parent in (Path(), Path("configs"), Path("configs", folder.name)) and shipped.is_file():
        return shipped
    names = _names(kind)
    near = difflib.get_close_matches(path.stem, names, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
    raise ConfigProblem(f"there is no {kind} {name}{hint}")


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


def _refuse_unapplied(config: ConfigDict, where: str) -> None:
    """A file's lines before and after a recipe would be read as if they stood in order."""
    if said := config.get(RECIPE):
        raise ConfigProblem(
            f"{where} sets recipe={said!r}, which --recipe alone does; say --recipe {said} "
            f"instead, or `from configs.recipes import {Path(said).stem}` and call its apply"
        )


def _apply_recipe(config: ConfigDict) -> None:
    """Changes a config by the recipe that it names; ConfigProblem for one that cannot be used."""
    path = _find(config[RECIPE], RECIPE)
    apply = _function(path, RECIPE, "apply")
    tried = config.copy_and_resolve_references()
    with _running(path):
        returned = apply(tried)
    if returned is not None:
        raise ConfigProblem(
            f"apply(config) of recipe {path} returns something; it changes the config that it is "
            f"given, and what it returns is looked at by nobody"
        )
    known = flat(config)
    for key, value in flat(tried).items():
        if key not in known:
            raise ConfigProblem(f"recipe {path}: {_no_key(key, known)}")
        _set(config, key, value)
    config[RECIPE] = path.stem if path.resolve().parent == _folder(RECIPE) else str(path)


def _overridden(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    recipes_said = [word for word in overrides if word.startswith(f"{FLAG}{RECIPE}=")]
    if len(recipes_said) > 1:
        names = ", ".join(word.partition("=")[2] for word in recipes_said)
        raise ConfigProblem(
            f"two recipes are asked for ({names}), and each would undo some of the other; say one, "
            f"or call both in a file with apply(config)"
        )
    for word in overrides:
        _override(config, word)
    if recipes_said:
        _apply_recipe(config)  # it has seen the sizes that are asked for ...
        for word in overrides:  # ... and does not outdo what was
            if word not in recipes_said:
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
        raise ConfigProblem(_no_key(key, known))
    _set(config, key, _parse(key, text, known[key]))


def _no_key(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, 1, 0.5)
    near = near or [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    hint = f"did you mean {near[0]}?" if near else "see the config file for its keys"
    return f"there is no config key {key!r}; {hint}"


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
