"""The manifest of a checkpoint: every file's size and SHA-256, written last and read first.

Weights have checksums of their own (`checksums`), which a hand-off compares; this covers all
the rest of a step as well, optimizer state, data position, and what orbax notes for itself,
without understanding any of it. A file is hashed by one thread, at 1.4 GB/s of a core that has
SHA instructions (blake2b: 0.75); orbax begins another file at 2 GB. Of several processes each
hashes its share: what lies in a bucket has to be fetched for it, an object at a time and a thread.
The manifest holds its own digest and is spelt one way only, so no bit of it can change unnoticed.
Neighbour above: `steps`; below: `bucket`.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from notepad_jax.checkpoint import bucket
from notepad_jax.parallel import hosts
from notepad_jax.telemetry.identity import write_whole

NAME = "manifest.json"
THREADS = min(16, os.cpu_count() or 1)

Place = Path | epath.Path  # as `bucket.path` gives it


def made(folder: Place) -> bytes:
    """Returns the manifest of all files under `folder`; all processes ask, and share the work."""
    names = hosts.broadcast(lambda: _files(folder))
    ours = names[hosts.index() :: hosts.count()]
    files: dict[str, Any] = {}
    for told in hosts.all_gather(lambda: _measured(folder, ours)):
        files |= told
    return _spelt(files)


def write(folder: Place, content: bytes) -> None:
    """Writes the manifest at once, by one rename or as one object, and waits until it is there."""
    if bucket.is_bucket(folder):
        (folder / NAME).write_bytes(content)
    else:
        write_whole(Path(folder / NAME), content)


def damage(folder: Place, items: Collection[str] | None = None) -> str | None:
    """Returns one line about the first file that is not as it was written, or None.

    Missing, cut, of other bytes, or not of this step. With `items`, looks only at what lies
    under those of its folders, and at the files beside them; without, at everything. A bucket that
    does not answer says nothing of a step: OSError.
    """
    try:
        listed = _listed((folder / NAME).read_bytes())
    except FileNotFoundError:
        return f"{NAME} is missing"
    except OSError as problem:
        return _unreadable(folder, NAME, problem)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{NAME} has other bytes than were saved"

    def asked(name: str) -> bool:
        top, below, _ = name.partition("/")
        return items is None or not below or top in items

    there = set(filter(asked, _files(folder)))
    wanted = sorted(filter(asked, listed))
    for name in wanted:
        if name not in there:
            return f"{name} is missing"
    for name in sorted(there - set(wanted)):
        return f"{name if name.isprintable() else ascii(name)} does not belong there"
    for name in wanted:
        # Of an object the size is known only with its bytes.
        size = None if bucket.is_bucket(folder) else listed[name]["bytes"]
        if size is not None and (found := _other_size(folder, name, size)):
            return found
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        compared = threads.map(lambda n: _other_bytes(folder, n, listed[n]["sha256"]), wanted)
        return next(filter(None, compared), None)


def size(folder: Place) -> int:
    """Returns the bytes of a step that is not damaged, without the manifest."""
    return sum(one["bytes"] for one in _listed((folder / NAME).read_bytes()).values())


def _files(folder: Place) -> list[str]:
    """Returns the paths under `folder` of all that is no folder, without the manifest."""
    if bucket.is_bucket(folder):
        return [name for name in bucket.names(folder) if name != NAME]
    found = [
        (Path(where) / name).relative_to(folder).as_posix()
        for where, _, names in os.walk(folder)
        for name in names
    ]
    return sorted(set(found) - {NAME})


def _measured(folder: Place, names: Collection[str]) -> dict[str, Any]:
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(lambda name: _digest(folder / name), names))
    return {
        name: {"bytes": size, "sha256": digest}
        for name, (size, digest) in zip(names, found, strict=True)
    }


def _digest(path: Place) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.seek(0, os.SEEK_END), digest  # of an object in memory nothing was passed by


def _spelt(files: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    content = {"files": files, "sha256": digest}
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _listed(content: bytes) -> dict[str, Any]:
    """Returns the files of a manifest; ValueError unless it is spelt as `write` would."""
    files = json.loads(content)["files"]
    if _spelt(files) != content:
        raise ValueError("not what was written")
    return files


def _other_size(folder: Path, name: str, size: int) -> str | None:
    try:
        found = (folder / name).stat()
    except OSError as problem:
        return _unreadable(folder, name, problem)
    if not stat.S_ISREG(found.st_mode):
        return f"{name} is no plain file"
    if found.st_size < size:
        return f"{name} is cut: {found.st_size:,} of {size:,} bytes"
    return f"{name} has {found.st_size:,} bytes and not {size:,}" if found.st_size > size else None


def _other_bytes(folder: Place, name: str, digest: str) -> str | None:
    try:
        same = _digest(folder / name)[1] == digest
    except OSError as problem:
        return _unreadable(folder, name, problem)
    return None if same else f"{name} has other bytes than were saved"


def _unreadable(folder: Place, name: str, problem: OSError) -> str:
    if bucket.is_bucket(folder) and not isinstance(problem, FileNotFoundError):
        raise problem
    return f"{name} cannot be read: {problem.strerror or type(problem).__name__}"
