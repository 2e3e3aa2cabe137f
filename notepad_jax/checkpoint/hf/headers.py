"""Safetensors read by byte range: headers first, checked before a weight is read.

`Safetensors.open` reads headers only and checks every number in them against the others and
against the files, so that what is refused is refused before a weight is read. Tensors come
whole, in slices, or as a stream of blocks of rows whose requests run a little ahead. Below:
`storage`, folders and buckets. Above: `sharded_loading`, which puts rows onto devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from notepad_jax.checkpoint.hf import storage
from notepad_jax.checkpoint.hf.storage import CONFIG, INDEX, WEIGHTS, StoreProblem, quoted

LONGEST_NAME = 255  # characters of a file's name
HEADER_LIMIT = 100_000_000  # bytes; the reference implementation refuses longer headers
BLOCK_BYTES = 8 << 20  # of one read request
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
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class Located:
    """The location of one tensor in a safetensors file."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


@dataclasses.dataclass(frozen=True, eq=False)
class Safetensors:
    """An open folder of safetensors files, whose headers were read and found consistent."""

    where: str  # the folder or URL, for messages
    kvstore: Any  # a ts.KvStore whose path ends with "/"
    tensors: Mapping[str, Located]

    @classmethod
    def open(cls, source: str | Path) -> Safetensors:
        """Reads the index and the headers under `source`, a local folder or a kvstore URL.

        Raises StoreProblem for files that are missing, cut short, not safetensors (a pickle
        is named and never opened), or whose header or index lies.
        """
        return cls.of(str(source), storage.open_kvstore(source))

    @classmethod
    def of(cls, where: str, kvstore: Any) -> Safetensors:
        """Opens, as `open`, what lies in a key-value store that is open already."""
        found: dict[str, Located] = {}
        index = _index(where, kvstore)
        # One file wins, as in transformers, which leaves the index of older parts where it saves.
        if index and WEIGHTS not in index.values() and WEIGHTS in storage.files_in(kvstore):
            index = None
        files = [_only_file(where, kvstore)] if index is None else sorted(set(index.values()))
        for file in files:
            for name, located in _header(where, kvstore, file).items():
                if name in found:
                    raise StoreProblem(
                        f"{storage.at(where, file)} holds {quoted(name)}, and so does "
                        f"{found[name].file}; remove the part that does not belong to this "
                        f"checkpoint"
                    )
                found[name] = located
        for name, file in (index or {}).items():
            if name not in found or found[name].file != file:
                raise StoreProblem(
                    f"{storage.at(where, INDEX)} says that {quoted(name)} is in {file}, which "
                    f"does not hold it; download index and parts of the same revision"
                )
        return cls(where, kvstore, found)

    @classmethod
    def single(cls, where: str, kvstore: Any, file: str) -> Safetensors:
        """Opens, as `of`, one file, whatever it is called."""
        return cls(where, kvstore, _header(where, kvstore, _only_file(where, kvstore, file)))

    def located(self, name: str) -> Located:
        """Returns where a tensor lies; raises StoreProblem if there is none of this name."""
        if name not in self.tensors:
            raise StoreProblem(
                f"{self.where} has no tensor {quoted(name)}; its {CONFIG} asks for it, so the two "
                f"do not belong together or a part is missing"
            )
        return self.tensors[name]

    def read(self, name: str, slices: Sequence[slice] | None = None) -> np.ndarray:
        """Returns a tensor, or `tensor[slices]`, in its stored dtype.

        Only the rows (leading axis) between the first and the last asked for are requested,
        in blocks; of each block the other axes are cut on arrival, so the host holds the
        result and IN_FLIGHT_BYTES. Steps other than 1 are refused (ValueError).
        """
        located = self.located(name)
        ranges = bounds(tuple(slices or ()), located.shape)
        if not ranges:  # a scalar
            asked = self.kvstore.read(located.file, byte_range=slice(located.start, located.stop))
            size = located.stop - located.start
            raw = _answer(asked, self.where, located.file, size)
            return np.frombuffer(raw, located.dtype).reshape(())
        out = np.empty([stop - start for start, stop in ranges], located.dtype)
        inner = tuple(slice(start, stop) for start, stop in ranges[1:])
        wanted = [TensorRows(name, located.shape, *ranges[0])]
        for _, first, block in self.blocks(wanted):
            begin = first - ranges[0][0]
            out[begin : begin + len(block)] = block[(slice(None), *inner)]
        return out

    def blocks(self, wanted: Iterable[TensorRows]) -> Iterator[tuple[TensorRows, int, np.ndarray]]:
        """Yields (rows asked for, number of the first row, rows) in order, block by block.

        Requests run ahead of the consumer, up to IN_FLIGHT_BYTES (or one row).
        """
        waiting: deque[tuple[TensorRows, int, int, str, Any]] = deque()
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

    def _split(self, rows: TensorRows) -> Iterator[tuple[TensorRows, int, int]]:
        located = self.tensors[rows.name]
        row = math.prod(rows.shape[1:]) * located.dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, row))
        if row:
            for first in range(rows.start, rows.stop, step):
                yield rows, first, min(first + step, rows.stop)

    def _arrived(
        self, request: tuple[TensorRows, int, int, str, Any]
    ) -> tuple[TensorRows, int, np.ndarray]:
        rows, first, size, file, asked = request
        raw = _answer(asked, self.where, file, size)
        flat = np.frombuffer(raw, self.tensors[rows.name].dtype)
        return rows, first, flat.reshape(-1, *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class TensorRows:
    """Rows [start, stop) of a tensor seen in `shape` (same bytes, other axes)."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _index(where: str, kvstore: Any) -> dict[str, str] | None:
    """Returns the weight map, or None where there is no index."""
    raw = storage.read_small(where, kvstore, INDEX)
    if raw is None:
        return None
    at = storage.at(where, INDEX)
    files = storage.parse_object(raw, at).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise StoreProblem(f"{at} has no weight_map; download it again")
    for name, file in files.items():
        known = isinstance(file, str) and file.isprintable() and len(file) <= LONGEST_NAME
        if not known or not re.fullmatch(r"[^/\\]+", file) or file in (".", ".."):
            raise StoreProblem(
                f"{at} puts {quoted(name)} into {quoted(file)}, which is no file name"
            )
        if not file.endswith(".safetensors"):
            raise StoreProblem(
                f"{at} puts {quoted(name)} into {quoted(file)}; only safetensors are read, "
                f"convert it first"
            )
    return files


def _only_file(where: str, kvstore: Any, file: str = WEIGHTS) -> str:
    """Returns the one file of weights, or says what lies there instead."""
    names = storage.files_in(kvstore)
    if file in names:
        return file
    storage.refuse_special(where, file)
    missing = f"{storage.at(where, file)} is missing"
    pickles = [name for name in names if name.endswith(PICKLES)]
    parts = [name for name in names if name.endswith(".safetensors")]
    if parts and file == WEIGHTS:
        raise StoreProblem(f"{missing}, and {parts[0]} has no {INDEX}; download the index, too")
    if pickles:
        raise StoreProblem(f"{missing}; {pickles[0]} is a pickle, which is not read: convert it")
    raise StoreProblem(f"{missing}; download the weights as safetensors")


def _header(where: str, kvstore: Any, file: str) -> dict[str, Located]:
    """Reads and checks the header of one file: every byte belongs to exactly one tensor."""
    at = storage.at(where, file)
    storage.refuse_special(where, file)
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
    entries = storage.parse_object(raw, f"{at} (its header)")
    entries.pop("__metadata__", None)
    found = {name: _entry(at, file, name, entry, 8 + length) for name, entry in entries.items()}
    end = 8 + length
    for name, located in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if located.start != end:
            kind = "overlaps the tensor before it" if located.start < end else "follows a hole"
            raise StoreProblem(
                f"{at}: {quoted(name)} {kind}; the header lies, download the file again"
            )
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
        raise StoreProblem(
            f"{at}: the header's entry for {quoted(name)} is broken; download it again"
        )
    if not isinstance(kind, str) or kind not in DTYPES:
        raise StoreProblem(
            f"{at}: {quoted(name)} has the unknown dtype {quoted(kind)}; read are {[*DTYPES]}"
        )
    start, stop = offsets
    size = math.prod(shape) * DTYPES[kind].itemsize
    if stop - start != size:
        raise StoreProblem(
            f"{at}: {quoted(name)} is {kind}{shape}, {size:,} bytes, and its offsets span "
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
        raise StoreProblem(
            f"{storage.at(where, file)} cannot be read: {storage.first_line(problem)}"
        ) from None
    except OSError as problem:
        raise StoreProblem(
            f"{storage.at(where, file)} cannot be read: {storage.first_line(problem)}"
        ) from None
    if found.state != "value":
        raise StoreProblem(f"{storage.at(where, file)} is missing; download it, too")
    return bytes(found.value) if len(found.value) == stop - start else None


def _answer(asked: Any, where: str, file: str, size: int) -> bytes:
    """Waits for a range; a file may shrink or vanish while it is being read."""
    try:
        found = asked.result()
    except (ValueError, OSError) as problem:
        raise StoreProblem(
            f"{storage.at(where, file)} cannot be read: {storage.first_line(problem)}"
        ) from None
    if found.state != "value" or len(found.value) != size:
        raise StoreProblem(f"{storage.at(where, file)} changed while it was read; try again")
    return found.value


def bounds(index: Sequence[slice], shape: Sequence[int]) -> list[tuple[int, int]]:
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
