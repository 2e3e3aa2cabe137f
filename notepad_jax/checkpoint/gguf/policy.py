"""A GGUF file as a published policy: what a Hugging Face folder would have held.

Joins the neighbours: config.json out of the metadata (`config`), the tokenizer's files
(`tokenizer`), and tensors under Hugging Face's names (`names`) that are multiplied out as they
are asked for (`reader`). `Tensors` stands where safetensors stand, so that placing, sharding and
casting are one way for both. Memory: a block of rows at a time.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from notepad_jax.checkpoint.gguf import config, names, reader, tokenizer
from notepad_jax.checkpoint.gguf.names import ROPE_FACTORS, TensorPlace
from notepad_jax.checkpoint.hf import storage
from notepad_jax.checkpoint.hf.config import read_config
from notepad_jax.checkpoint.hf.fields import Fields, ImportProblem
from notepad_jax.checkpoint.hf.headers import Located, TensorRows
from notepad_jax.checkpoint.hf.huggingface import Published
from notepad_jax.checkpoint.hf.names import check
from notepad_jax.checkpoint.hf.storage import StoreProblem, quoted
from notepad_jax.text.tokenizer import open_tokenizer

BLOCK_BYTES = 8 << 20  # of float32 rows that are multiplied out at once
FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a file under the names of a Hugging Face folder, all float32.

    Queries and keys of a `llama` come back in Hugging Face's order: llama.cpp turns the pairs of
    entries 0 and 1, 2 and 3, ... of a head, transformers those of 0 and H/2, 1 and H/2 + 1, ...
    """

    file: reader.File
    sources: Mapping[str, TensorPlace]
    tensors: Mapping[str, Located]
    paired: bool  # whether heads are in llama.cpp's order

    @property
    def where(self) -> str:
        return str(self.file.path.parent)

    def located(self, name: str) -> Located:
        """Returns where a tensor lies; raises StoreProblem if there is none of this name."""
        if name not in self.tensors:
            raise StoreProblem(f"{self.file.path} has no tensor {quoted(names.spelled(name))}")
        return self.tensors[name]

    def blocks(self, wanted: Iterable[TensorRows]) -> Iterator[tuple[TensorRows, int, np.ndarray]]:
        """Yields (rows asked for, number of the first row, rows) in order, block by block."""
        for rows in wanted:
            inner = rows.shape[1:]
            step = max(1, BLOCK_BYTES // (FLOAT32.itemsize * math.prod(inner)))
            for first in range(rows.start, rows.stop, step):
                yield rows, first, self._rows(rows, first, min(first + step, rows.stop))

    def _rows(self, rows: TensorRows, first: int, last: int) -> np.ndarray:
        source = self.sources[rows.name]
        each = self.tensors[rows.name].shape[0] // rows.shape[0]  # rows of the file for one of ours
        found = self.file.rows(source.name, source.index, first * each, last * each)
        if self.paired and source.rotated:
            heads, size = last - first, rows.shape[1]  # our rows are heads
            found = found.reshape(heads, size // 2, 2, -1).swapaxes(1, 2)
        return found.reshape(last - first, *rows.shape[1:])


def open_policy(source: str | Path) -> Published:
    """Reads the header of a local GGUF file and compares all that it says; reads no weight.

    The dtype of the config is float32 where all tensors are, and else bfloat16, whose rounding is
    finer than that of most quantisations. Raises ImportProblem or StoreProblem (ValueErrors of
    one line).
    """
    file = reader.read(source)
    metadata = Fields(file.metadata, str(file.path))
    architecture = config.architecture(metadata)
    beside = tokenizer.files(metadata)
    _refuse_tokenizer(file.path, beside)
    sources = dict(names.published(file.tensors, file.shape))
    _refuse_unknown(file, {source.name for source in sources.values()}, architecture)
    tensors = {name: _located(file, source) for name, source in sources.items()}
    dtype = "float32" if [*file.kinds] == ["F32"] else "bfloat16"
    text = config.published(metadata, sources, _factors(file), dtype)
    text |= _ids(beside)
    policy = read_config(text, str(file.path))
    shapes = {name: located.shape for name, located in tensors.items()}
    check(policy, shapes, str(file.path), "its metadata ask", names.spelled)
    return Published(
        config=policy,
        store=Tensors(file, sources, tensors, paired=architecture == "llama"),
        text=text,
        beside=beside,
        kinds=file.kinds,
    )


def _located(file: reader.File, source: TensorPlace) -> Located:
    start, stop = file.place(source.name)
    shape = file.shape(source.name)[len(source.index) :]
    return Located(file.path.name, FLOAT32, shape, start, stop)


def _factors(file: reader.File) -> np.ndarray | None:
    """The rope factors, if there are any; a vector of half a head."""
    if ROPE_FACTORS not in file.tensors:
        return None
    return file.rows(ROPE_FACTORS, (), 0, file.shape(ROPE_FACTORS)[0])


def _refuse_unknown(file: reader.File, known: set[str], architecture: str) -> None:
    """Raises ImportProblem for a tensor that nothing would be made of."""
    spare = {ROPE_FACTORS} if architecture == "llama" else set()
    for name in file.tensors:
        # Some old files hold what rotates each layer's heads; it follows from the metadata.
        if name not in known | spare and not name.endswith(".attn_rot_embd.weight"):
            raise ImportProblem(
                f"{file.path}: there is a tensor {quoted(name)}, which a {architecture} as we "
                f"compute it lacks"
            )


def _refuse_tokenizer(path: Path, beside: Mapping[str, bytes]) -> None:
    """Raises ImportProblem where the files that were made are no tokenizer that can be used."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in beside.items():
            (Path(folder) / name).write_bytes(content)
        try:
            open_tokenizer(folder, lambda line: None)
        except ValueError as problem:
            said = storage.first_line(problem).replace(f"{folder}/", "")
            raise ImportProblem(f"{path}: of its metadata was made {said}") from None


def _ids(beside: Mapping[str, bytes]) -> dict[str, Any]:
    """Token ids as some readers look for them in config.json, too."""
    return storage.parse_object(beside["generation_config.json"], "generation_config.json")
