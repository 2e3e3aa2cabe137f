"""A Hugging Face folder's settings of its tokenizer, beside the vocabulary.

Small JSON files: the special tokens by name, and where a completion ends. Above:
bpe_tokenizer and chat; below: controls.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from notepad_jax.text.controls import control_id, usual_stops


def present(path: pathlib.Path) -> bool:
    """Whether there is such a file; ValueError where a pipe or a folder has its name.

    A pipe or a device may never end, so nothing reads from one.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path} is {kind}, not a file; put the file there")
    return path.is_file()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; ValueError if there is no file or no object in it."""
    present(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; copy it from the model's folder") from None
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits
        raise ValueError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where an object is wanted")
    return value


def special_tokens(folder: pathlib.Path) -> dict[str, str]:
    """Returns the `..._token` entries of a model folder, name -> text.

    tokenizer_config.json speaks last, special_tokens_map.json before it; an entry is a
    string, or an object with `content`.
    """
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        entries = read_json(folder / file) if present(folder / file) else {}
        for name, value in entries.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str) and text:
                found[name] = text
    return found


def stop_ids(
    folder: pathlib.Path, controls: Mapping[str, int], known: frozenset[int]
) -> tuple[int, ...]:
    """Returns the ids that end a completion, the usual one first; never none.

    `eos_token` by name, then `eos_token_id` of generation_config.json, which may be a list;
    where neither is given, the first known stop piece. `known` are the ids of the
    tokenizer. Raises ValueError for an id or a piece that it lacks, and where nothing says.
    """
    stops: list[int] = []
    eos = special_tokens(folder).get("eos_token")
    if eos is not None:
        stops.append(control_id(controls, eos, folder / "tokenizer.json"))
    if present(folder / "generation_config.json"):
        path = folder / "generation_config.json"
        eos = read_json(path).get("eos_token_id")
        listed = [] if eos is None else eos if isinstance(eos, list) else [eos]
        for i in listed:
            if isinstance(i, bool) or not isinstance(i, int) or i not in known:
                raise ValueError(f"{path} ends at id {i!r}, which {folder}/tokenizer.json lacks")
        stops += listed
    stops = stops or usual_stops(controls)[:1]
    if not stops:
        raise ValueError(
            f"{folder} does not say where a completion ends; "
            "give eos_token_id in generation_config.json or eos_token in tokenizer_config.json"
        )
    return tuple(dict.fromkeys(stops))
