"""A local folder or a bucket as one key-value store, and the small files in it.

Everything goes through tensorstore, so `/data/qwen`, `gs://bucket/qwen` and `s3://bucket/qwen`
are one code path. Here are the opening of a store, whole small files (a config, a tokenizer),
JSON objects, and the one kind of error of all files in this room. `headers` and `writing`
(above) know what safetensors look like.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import tensorstore as ts

from notepad_jax.checkpoint.bucket import on_disk

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


class StoreProblem(ValueError):
    """Files that cannot be read, or a folder that cannot be written; one line says why."""


def open_kvstore(source: str | Path) -> Any:
    """Opens a local folder or a kvstore URL (gs://, s3://) as a `ts.KvStore`."""
    text = str(source)
    spec: Any = text.rstrip("/") + "/"
    if "://" not in text:
        if not Path(text).is_dir():
            raise StoreProblem(f"{text} is not a folder; give a Hugging Face folder or a gs:// URL")
        spec = on_disk(Path(text))
    try:
        return ts.KvStore.open(spec).result()
    except (ValueError, OSError) as problem:
        raise StoreProblem(f"{text} cannot be opened: {first_line(problem)}") from None


def read_small(source: str, kvstore: Any, file: str) -> bytes | None:
    """Returns a whole small file (a config, a tokenizer), or None if there is none."""
    refuse_special(source, file)
    try:
        found = kvstore.read(file).result()
    except (ValueError, OSError) as problem:
        raise StoreProblem(f"{at(source, file)} cannot be read: {first_line(problem)}") from None
    return bytes(found.value) if found.state == "value" else None


def refuse_special(source: str, file: str) -> None:
    """Raises StoreProblem where a pipe or a device has the name of a file: it may never end."""
    if "://" in source:
        return
    try:
        kind = (Path(source) / file).stat().st_mode
    except (OSError, ValueError):  # absent, or no name; the read that follows says so
        return
    if not stat.S_ISREG(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a pipe or a device"
        raise StoreProblem(f"{at(source, file)} is {what}, not a file; put the file there")


def files_in(kvstore: Any) -> list[str]:
    """Returns the names of the files directly in a store that can be shown, sorted."""
    names = (key.decode("utf-8", "replace") for key in kvstore.list().result())
    return sorted(name for name in names if "/" not in name and name.isprintable())


def read_json(source: str, kvstore: Any, file: str) -> dict[str, Any]:
    """Reads a JSON object; raises StoreProblem if it is absent or something else."""
    raw = read_small(source, kvstore, file)
    if raw is None:
        raise StoreProblem(
            f"{at(source, file)} is missing; a Hugging Face folder has {CONFIG} and {WEIGHTS}"
        )
    return parse_object(raw, at(source, file))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object in which no key is given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise StoreProblem(
                f"{where} names {quoted(twice)} twice; the file was not written whole"
            )
        return dict(pairs)

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except StoreProblem:
        raise
    except (ValueError, RecursionError) as problem:
        raise StoreProblem(
            f"{where} is not JSON ({first_line(problem)}); download it again"
        ) from None
    if not isinstance(found, dict):
        raise StoreProblem(f"{where} is not a JSON object; download it again")
    return found


def at(where: str, file: str) -> str:
    return f"{where.rstrip('/')}/{file}"


def quoted(text: object, longest: int = 80) -> str:
    """A name or value out of a file, for a message: control characters escaped, and not long."""
    shown = repr(text)
    return shown if len(shown) <= longest else f"{shown[:longest]}... ({len(shown):,} characters)"


def first_line(problem: Exception) -> str:
    """The first line of a message, nothing in it but print: tensorstore adds places below.

    What libraries say may quote bytes of a damaged file.
    """
    line = (str(problem).splitlines() or [type(problem).__name__])[0][:300]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
