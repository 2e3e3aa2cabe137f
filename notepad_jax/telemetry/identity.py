"""The identity of a folder, what it was made from: written once, compared when it is resumed.

Going on with other settings would mix two things that look alike. Used for the readings of
an evaluation and for built task files. Such small files are written whole or not at all, and
one that is damaged is named; other modules write their small files with these functions, too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

DIGEST = "digest"  # of a file's other keys, among them
IDS, LOGPROBS = "<i4", "<f4"  # dtypes of arrays as they are written, on any machine


def settle(
    path: Path, identity: Mapping[str, Any], mend: str, before: Mapping[str, Any] | None = None
) -> None:
    """Writes `identity` (JSON values) to `path`, or makes sure that it stands there already.

    A name of `before` that is not in the file has the value given there: the folder is older
    than the name. Raises ValueError naming the first value that differs, with both and the mend;
    also for a file that is damaged.
    """
    ours = json.loads(json.dumps(identity))
    if not path.is_file():
        write_json(path, ours)
        return
    then = {name: value for name, value in (before or {}).items() if name in ours}
    theirs = {**then, **read_json(path, mend)}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{path.parent} was made with {name} = {theirs.get(name)!r}, and now it is "
                f"{ours.get(name)!r}; {mend}"
            )


def read_json(path: Path, mend: str) -> dict[str, Any]:
    """Returns the JSON object in `path`.

    Raises ValueError naming the file, what is wrong with it and the mend, if it is not there,
    cut, not UTF-8 or something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read ({problem.strerror}); {mend}") from None
    except (ValueError, RecursionError) as problem:
        wrong = "is not UTF-8" if isinstance(problem, UnicodeError) else "is cut off, or no JSON"
        raise ValueError(f"{path} {wrong if path.stat().st_size else 'is empty'}; {mend}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; {mend}")
    return content


def caches() -> Path:
    """Returns the folder of this package among the user's caches; RuntimeError without a home."""
    said = os.environ.get("XDG_CACHE_HOME", "")  # must be absolute, says its specification
    return (Path(said) if Path(said).is_absolute() else Path.home() / ".cache") / "notepad_jax"


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file at once or not at all; makes its folder. Other objects become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1, default=str) + "\n").encode())


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """As `write_json`, with a digest by which `read_sealed` sees that nothing has changed."""
    content = json.loads(json.dumps(content, default=str))
    write_json(path, {**content, DIGEST: _digest(content)})


def read_sealed(path: Path, mend: str) -> dict[str, Any]:
    """As `read_json`; raises ValueError, too, if the file is not what was written.

    One without a digest is taken as it is.
    """
    content = read_json(path, mend)
    said = content.pop(DIGEST, None)
    if said is not None and said != _digest(content):
        raise ValueError(
            f"{path} is not what was written there: damaged, or changed by hand; {mend}"
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def text_of(arrays: Sequence[np.ndarray], dtype: str) -> str:
    """Returns arrays, joined, as a text for JSON, bit by bit."""
    return base64.b64encode(np.concatenate(arrays).astype(dtype).tobytes()).decode("ascii")


def array_of(text: str, dtype: str) -> np.ndarray:
    """Returns the array that `text_of` wrote as `dtype`."""
    return np.frombuffer(base64.b64decode(text), dtype).astype(dtype[1:])


def write_whole(path: Path, content: bytes) -> None:
    """Writes or replaces a file atomically; whatever goes wrong, `path` is what it was."""
    write_blocks(path, [content])


def write_blocks(path: Path, blocks: Iterable[bytes]) -> None:
    """As `write_whole`, of content that is made while it is written."""
    temporary = half_written(path)
    try:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())  # see `sync`
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # on a full disk, half a file


def half_written(path: Path) -> Path:
    """Returns where `write_blocks` has a file until it is whole; a kill leaves that there."""
    return path.with_name(path.name + ".tmp")


def write_all(file: IO[bytes], data: bytes) -> int:
    """Writes all of `data` to a file that may take less at a time; returns how much that is."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    return len(data)


def sync(path: Path) -> None:
    """Waits until a file's bytes are on its disk: what to do before it gets its name.

    A machine that fails may otherwise remember the name and not the content.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until a folder's names, new and gone ones, are on its disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
