"""The reading settings in a policy's folder: notepad.json, and a template that is not shipped.

A run says in its config.json how it reads: template, chunk size, limits, the engine's sizes. What
is exported of it goes to people who do not have that, so `files` writes the same settings beside
the weights or the adapters, and `read` gives them back to programs that read with that folder
(`policies.reads_as`). A downloaded folder is data: it names no file outside it, and no code.
Above: policies, and programs convert, export and warmup; below: text.prompts, whose templates
these are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from notepad_jax.checkpoint.hf import storage
from notepad_jax.checkpoint.hf.storage import StoreProblem, quoted
from notepad_jax.text import prompts

NAME, TEMPLATE = "notepad.json", "notepad_template.txt"
SECTIONS = ("reading", "engine", "evaluate")
OWN = ":"  # in the name of a memory rule that is a function: module:function
FORMER = ("read_ahead",)  # of `engine`: keys of an earlier version, which changed no result
MACHINE = ("tensor", "replicas", "per_cpu")  # of `engine`: the devices that one stands at


def files(said: Mapping[str, Any], home: Path, warn: Callable[[str], None]) -> dict[str, bytes]:
    """Returns the files that carry how a policy reads, as `policies.reads_as` says; {} for {}.

    `home` is the run's folder, from whose working folder a template's path may be. What cannot
    be carried is left out, and `warn` is told of it.
    """
    if not said:
        return {}
    found, reading = dict[str, bytes](), dict(said["reading"])
    template = str(reading.get("template", ""))
    if template and not prompts.is_shipped(template):
        places = (Path(template), home.parent.parent / template)
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            warn(_left_out("reading.template", template, "which is not here"))
            del reading["template"]
        else:
            found[TEMPLATE] = path.read_bytes()
            reading["template"] = TEMPLATE
    if OWN in str(reading.get("memory_update", "")):
        warn(_left_out("reading.memory_update", reading.pop("memory_update"), "which is code"))
    text = json.dumps(of_config({**said, "reading": reading}, MACHINE), indent=2) + "\n"
    return {**found, NAME: text.encode()}


def _left_out(key: str, value: str, why: str) -> str:
    return f"{NAME} is written without {key} {value!r}, {why}; whoever reads has to say it"


def carried(folder: str) -> dict[str, bytes]:
    """Returns those files of a folder or bucket, as they are."""
    kvstore = storage.open_kvstore(folder)
    found = {name: storage.read_small(folder, kvstore, name) for name in (NAME, TEMPLATE)}
    return {name: content for name, content in found.items() if content is not None}


def read(folder: str) -> dict[str, Any]:
    """Returns how the policy in a local folder reads; {} where notepad.json does not say.

    Raises StoreProblem (a ValueError of one line) for a file that is damaged, or asks for what a
    folder cannot: a file elsewhere, or code.
    """
    if not Path(folder, NAME).exists():
        return {}
    at = storage.at(folder, NAME)
    raw = storage.read_small(folder, storage.open_kvstore(folder), NAME) or b""
    said = storage.parse_object(raw, at)
    for key, value in said.items():
        if key not in ("dtype", *SECTIONS):
            raise StoreProblem(f"{at} has the key {quoted(key)}; it has dtype, reading, engine, "
                               f"evaluate")  # fmt: skip
        if not isinstance(value, str if key == "dtype" else dict):
            raise StoreProblem(f"{at}: {key} is {quoted(value)}; export the policy again")
    reading = dict(said.get("reading", {}))
    if OWN in str(reading.get("memory_update", "")):
        raise StoreProblem(
            f"{at} says memory_update: {quoted(reading['memory_update'])}, which is code; a folder "
            f"brings none: take it out, and say it by --config.reading.memory_update"
        )
    template = str(reading.get("template", ""))
    if template and not prompts.is_shipped(template):
        if template != TEMPLATE or not Path(folder, TEMPLATE).is_file():
            raise StoreProblem(
                f"{at} says template: {quoted(template)}; it names a shipped one, or {TEMPLATE}, "
                f"which lies beside it"
            )
        reading["template"] = str(Path(folder, TEMPLATE))
    return of_config({**said, "reading": reading}, MACHINE)


def of_config(
    said: Mapping[str, Any], apart: Collection[str] = ("tensor", "replicas")
) -> dict[str, Any]:
    """Returns what of a config says how to read, but for the keys `apart` of its engine; {} of one
    that does not say it."""
    if "reading" not in said:
        return {}
    left_out = (*apart, *FORMER)
    engine = {key: value for key, value in said.get("engine", {}).items() if key not in left_out}
    chunk = {key: value for key, value in said.get("evaluate", {}).items() if key == "chunk_size"}
    told = {key: said[key] for key in ("dtype", "reading") if key in said}
    return told | {"engine": engine, "evaluate": chunk}
