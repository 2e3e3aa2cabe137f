"""Finds the policy that a user names: a run, one of its steps, an import, a published folder.

    runs/mine          the newest good step of a run (or of a folder of steps)
    runs/mine@40       step 40
    runs/mine@best     the step that did best on the held-out tasks (`validation`)
    policies/qwen      what import-hf wrote
    Qwen2.5-7B         a Hugging Face folder
    data/habits        adapters as PEFT keeps them, on the policy that they name

A run keeps weights alone, adapters with the base that they were trained on; config.json, tokenizer
and chat template are those of the policy that it began with, which may be a run again, or adapters:
then they are those of the adapters' base. `eval`, `ask`, `train` and `export-hf` all come here.
Above: builders (which loads it) and convert and export (which write it); below: checkpoint.steps,
checkpoint.restore and checkpoint.hf.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from notepad_jax import starter
from notepad_jax.checkpoint import best, commit, restore, steps
from notepad_jax.checkpoint.hf import adapters, hub, huggingface
from notepad_jax.checkpoint.hf.storage import ADAPTER_CONFIG, quoted
from notepad_jax.checkpoint.steps import CHECKPOINTS, Folder
from notepad_jax.model.lora import Lora
from notepad_jax.setup import habits
from notepad_jax.telemetry.identity import read_json
from notepad_jax.text import chat

BEST, AT = "best", "@"
READ = ("params", "meta")  # what a reader of a step reads of it


@dataclasses.dataclass(frozen=True)
class Named:
    """A policy that was found; `name` names just this one again, until its step is deleted."""

    name: str  # runs/mine@40, or the folder
    home: str  # the run, import or Hugging Face folder whose config.json speaks of it
    steps: Folder | None  # the folder of steps where the weights lie; None: they lie in `home`
    step: int | None  # among `steps`
    adapters: str = ""  # the folder of adapters that belong on those weights; "": none


def resolved(
    name: str | Path,
    say: Callable[[str], None] = warnings.warn,
    items: Collection[str] = READ,
) -> Named:
    """Returns what `name` names; of a step, the bytes of `items` are compared with its manifest.

    `say` is told, in a line each, of damaged steps that are passed over. Raises ValueError, in
    one line, for what is not there, is no policy, or is damaged.
    """
    name = starter.found(os.path.expanduser(name))
    if not name:
        raise ValueError("no policy is named; give a run (runs/NAME) or a Hugging Face folder")
    if "://" in name:
        raise ValueError(
            f"policy {name} is a URL, and a policy is read from a local folder: bring it there "
            f"(notepad-jax import-hf {name} policies/NAME)"
        )
    if hub.is_id(name):
        name = hub.fetched(name)
    place, asked = _cut(name)
    if asked is None and adapters.lie_in(place):
        return dataclasses.replace(_base(place, items), name=name, adapters=name)
    where, there = _steps_of(place)
    if where == place and not there and asked is None and "policy" not in _said(place):
        return Named(name, str(place), None, None)
    if not there:
        raise ValueError(f"{place} has no finished checkpoint; give a run (runs/NAME) that has one")
    home = place.parent if where == place and place.name == CHECKPOINTS else place
    if asked == BEST:
        asked = _best(place, where, there)
    if "model_type" in _said(home) and asked in (None, *there):  # imported: one step, the first
        steps.require(where, asked or 0, items, "import the policy again")
        return Named(str(place), str(home), where, asked or 0)
    step = steps.choose(where, asked, say, items)
    return Named(f"{place}{AT}{step}", str(home), where, step)


def _steps_of(place: Path) -> tuple[Folder, list[int]]:
    """Returns the folder of a run's steps, and those that lie there."""
    where = place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place
    there = steps.steps_in(where)
    kept = _said(place).get("checkpoint")
    if isinstance(kept, dict) and kept.get("folder") and not (there and steps.is_copy(where)):
        # A run that was brought here whole has its steps beside its settings; others that lie
        # there are of the time before it had another folder.
        elsewhere = steps.place_of(place, kept["folder"])
        if (found := steps.steps_in(elsewhere))[-1:] > there[-1:] or not there:
            return elsewhere, found
    return where, there


def folder_of(found: Named) -> str:
    """Returns the Hugging Face folder of a policy: its config.json, tokenizer, chat template.

    Of a run it is that of the policy which it began with. Raises ValueError where none is named.
    """
    home, seen = Path(found.home), set()
    while home.resolve() not in seen:
        seen.add(home.resolve())
        if adapters.lie_in(home):
            return _base(home, ()).home
        text = settings(home)
        said = text.get("policy")
        if "model_type" in text or (found.steps is None and not isinstance(said, str)):
            return str(home)
        if not isinstance(said, str) or not said:
            raise ValueError(
                f"{home} does not say which policy it started from; name that Hugging Face "
                f"folder (like), whose tokenizer and config.json belong to it"
            )
        home = _began_with(home, said)
        if home is None:
            return said  # gone, as the code that opens it says
    raise ValueError(f"{home} says that it began with itself; mend `policy` in its config.json")


def is_here(name: str) -> bool:
    """Whether a folder is named, and not something elsewhere."""
    name = os.path.expanduser(name)
    return any(path and Path(path).is_dir() for path in (name, name.rpartition(AT)[0]))


def base_of(found: Named) -> str:
    """Returns the folder of the policy that the adapters of a run, or of a folder, belong on.

    A run that went on with another's adapters trained them on that one's base. Raises ValueError
    where a run trained them on another run's weights.
    """
    said = settings(found.home).get("policy")
    began = None if found.adapters or not isinstance(said, str) else _began_with(found.home, said)
    if began is None or adapters.lie_in(began) or "policy" not in _said(began):
        return folder_of(found)
    before, _ = _steps_of(began)
    base = steps.base_in(found.steps)
    if base is not None and base == steps.base_in(before):
        return base_of(Named(str(began), str(began), before, None))
    raise ValueError(
        f"{found.home} trained its adapters on the weights of {said}, which is a run: export those "
        f"(notepad-jax export-hf {said} FOLDER) and name them (--base FOLDER)"
    )


def began_with(run: Named) -> Named | None:
    """Returns the policy that the weights of a run began with, if it is still here."""
    said = None if run.steps is None else settings(run.home).get("policy")
    if not isinstance(said, str):
        return None
    places = (said, str(Path(run.home).parent.parent / said))
    try:
        return next((resolved(p, lambda line: None, ()) for p in places if is_here(p)), None)
    except (ValueError, OSError):  # gone, or no policy any more
        return None


def adapted(name: str | Path) -> Lora | None:
    """Returns how a policy is adapted, of a folder or a run; None for one without adapters."""
    found = resolved(name, lambda line: None, ())
    if found.adapters:
        return adapters.read_lora(found.adapters, huggingface.import_config(folder_of(found)))
    if found.steps is None or restore.base_of(found.steps, found.step) is None:
        return None
    return trained_with(found.home)


def trained_with(run: str) -> Lora:
    """Returns how a run adapted its policy, as its settings say; ValueError if it did not."""
    said = settings(run).get("grpo", {}).get("lora", {})
    if not said.get("rank"):
        raise ValueError(
            f"{run} trained no adapters (its config.json has no grpo.lora.rank above 0); "
            f"export the policy, without --adapters"
        )
    return Lora(said["rank"], said["alpha"], tuple(said["targets"]))


def settings(home: str | Path) -> dict[str, Any]:
    """Returns the config.json of a run or of a policy's folder; {} where there is none."""
    path = Path(home) / huggingface.CONFIG
    mend = "mend it, or name the policy's Hugging Face folder (--like)"
    return read_json(path, mend) if path.is_file() else {}


def reads_as(name: str | Path) -> dict[str, Any]:
    """Returns the settings by which a policy reads, to be taken over by every reader of it.

    Those of a run, or what a folder carries of the run that it was exported from (`habits`); {}
    where there are none. Devices are left out: they are those of the machine at hand.
    """
    policy = resolved(name, lambda line: None, ())
    for folder in filter(None, (policy.adapters, policy.home)):
        if carried := habits.read(folder):
            return carried
    return habits.of_config(_said(Path(policy.home)))


def chats(name: str | Path) -> bool:
    """Whether a policy has a chat template, and no settings of its own to read by (`reads_as`)."""
    try:
        return has_template(name, default=False) and not reads_as(name)
    except (ValueError, OSError):  # as the code that opens it says
        return False


def has_template(name: str | Path, default: bool) -> bool:
    """Whether a policy has a chat template; `default` of one that cannot be found or read."""
    try:
        return chat.has_template(folder_of(resolved(name, lambda line: None, ())))
    except (ValueError, OSError):  # as the code that opens it says
        return default


def _said(home: Path) -> dict[str, Any]:
    """As `settings`, of a file that need not be sound: what lies there can be seen without it."""
    try:
        return settings(home)
    except ValueError:
        return {}


def _cut(name: str) -> tuple[Path, int | str | None]:
    """Returns the folder that is named, and what is said behind @: a step, `best` or nothing."""
    whole = Path(name)
    if whole.is_dir():
        return whole, None
    place, at, said = name.rpartition(AT)
    if at and Path(place).is_dir():
        if said == BEST:
            return Path(place), BEST
        if commit.STEP.fullmatch(said):
            return Path(place), int(said)
        raise ValueError(
            f"{name}: behind {AT} stands a step ({place}{AT}40) or {BEST} ({place}{AT}{BEST})"
        )
    before = place.rpartition(AT)[0]
    if before and Path(before).is_dir():
        raise ValueError(f"{name}: the step of {before} is said twice; say one")
    near = Path("runs") / (place if at else name)
    hint = (
        f"did you mean {near}?"
        if near.is_dir()
        else "give a run (runs/NAME) or a Hugging Face folder"
    )
    raise ValueError(f"there is no folder {place if at else name}; {hint}")


def _best(place: Path, where: Folder, there: Collection[int]) -> int:
    """Returns the step that did best. Raises ValueError where none is marked or it is gone."""
    found, listed = best.read(where), ", ".join(map(str, there))
    if found is None:
        raise ValueError(
            f"{place} has no best step: it was trained without validation (validation.every); "
            f"name one of its steps: {listed}"
        )
    if found.step not in there:
        raise ValueError(f"{place}: its best step, {found.step}, is gone; there: {listed}")
    return found.step


def _base(folder: Path, items: Collection[str]) -> Named:
    """Returns the policy that the adapters in `folder` belong on.

    Its name is a path from the working folder, from theirs, or from where theirs was made, as
    data/NAME. Raises ValueError, in one line, where it is not there or is no published policy.
    """
    name = adapters.base_name(folder)
    places = () if "://" in name else (Path(name), folder / name, folder.parent.parent / name)
    place = next((path for path in places if path.is_dir()), None)
    if place is None:
        raise ValueError(
            f"{folder} holds adapters of {quoted(name)} ({ADAPTER_CONFIG}: "
            f"base_model_name_or_path), and there is no such folder; bring that model there "
            f"(notepad-jax import-hf SRC {name})"
        )
    if adapters.lie_in(place):
        raise ValueError(
            f"{folder} holds adapters of {place}, which are adapters as well; merge those "
            f"(notepad-jax export-hf {place} FOLDER) and name that folder in {ADAPTER_CONFIG}"
        )
    found = resolved(place, lambda line: None, items)
    if "model_type" not in _said(Path(found.home)) and found.steps is not None:
        raise ValueError(
            f"{folder} holds adapters of {place}, which is a run: its newest step changes; export "
            f"one (notepad-jax export-hf {place}@STEP FOLDER) and name that in {ADAPTER_CONFIG}"
        )
    return found


def _began_with(home: str | Path, said: str) -> Path | None:
    """Returns the folder that the run in `home` says it began with; None: it is gone."""
    # A run that was made in another working folder lies in runs/NAME there.
    places = map(_named_folder, (said, str(Path(home).parent.parent / said)))
    return next((path for path in places if path is not None), None)


def _named_folder(said: str) -> Path | None:
    """Returns the folder in what a config names, without what stands behind @; None: none."""
    try:
        path, _ = _cut(said)
    except ValueError:
        return None
    return path.parent if path.name == CHECKPOINTS else path
