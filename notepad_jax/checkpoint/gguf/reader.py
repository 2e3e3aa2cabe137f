"""A GGUF file opened: metadata and tensors, checked; a few rows dequantised at a time.

The only module that imports `gguf`, the library of llama.cpp's authors, which parses the file
and knows the quantisations. It trusts its input: what a damaged or hostile header would make it
do is refused here, in one line, before any weight is read. Weights stay on disk, mapped; `rows`
multiplies out what is asked for. Above: `policy`; the neighbours `config`, `names` and
`tokenizer` know what the metadata mean.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from notepad_jax.checkpoint.hf import storage
from notepad_jax.checkpoint.hf.storage import StoreProblem, quoted

VERSIONS = (2, 3)
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
MOST_TENSORS = 1_000_000
MOST_PARTS = 3_000_000  # numbers and strings of all metadata; Qwen 2.5 has 0.9 million


@dataclasses.dataclass(frozen=True, eq=False)
class File:
    """An open GGUF file whose header was read and fits the file."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, strings, bools, and lists of them
    tensors: Mapping[str, gguf.ReaderTensor]
    kinds: Mapping[str, int]  # how its numbers are stored, and how many tensors are: "Q4_1", 210

    def shape(self, name: str) -> tuple[int, ...]:
        """The axes of a tensor, slowest first, as numpy and safetensors count them."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def place(self, name: str) -> tuple[int, int]:
        """The bytes of the file, [start, stop), that hold a tensor."""
        tensor = self.tensors[name]
        return tensor.data_offset, tensor.data_offset + tensor.n_bytes

    def rows(self, name: str, index: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of `tensor[index]`, float32; only these are read and multiplied out.

        `index` leaves at least one axis. A vector is read whole: its blocks may span its entries.
        """
        tensor = self.tensors[name]
        if tensor.data.ndim == len(index) + 1:
            whole = gguf.dequantize(tensor.data[None, *index], tensor.tensor_type)
            return whole[0, start:stop]
        return gguf.dequantize(tensor.data[(*index, slice(start, stop))], tensor.tensor_type)


def read(source: str | Path) -> File:
    """Opens a local GGUF file; reads its header and no weight.

    Raises StoreProblem, in one line, for what is no GGUF, is one of a version or byte order that
    is not read, one part of several, cut short or damaged, or holds numbers that `gguf` cannot
    multiply out.
    """
    path = Path(source)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no file"
        raise StoreProblem(f"{source} is {what}; give a .gguf file that lies here")
    try:
        _refuse_start(path)
        opened = _Bounded(path)
        metadata = {name: field.contents() for name, field in opened.fields.items()}
    except StoreProblem:
        raise
    except OSError as problem:
        raise StoreProblem(f"{path} cannot be read: {problem.strerror or problem}") from None
    except Exception as problem:  # the library's own, and numpy's, for what it did not expect
        raise StoreProblem(
            f"{path} is damaged, or newer than this gguf ({storage.first_line(problem)}); download "
            f"it again, or upgrade gguf"
        ) from None
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise _is_split(path, parts)
    tensors = {tensor.name: tensor for tensor in opened.tensors}
    _refuse_kinds(path, tensors)
    kinds = Counter(tensor.tensor_type.name for tensor in opened.tensors)
    return File(path, metadata, tensors, dict(kinds.most_common()))


class _Bounded(gguf.GGUFReader):
    """The library's reader, which asks for whatever a header says; here it ends with the file.

    Every byte comes through `_get`: without it, an array that claims 2^60 numbers is an endless
    loop over empty slices. `_build_tensors` names the tensor that is stored in an unknown way.
    """

    _parts = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end, size = int(offset) + np.dtype(dtype).itemsize * int(count), len(self.data)
        if end > size:
            raise StoreProblem(
                f"{self.data.filename} is cut short: its header speaks of byte {end:,}, and it "
                f"has {size:,}; download it again"
            )
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise StoreProblem(
                f"{self.data.filename} has more than {MOST_PARTS:,} numbers and strings before "
                f"its weights; it is damaged, download it again"
            )
        return super()._get(offset, dtype, count, override_order)

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, name, _, _, kind, _ = field.parts
            if int(kind[0]) not in {*gguf.GGMLQuantizationType}:
                raise StoreProblem(
                    f"{self.data.filename}: tensor {quoted(bytes(name).decode())} is stored in a "
                    f"way ({kind[0]}) that this gguf does not know; upgrade gguf, or take another "
                    f"quantisation"
                )
        super()._build_tensors(start_offs, fields)


def _refuse_start(path: Path) -> None:
    """Raises StoreProblem for the first 24 bytes: magic, version, counts."""
    with path.open("rb") as file:
        start = file.read(24)
    if start[:4] != b"GGUF":
        raise StoreProblem(
            f"{path} is not a GGUF file (it begins with {quoted(start[:4])}); download it again, "
            f"or name a Hugging Face folder"
        )
    if found := SPLIT.search(path.name):
        raise _is_split(path, int(found[2]))
    if len(start) < 24:
        raise StoreProblem(f"{path} is cut short: it has {len(start)} bytes; download it again")
    version, tensors, fields = struct.unpack("<IQQ", start[4:])
    if version & 0xFFFF == 0:
        raise StoreProblem(
            f"{path} is big-endian; convert it on such a machine, or take a little-endian one"
        )
    if version not in VERSIONS:
        raise StoreProblem(
            f"{path} is GGUF version {version}; read are {' and '.join(map(str, VERSIONS))}, so "
            f"convert the model again"
        )
    if max(tensors, fields) > MOST_TENSORS:
        raise StoreProblem(
            f"{path} announces {tensors:,} tensors and {fields:,} fields; it is damaged, download "
            f"it again"
        )


def _is_split(path: Path, parts: int) -> StoreProblem:
    return StoreProblem(
        f"{path} is one of {parts} parts of a model; join them first: llama-gguf-split --merge "
        f"FIRST-PART JOINED.gguf"
    )


def _refuse_kinds(path: Path, tensors: Mapping[str, gguf.ReaderTensor]) -> None:
    """Raises StoreProblem for numbers that nothing multiplies out, by trying a row of each kind."""
    first: dict[str, gguf.ReaderTensor] = {}
    for tensor in tensors.values():
        if tensor.n_elements == 0:
            raise StoreProblem(f"{path}: tensor {quoted(tensor.name)} is empty; download it again")
        first.setdefault(tensor.tensor_type.name, tensor)
    for kind, tensor in first.items():
        try:
            gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
        except NotImplementedError:
            raise StoreProblem(
                f"{path}: tensor {quoted(tensor.name)} is {kind}, which gguf does not multiply "
                f"out; take another quantisation of this model (Q4_K_M, Q8_0, F16, ...)"
            ) from None
