"""Safetensors in a local folder or a bucket: read by byte range, written all or nothing.

Reading goes through tensorstore's key-value store, so `/data/qwen`, `gs://bucket/qwen` and
`s3://bucket/qwen` are one code path. `Safetensors.open` reads headers only and checks every
number in them against the others and against the files, so that what is refused is refused
before a weight is read. `place` then builds one sharded parameter: it reads the rows that
this process's devices need, once, in blocks, straight into one host buffer per device. The
buffers alive at one time are bounded by `budget`; `jax.make_array_from_callback` would hold
all of them at once.

Writing (`write`) plans the parts, then streams one tensor at a time into a temporary folder
beside the target, which takes the target's name by one rename. Same tensors, same bytes.

What the tensors are called and how their axes are folded is not known here: `Layout` says
it, and the table of a model family (the neighbour above) makes Layouts.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import io
import itertools
import json
import math
import os
import re
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import ml_dtypes
import numpy as np
import tensorstore as ts

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PART_BYTES = 5 * 10**9  # of tensors in one file; what Hugging Face's own tools write

HEADER_LIMIT = 100_000_000  # bytes; the reference implementation refuses longer headers
BLOCK_BYTES = 8 << 20  # of one read request
STRIP_ROWS = 64  # transposed at once: what fits a cache is transposed ten times as fast
IN_FLIGHT_BYTES = 64 << 20  # of all requests that wait for an answer or for being copied

# https://github.com/huggingface/safetensors#format
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHT_DTYPES = (DTYPES["F32"], DTYPES["BF16"], DTYPES["F16"])
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class StoreProblem(ValueError):
    """Files that cannot be read, or a folder that cannot be written; one line says why."""


# ---------------------------------------------------------------- reading: headers


@dataclasses.dataclass(frozen=True)
class Located:
    """Where one tensor lies."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


@dataclasses.dataclass(frozen=True, eq=False)
class Safetensors:
    """A folder of safetensors files whose headers were read and found consistent."""

    where: str  # the folder or URL, for messages
    kvstore: Any  # a ts.KvStore whose path ends with "/"
    tensors: Mapping[str, Located]

    @classmethod
    def open(cls, source: str | Path) -> Safetensors:
        """Reads the index and the headers under `source`, a local folder or a kvstore URL.

        Raises StoreProblem for files that are missing, cut short, not safetensors (a pickle
        is named and never opened), or whose header or index lies.
        """
        return cls.of(str(source), open_kvstore(source))

    @classmethod
    def of(cls, where: str, kvstore: Any) -> Safetensors:
        """As `open`, of a key-value store that is open already."""
        found: dict[str, Located] = {}
        index = _index(where, kvstore)
        files = [_only_file(where, kvstore)] if index is None else sorted(set(index.values()))
        for file in files:
            for name, located in _header(where, kvstore, file).items():
                if name in found:
                    raise StoreProblem(
                        f"{_at(where, file)} holds {name!r}, and so does {found[name].file}; "
                        f"remove the part that does not belong to this checkpoint"
                    )
                found[name] = located
        for name, file in (index or {}).items():
            if name not in found or found[name].file != file:
                raise StoreProblem(
                    f"{_at(where, INDEX)} says that {name!r} is in {file}, which does not hold "
                    f"it; download index and parts of the same revision"
                )
        return cls(where, kvstore, found)

    def located(self, name: str) -> Located:
        """Returns where a tensor lies; raises StoreProblem if there is none of this name."""
        if name not in self.tensors:
            raise StoreProblem(
                f"{self.where} has no tensor {name!r}; its {CONFIG} asks for it, so the two do "
                f"not belong together or a part is missing"
            )
        return self.tensors[name]

    def read(self, name: str, slices: Sequence[slice] | None = None) -> np.ndarray:
        """Returns a tensor, or `tensor[slices]`, in its stored dtype.

        Only the rows (leading axis) between the first and the last asked for are requested,
        in blocks; of each block the other axes are cut on arrival, so the host holds the
        result and IN_FLIGHT_BYTES. Steps other than 1 are refused (ValueError).
        """
        located = self.located(name)
        ranges = _ranges(tuple(slices or ()), located.shape)
        if not ranges:  # a scalar
            asked = self.kvstore.read(located.file, byte_range=slice(located.start, located.stop))
            size = located.stop - located.start
            raw = _answer(asked, self.where, located.file, size)
            return np.frombuffer(raw, located.dtype).reshape(())
        out = np.empty([stop - start for start, stop in ranges], located.dtype)
        inner = tuple(slice(start, stop) for start, stop in ranges[1:])
        wanted = [_Rows(name, located.shape, *ranges[0])]
        for _, first, block in self.blocks(wanted):
            begin = first - ranges[0][0]
            out[begin : begin + len(block)] = block[(slice(None), *inner)]
        return out

    def blocks(self, wanted: Iterable[_Rows]) -> Iterator[tuple[_Rows, int, np.ndarray]]:
        """Yields (rows asked for, number of the first row, rows) in order, block by block.

        Requests run ahead of the consumer, up to IN_FLIGHT_BYTES (or one row).
        """
        waiting: deque[tuple[_Rows, int, int, str, Any]] = deque()
        flying = 0
        for rows, first, last in itertools.chain.from_iterable(map(self._split, wanted)):
            located = self.tensors[rows.name]
            row = math.prod(rows.shape[1:]) * located.dtype.itemsize
            start, size = located.start + first * row, (last - first) * row
            while waiting and flying + size > IN_FLIGHT_BYTES:
                done = waiting.popleft()
                flying -= done[2]
                yield self._arrived(done)
            asked = self.kvstore.read(located.file, byte_range=slice(start, start + size))
            waiting.append((rows, first, size, located.file, asked))
            flying += size
        while waiting:
            yield self._arrived(waiting.popleft())

    def _split(self, rows: _Rows) -> Iterator[tuple[_Rows, int, int]]:
        located = self.tensors[rows.name]
        row = math.prod(rows.shape[1:]) * located.dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, row))
        if row:
            for first in range(rows.start, rows.stop, step):
                yield rows, first, min(first + step, rows.stop)

    def _arrived(self, request: tuple[_Rows, int, int, str, Any]) -> tuple[_Rows, int, np.ndarray]:
        rows, first, size, file, asked = request
        raw = _answer(asked, self.where, file, size)
        flat = np.frombuffer(raw, self.tensors[rows.name].dtype)
        return rows, first, flat.reshape(-1, *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows [start, stop) of a tensor seen in `shape` (same bytes, other axes)."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def open_kvstore(source: str | Path) -> Any:
    """Opens a local folder or a kvstore URL (gs://, s3://) as a `ts.KvStore`."""
    text = str(source)
    spec: Any = text.rstrip("/") + "/"
    if "://" not in text:
        folder = Path(text).absolute()
        if not folder.is_dir():
            raise StoreProblem(f"{text} is not a folder; give a Hugging Face folder or a gs:// URL")
        spec = {"driver": "file", "path": f"{folder}/"}
    try:
        return ts.KvStore.open(spec).result()
    except (ValueError, OSError) as problem:
        raise StoreProblem(f"{text} cannot be opened: {_line(problem)}") from None


def read_small(source: str, kvstore: Any, file: str) -> bytes | None:
    """Returns a whole small file (a config, a tokenizer), or None if there is none."""
    try:
        found = kvstore.read(file).result()
    except (ValueError, OSError) as problem:
        raise StoreProblem(f"{_at(source, file)} cannot be read: {_line(problem)}") from None
    return bytes(found.value) if found.state == "value" else None


def files_in(kvstore: Any) -> list[str]:
    """Returns the names of the files directly in a store, sorted."""
    names = (key.decode("utf-8", "replace") for key in kvstore.list().result())
    return sorted(name for name in names if "/" not in name)


def read_json(source: str, kvstore: Any, file: str) -> dict[str, Any]:
    """Reads a JSON object; raises StoreProblem if it is absent or something else."""
    raw = read_small(source, kvstore, file)
    if raw is None:
        raise StoreProblem(
            f"{_at(source, file)} is missing; a Hugging Face folder has {CONFIG} and {WEIGHTS}"
        )
    return _object(raw, _at(source, file))


def _object(raw: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object in which no key is given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise StoreProblem(f"{where} names {twice!r} twice; the file was not written whole")
        return dict(pairs)

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except StoreProblem:
        raise
    except (ValueError, RecursionError) as problem:
        raise StoreProblem(f"{where} is not JSON ({_line(problem)}); download it again") from None
    if not isinstance(found, dict):
        raise StoreProblem(f"{where} is not a JSON object; download it again")
    return found


def _index(where: str, kvstore: Any) -> dict[str, str] | None:
    """Returns the weight map, or None where there is no index."""
    raw = read_small(where, kvstore, INDEX)
    if raw is None:
        return None
    at = _at(where, INDEX)
    files = _object(raw, at).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise StoreProblem(f"{at} has no weight_map; download it again")
    for name, file in files.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+", file) or file in (".", ".."):
            raise StoreProblem(f"{at} puts {name!r} into {file!r}, which is no file name")
        if not file.endswith(".safetensors"):
            raise StoreProblem(
                f"{at} puts {name!r} into {file!r}; only safetensors are read, convert it first"
            )
    return files


def _only_file(where: str, kvstore: Any) -> str:
    """Returns model.safetensors, or says what lies there instead."""
    names = files_in(kvstore)
    if WEIGHTS in names:
        return WEIGHTS
    missing = f"{_at(where, WEIGHTS)} is missing"
    pickles = [name for name in names if name.endswith(PICKLES)]
    parts = [name for name in names if name.endswith(".safetensors")]
    if parts:
        raise StoreProblem(f"{missing}, and {parts[0]} has no {INDEX}; download the index, too")
    if pickles:
        raise StoreProblem(f"{missing}; {pickles[0]} is a pickle, which is not read: convert it")
    raise StoreProblem(f"{missing}; download the weights as safetensors")


def _header(where: str, kvstore: Any, file: str) -> dict[str, Located]:
    """Reads and checks the header of one file: every byte belongs to exactly one tensor."""
    at = _at(where, file)
    first = _probe(where, kvstore, file, 0, 8)
    if first is None:
        raise StoreProblem(f"{at} is cut short: it has no header; download it again")
    length = int.from_bytes(first, "little")
    if length > HEADER_LIMIT:
        raise StoreProblem(
            f"{at} announces a header of {length:,} bytes; safetensors have at most "
            f"{HEADER_LIMIT:,}, so this is another kind of file"
        )
    raw = _probe(where, kvstore, file, 8, 8 + length) if length else b""
    if raw is None:
        raise StoreProblem(
            f"{at} is cut short inside its header of {length:,} bytes; download it again"
        )
    entries = _object(raw, f"{at} (its header)")
    entries.pop("__metadata__", None)
    found = {name: _entry(at, file, name, entry, 8 + length) for name, entry in entries.items()}
    end = 8 + length
    for name, located in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if located.start != end:
            kind = "overlaps the tensor before it" if located.start < end else "follows a hole"
            raise StoreProblem(f"{at}: {name!r} {kind}; the header lies, download the file again")
        end = located.stop
    if end > 8 + length and _probe(where, kvstore, file, end - 1, end) is None:
        raise StoreProblem(f"{at} is cut short: its tensors end at byte {end:,}; download it again")
    if _probe(where, kvstore, file, end, end + 1) is not None:
        raise StoreProblem(
            f"{at} goes on after its last tensor, byte {end:,}; the header lies, download it again"
        )
    return found


def _entry(at: str, file: str, name: str, entry: Any, base: int) -> Located:
    """Checks one entry of a header by itself."""

    def counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value)

    entry = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not counts(shape) or not counts(offsets) or len(offsets) != 2 or len(shape) > 32:
        raise StoreProblem(f"{at}: the header's entry for {name!r} is broken; download it again")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise StoreProblem(f"{at}: {name!r} has the unknown dtype {kind!r}; read are {[*DTYPES]}")
    start, stop = offsets
    size = math.prod(shape) * DTYPES[kind].itemsize
    if stop - start != size:
        raise StoreProblem(
            f"{at}: {name!r} is {kind}{shape}, {size:,} bytes, and its offsets span "
            f"{stop - start:,}; the header lies, download the file again"
        )
    return Located(file, DTYPES[kind], tuple(shape), base + start, base + stop)


def _probe(where: str, kvstore: Any, file: str, start: int, stop: int) -> bytes | None:
    """Reads a range; None if the file ends before it does."""
    try:
        found = kvstore.read(file, byte_range=slice(start, stop)).result()
    except ValueError as problem:
        if "OUT_OF_RANGE" in str(problem):
            return None
        raise StoreProblem(f"{_at(where, file)} cannot be read: {_line(problem)}") from None
    except OSError as problem:
        raise StoreProblem(f"{_at(where, file)} cannot be read: {_line(problem)}") from None
    if found.state != "value":
        raise StoreProblem(f"{_at(where, file)} is missing; download it, too")
    return bytes(found.value) if len(found.value) == stop - start else None


def _answer(asked: Any, where: str, file: str, size: int) -> bytes:
    """Waits for a range; a file may shrink or vanish while it is being read."""
    try:
        found = asked.result()
    except (ValueError, OSError) as problem:
        raise StoreProblem(f"{_at(where, file)} cannot be read: {_line(problem)}") from None
    if found.state != "value" or len(found.value) != size:
        raise StoreProblem(f"{_at(where, file)} changed while it was read; try again")
    return found.value


def _at(where: str, file: str) -> str:
    return f"{where.rstrip('/')}/{file}"


def _line(problem: Exception) -> str:
    """The first line of a message: tensorstore adds source locations below."""
    return (str(problem).splitlines() or [type(problem).__name__])[0][:300]


def _ranges(index: Sequence[slice], shape: Sequence[int]) -> list[tuple[int, int]]:
    """Returns [start, stop) per axis of `x[index]`."""
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} slices for the {len(shape)} axes of shape {tuple(shape)}")
    ranges = []
    for cut, size in itertools.zip_longest(index, shape, fillvalue=slice(None)):
        start, stop, step = cut.indices(size)
        if step != 1:
            raise ValueError(f"slice {cut} has step {step}; tensors are read with step 1")
        ranges.append((start, max(start, stop)))
    return ranges


# ---------------------------------------------------------------- reading: parameters


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one parameter of ours lies in published tensors.

    The parameter's leading axes, len(`stack`) of them, count tensors (layers, or layers and
    experts); `names` lists those in row-major order, one name if `stack` is (). Each tensor
    was published in `published` shape; split into the axes `unfolded` (a pure reshape) and
    transposed by `order` it is one entry of the stack. A published linear layer [out, in] of
    ours [D, N, H] has unfolded (N, H, D) and order (2, 0, 1).
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    published: tuple[int, ...]
    unfolded: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != math.prod(self.stack):
            raise ValueError(f"{len(self.names)} names for a stack of {self.stack}")
        if math.prod(self.published) != math.prod(self.unfolded):
            raise ValueError(f"{self.published} cannot be split into {self.unfolded}")
        if sorted(self.order) != list(range(len(self.unfolded))):
            raise ValueError(f"{self.order} is no order of the axes {self.unfolded}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our parameter."""
        return (*self.stack, *(self.unfolded[axis] for axis in self.order))

    def fold(self, ours: np.ndarray) -> np.ndarray:
        """Folds one entry of the stack into its published shape."""
        back = np.argsort(self.order)
        return np.ascontiguousarray(ours.transpose(back)).reshape(self.published)


def check(store: Safetensors, layout: Layout) -> None:
    """Raises StoreProblem if a tensor of `layout` is absent, misshapen, or no weight."""
    for name in layout.names:
        found = store.located(name)
        at = _at(store.where, found.file)
        if found.shape != layout.published:
            raise StoreProblem(
                f"tensor {name!r} in {at} has shape {found.shape}, its {CONFIG} asks for "
                f"{layout.published}"
            )
        if found.dtype not in WEIGHT_DTYPES:
            raise StoreProblem(
                f"tensor {name!r} in {at} is {NAMES[found.dtype]}; weights are read as "
                f"{', '.join(NAMES[d] for d in WEIGHT_DTYPES)}, so take an unquantised checkpoint"
            )


Index = tuple[tuple[int, int], ...]  # [start, stop) per axis


def read(store: Safetensors, layout: Layout, dtype: Any = None) -> np.ndarray:
    """Reads a whole parameter into host memory, in the stored dtype or in `dtype`."""
    check(store, layout)
    whole = tuple((0, size) for size in layout.shape)
    return _fill(store, layout, _dtype(store, layout, dtype), [whole])[whole]


def place(
    store: Safetensors, layout: Layout, sharding: jax.sharding.Sharding, dtype: Any = None,
    budget: int = 1 << 30,
) -> jax.Array:  # fmt: skip
    """Reads a parameter onto the devices of `sharding`, in the stored dtype or in `dtype`.

    Each process reads what its own devices hold. Slices of several devices are gathered in
    one pass over the tensors as long as their buffers fit `budget` bytes (one slice always
    does), so a bucket is read once or a few times and the host never holds more than
    `budget` and the requests in flight. A good budget is one device's share of the model.
    """
    check(store, layout)
    kind = _dtype(store, layout, dtype)
    holders: dict[Index, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(layout.shape).items():
        holders.setdefault(tuple(_ranges(index or (), layout.shape)), []).append(device)
    placed = []
    for group in _groups(list(holders), kind.itemsize, budget):
        buffers = _fill(store, layout, kind, group)
        for index in group:
            buffer = buffers.pop(index)
            # One device after the other: a buffer is free before the next pass begins.
            placed += [jax.block_until_ready(jax.device_put(buffer, d)) for d in holders[index]]
            del buffer
    return jax.make_array_from_single_device_arrays(layout.shape, sharding, placed)


def _dtype(store: Safetensors, layout: Layout, dtype: Any) -> np.dtype:
    if dtype is not None:
        return np.dtype(dtype)
    found = {store.tensors[name].dtype for name in layout.names}
    return max(found, key=lambda kind: kind.itemsize)  # mixed: nothing is rounded


def _groups(indices: list[Index], itemsize: int, budget: int) -> Iterator[list[Index]]:
    """Splits slices into runs whose buffers fit the budget."""
    group: list[Index] = []
    used = 0
    for index in indices:
        size = itemsize * math.prod(stop - start for start, stop in index)
        if group and used + size > budget:
            yield group
            group, used = [], 0
        group.append(index)
        used += size
    if group:
        yield group


def _fill(
    store: Safetensors, layout: Layout, dtype: np.dtype, indices: Sequence[Index]
) -> dict[Index, np.ndarray]:
    """Reads the slices `indices` of a parameter in one pass over the tensors they touch.

    Blocks of rows arrive; a row is an entry of unfolded axis 0, which is axis `at` of ours.
    """
    depth = len(layout.stack)
    buffers = {index: np.empty([stop - start for start, stop in index], dtype) for index in indices}
    at = layout.order.index(0) if layout.order else 0
    wanted: list[_Rows] = []
    takers: dict[str, list[tuple[tuple[int, ...], Index]]] = {}
    for place_in_stack, name in zip(np.ndindex(*layout.stack), layout.names, strict=True):
        taking = [
            index for index in indices
            if all(a <= i < b for i, (a, b) in zip(place_in_stack, index[:depth], strict=True))
        ]  # fmt: skip
        if not taking:
            continue
        spans = [index[depth + at] for index in taking]
        first, last = min(a for a, _ in spans), max(b for _, b in spans)
        takers[name] = [(place_in_stack, index) for index in taking]
        wanted.append(_Rows(name, layout.unfolded, first, last))
    for rows, first, block in store.blocks(wanted):
        for place_in_stack, index in takers[rows.name]:
            inner = index[depth:]
            begin = max(first, inner[at][0])
            end = min(first + len(block), inner[at][1])
            cut = tuple(slice(*inner[layout.order.index(axis)]) for axis in range(1, len(inner)))
            target: list[Any] = [
                i - a for i, (a, _) in zip(place_in_stack, index[:depth], strict=True)
            ]
            target += [slice(None)] * len(inner)
            for row in range(begin, end, STRIP_ROWS):
                last = min(row + STRIP_ROWS, end)
                strip = np.ascontiguousarray(block[(slice(row - first, last - first), *cut)])
                target[depth + at] = slice(row - inner[at][0], last - inner[at][0])
                buffers[index][tuple(target)] = strip.transpose(layout.order)
    return buffers


# ---------------------------------------------------------------- writing


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Written:
    """What an export wrote."""

    folder: str
    files: tuple[str, ...]
    tensors: int
    bytes: int  # of tensors


@dataclasses.dataclass(frozen=True)
class _Part:
    file: str
    header: bytes
    tensors: tuple[Planned, ...]

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(tensor.bytes for tensor in self.tensors)


def write(
    target: str | Path,
    tensors: Sequence[Planned],
    values: Callable[[str], np.ndarray],
    beside: Mapping[str, bytes],
    part_bytes: int = PART_BYTES,
    overwrite: bool = False,
    wrote: Callable[[Planned], None] = lambda tensor: None,
) -> Written:
    """Writes tensors as safetensors parts, their index, and the small files `beside`.

    `values` is called once per tensor, in the order of `tensors`, and only one result is
    held. Tensors that fit one part are written as model.safetensors without an index.

    A local target appears by one rename when everything is on disk; with `overwrite` it
    takes the place of an older export in the same way. A bucket has no rename: its objects
    are uploaded (each part is held in memory meanwhile) and config.json, without which
    nobody reads the rest, comes last; `overwrite` is refused there. Raises StoreProblem.
    """
    parts = _plan(tensors, part_bytes)
    small = {**beside, **_index_file(parts)}
    for name in small:
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"{name!r} is no name for a file beside the weights")
    needed = sum(part.bytes for part in parts) + sum(map(len, small.values()))
    files = (*(part.file for part in parts), *sorted(small))
    done = Written(str(target), files, len(tensors), sum(tensor.bytes for tensor in tensors))
    if "://" in str(target):
        _upload(str(target), parts, small, values, overwrite, wrote)
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


def _plan(tensors: Sequence[Planned], part_bytes: int) -> list[_Part]:
    """Fills parts in order; a tensor larger than a part has a part of its own."""
    if part_bytes < 1:
        raise ValueError(f"part_bytes is {part_bytes}; a part has at least one byte")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError("two tensors have one name")
    groups: list[list[Planned]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.bytes for t in groups[-1]) + tensor.bytes > part_bytes:
            groups.append([])
        groups[-1].append(tensor)
    single = len(groups) == 1
    return [
        _Part(
            WEIGHTS if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors",
            _header_bytes(group),
            tuple(group),
        )
        for number, group in enumerate(groups, 1)
    ]


def _header_bytes(tensors: Sequence[Planned]) -> bytes:
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


def _index_file(parts: Sequence[_Part]) -> dict[str, bytes]:
    if len(parts) == 1:
        return {}
    total = sum(tensor.bytes for part in parts for tensor in part.tensors)
    files = {tensor.name: part.file for part in parts for tensor in part.tensors}
    text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    return {INDEX: (json.dumps(text, indent=2) + "\n").encode()}


def _stream(
    part: _Part, file: IO[bytes], values: Callable[[str], np.ndarray],
    wrote: Callable[[Planned], None],
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


@contextlib.contextmanager
def new_folder(
    target: str | Path, needed_bytes: int = 0, overwrite: bool = False
) -> Iterator[Path]:
    """Gives a temporary folder that becomes `target` by one rename if the block succeeds.

    Whatever stops the block, `target` is what it was. An exception leaves nothing behind; a
    kill leaves a hidden sibling, which the next call for this target removes. Raises
    StoreProblem for a target that is not empty (with `overwrite`: that is no export), too
    little space, or a folder that cannot be written.
    """
    folder = Path(target).absolute()
    _refuse_target(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        free = shutil.disk_usage(folder.parent).free
        if free < needed_bytes:
            raise StoreProblem(_full(folder, needed_bytes, free))
        mark = f".{folder.name}.{socket.gethostname()}.{os.getpid()}."
        temporary = Path(tempfile.mkdtemp(prefix=mark, dir=folder.parent))
    except OSError as problem:
        raise StoreProblem(f"{folder} cannot be written: {problem}") from None
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's are private
        _sync_folder(temporary)
        _refuse_target(folder, overwrite)  # somebody else may have been faster
        _take_name(temporary, folder)
    except Exception as problem:
        # Libraries that write with C++ wrap the errno into a message.
        full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(problem):
            free = shutil.disk_usage(folder.parent).free
            raise StoreProblem(_full(folder, needed_bytes, free)) from None
        if isinstance(problem, OSError):
            raise StoreProblem(f"{folder} cannot be written: {problem}") from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_target(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise StoreProblem(f"{folder} exists and is no folder; choose another destination")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise StoreProblem(f"{folder} is not empty; choose another folder, or --overwrite")
    if not _is_policy(folder):
        raise StoreProblem(
            f"{folder} holds something that is no exported policy; choose another folder"
        )


def _is_policy(folder: Path) -> bool:
    """Whether a folder's config.json is a model's: a run has one, too, and is never replaced."""
    try:
        return "model_type" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _full(folder: Path, needed: int, free: int) -> str:
    needs = f"needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free"
    return f"{folder}: the disk is full: it {needs}; nothing was written"


def _take_name(temporary: Path, folder: Path) -> None:
    """Renames `temporary` to `folder`; what was there is left under the temporary name."""
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(temporary, folder)  # an empty folder may be replaced
    elif not _exchange(temporary, folder):
        # Without an exchanging rename there is a moment in which the name is free.
        old = temporary.with_name(temporary.name + ".old")
        os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except OSError:
            os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _sync_folder(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step (renameat2, Linux); False where that cannot be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.renameat2
    except AttributeError:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    return call(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(swap)) == 0


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Removes what killed exports to `folder` left, if their process was on this host."""
    mark = f".{folder.name}.{socket.gethostname()}."
    for path in folder.parent.iterdir():
        found = re.fullmatch(re.escape(mark) + r"(\d+)\.[^.]+", path.name)
        if found and not _alive(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _upload(
    target: str, parts: Sequence[_Part], small: Mapping[str, bytes],
    values: Callable[[str], np.ndarray], overwrite: bool, wrote: Callable[[Planned], None],
) -> None:  # fmt: skip
    """Writes the objects of a bucket; config.json is the last, and none stay on failure."""
    kvstore = open_kvstore(target)
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
        for name in sorted(small, key=lambda name: (name == CONFIG, name)):
            put(name, small[name])
    except BaseException as problem:
        for name in written:
            with contextlib.suppress(Exception):
                kvstore.write(name, None).result()
        if isinstance(problem, StoreProblem) or not isinstance(problem, (ValueError, OSError)):
            raise
        raise StoreProblem(f"{target} cannot be written: {_line(problem)}") from None
