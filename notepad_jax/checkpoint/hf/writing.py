"""Writing of safetensors, all or nothing, to a local folder or a bucket.

`write` plans the parts, then streams one tensor at a time into a temporary folder beside the
target, which takes the target's name by one rename (`folder_swap`, beside); a bucket gets its
objects one by one and config.json last. Same tensors, same bytes. What the tensors are called
and where they come from is not known here: `huggingface` (above) says it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from notepad_jax.checkpoint.hf import storage
from notepad_jax.checkpoint.hf.folder_swap import new_folder
from notepad_jax.checkpoint.hf.headers import NAMES
from notepad_jax.checkpoint.hf.storage import CONFIG, WEIGHTS, StoreProblem

PART_BYTES = 5 * 10**9  # of tensors in one file; what Hugging Face's own tools write


@dataclasses.dataclass(frozen=True)
class FileNames:
    """The file names of an export."""

    weights: str  # of tensors that fit one part
    config: str  # without which the rest is not read


POLICY = FileNames(WEIGHTS, CONFIG)


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Export:
    """A summary of what an export wrote."""

    folder: str
    files: tuple[str, ...]
    tensors: int
    bytes: int  # of tensors


@dataclasses.dataclass(frozen=True)
class _Part:
    file: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(tensor.bytes for tensor in self.tensors)


def write(
    target: str | Path,
    tensors: Sequence[PlannedTensor],
    values: Callable[[str], np.ndarray],
    beside: Mapping[str, bytes],
    part_bytes: int = PART_BYTES,
    overwrite: bool = False,
    wrote: Callable[[PlannedTensor], None] = lambda tensor: None,
    kind: FileNames = POLICY,
) -> Export:
    """Writes tensors as safetensors parts, their index, and the small files `beside`.

    `values` is called once per tensor, in the order of `tensors`, and only one result is
    held. Tensors that fit one part are written as `kind.weights` without an index.

    A local target appears by one rename when everything is on disk; with `overwrite` it
    takes the place of an older export in the same way. A bucket has no rename: its objects
    are uploaded (each part is held in memory meanwhile) and `kind.config` comes last;
    `overwrite` is refused there. Raises StoreProblem.
    """
    parts = _plan(tensors, part_bytes, kind.weights)
    small = {**beside, **_index_file(parts, kind.weights)}
    for name in small:
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"{name!r} is no name for a file beside the weights")
    needed = sum(part.bytes for part in parts) + sum(map(len, small.values()))
    files = (*(part.file for part in parts), *sorted(small))
    done = Export(str(target), files, len(tensors), sum(tensor.bytes for tensor in tensors))
    if "://" in str(target):
        _upload(str(target), parts, small, values, overwrite, wrote, kind.config)
        return done
    with new_folder(target, needed, overwrite) as folder:
        for part in parts:
            with (folder / part.file).open("wb") as file:
                _stream(part, file, values, wrote)
                _to_disk(file)
        for name, content in sorted(small.items()):
            with (folder / name).open("wb") as file:
                file.write(content)
                _to_disk(file)
    return done


def _plan(tensors: Sequence[PlannedTensor], part_bytes: int, weights: str) -> list[_Part]:
    """Fills parts in order; a tensor larger than a part has a part of its own."""
    if part_bytes < 1:
        raise ValueError(f"part_bytes is {part_bytes}; a part has at least one byte")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError("two tensors have one name")
    groups: list[list[PlannedTensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.bytes for t in groups[-1]) + tensor.bytes > part_bytes:
            groups.append([])
        groups[-1].append(tensor)
    single, stem = len(groups) == 1, weights.removesuffix(".safetensors")
    return [
        _Part(
            weights if single else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors",
            _header_bytes(group),
            tuple(group),
        )
        for number, group in enumerate(groups, 1)
    ]


def _header_bytes(tensors: Sequence[PlannedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    end = 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise ValueError(f"{tensor.name} is {tensor.dtype}, which safetensors do not have")
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index_file(parts: Sequence[_Part], weights: str) -> dict[str, bytes]:
    if len(parts) == 1:
        return {}
    total = sum(tensor.bytes for part in parts for tensor in part.tensors)
    files = {tensor.name: part.file for part in parts for tensor in part.tensors}
    text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    return {f"{weights}.index.json": (json.dumps(text, indent=2) + "\n").encode()}


def _stream(
    part: _Part, file: IO[bytes], values: Callable[[str], np.ndarray],
    wrote: Callable[[PlannedTensor], None],
) -> None:  # fmt: skip
    file.write(part.header)
    for tensor in part.tensors:
        value = np.asarray(values(tensor.name))
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise StoreProblem(
                f"{tensor.name} is {value.dtype}{list(value.shape)}; planned was "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
        file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        wrote(tensor)


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())  # a rename must not become visible before what it names


def _upload(
    target: str, parts: Sequence[_Part], small: Mapping[str, bytes],
    values: Callable[[str], np.ndarray], overwrite: bool, wrote: Callable[[PlannedTensor], None],
    config: str,
) -> None:  # fmt: skip
    """Writes the objects of a bucket; `config` is the last, and none stay on failure."""
    kvstore = storage.open_kvstore(target)
    if overwrite:
        raise StoreProblem(
            f"{target}: a bucket cannot be overwritten in one step; choose a new one"
        )
    written: list[str] = []

    def put(name: str, content: bytes) -> None:
        written.append(name)
        kvstore.write(name, content).result()

    try:
        if kvstore.list().result():
            raise StoreProblem(f"{target} is not empty; choose another destination")
        for part in parts:
            file = io.BytesIO()
            _stream(part, file, values, wrote)
            put(part.file, file.getvalue())
        for name in sorted(small, key=lambda name: (name == config, name)):
            put(name, small[name])
    except BaseException as problem:
        for name in written:
            with contextlib.suppress(Exception):
                kvstore.write(name, None).result()
        if isinstance(problem, StoreProblem) or not isinstance(problem, (ValueError, OSError)):
            raise
        raise StoreProblem(f"{target} cannot be written: {storage.first_line(problem)}") from None
