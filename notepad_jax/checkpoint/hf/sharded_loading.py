"""Sharded loading: parameters read out of published tensors, straight onto devices.

`Layout` says which tensors make up a parameter and how their axes are folded; the table of a
model family (`names`, through `huggingface` above) makes Layouts. `place` builds one sharded
parameter: it reads the rows that this process's devices need, once, in blocks, out of a `Store`
(`headers`, below, or a GGUF file), straight into one host buffer per device. The buffers alive at
one time are bounded by `budget`; `jax.make_array_from_callback` would hold all of them at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from notepad_jax.checkpoint.hf import storage
from notepad_jax.checkpoint.hf.headers import DTYPES, NAMES, Located, TensorRows, bounds
from notepad_jax.checkpoint.hf.storage import CONFIG, StoreProblem, quoted

ALIGNMENT = 64  # bytes; XLA's on CPUs
STRIP_ROWS = 64  # transposed at once: what fits a cache is transposed ten times as fast
WEIGHT_DTYPES = (DTYPES["F32"], DTYPES["BF16"], DTYPES["F16"])
# The bits that are all set in infinities and NaNs, and in nothing else.
EXPONENTS = {
    DTYPES["F32"]: np.uint32(0x7F800000),
    DTYPES["BF16"]: np.uint16(0x7F80),
    DTYPES["F16"]: np.uint16(0x7C00),
}


class Store(Protocol):
    """A source of published tensors: safetensors or a GGUF file."""

    @property
    def where(self) -> str:
        """The folder or URL, for messages."""

    @property
    def tensors(self) -> Mapping[str, Located]:
        """Every tensor, by its name in a Hugging Face folder."""

    def located(self, name: str) -> Located:
        """Returns where a tensor lies; raises StoreProblem if there is none of this name."""

    def blocks(self, wanted: Iterable[TensorRows]) -> Iterator[tuple[TensorRows, int, np.ndarray]]:
        """Yields (rows asked for, number of the first row, rows) in order, block by block."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of one parameter of ours in published tensors.

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

    def unfold(self, published: np.ndarray) -> np.ndarray:
        """Returns one published tensor as the entry of the stack that it is."""
        return published.reshape(self.unfolded).transpose(self.order)


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedLeaf:
    """A lazy parameter, read when it is indexed, one tensor at a time: `leaf[layer]`.

    What `lazy_arrays.Stored` is of an orbax step, for programs that stream a policy through.
    """

    store: Store
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype:
        return stored_dtype(self.store, self.layout)

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        """Returns the entry at `index`, which has as many numbers as `layout.stack`."""
        number = int(np.ravel_multi_index(index, self.layout.stack)) if index else 0
        name = self.layout.names[number]
        return self.layout.unfold(_finite(self.store, name, self.store.read(name), self.dtype))


def check(store: Store, layout: Layout) -> None:
    """Raises StoreProblem if a tensor of `layout` is absent, misshapen, or no weight."""
    for name in layout.names:
        found = store.located(name)
        at = storage.at(store.where, found.file)
        if found.shape != layout.published:
            raise StoreProblem(
                f"tensor {quoted(name)} in {at} has shape {found.shape}, its {CONFIG} asks for "
                f"{layout.published}"
            )
        if found.dtype not in WEIGHT_DTYPES:
            raise StoreProblem(
                f"tensor {quoted(name)} in {at} is {NAMES[found.dtype]}; weights are read as "
                f"{', '.join(NAMES[d] for d in WEIGHT_DTYPES)}, so take an unquantised checkpoint"
            )


Index = tuple[tuple[int, int], ...]  # [start, stop) per axis


def place(
    store: Store, layout: Layout, sharding: jax.sharding.Sharding, dtype: Any = None,
    budget: int = 1 << 30,
) -> jax.Array:  # fmt: skip
    """Reads a parameter onto the devices of `sharding`, in the stored dtype or in `dtype`.

    Each process reads what its own devices hold. Slices of several devices are gathered in
    one pass over the tensors as long as their buffers fit `budget` bytes (one slice always
    does), so a bucket is read once or a few times and the host never holds more than
    `budget` and the requests in flight. A good budget is one device's share of the model.
    """
    check(store, layout)
    kind = stored_dtype(store, layout) if dtype is None else np.dtype(dtype)
    holders: dict[Index, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(layout.shape).items():
        holders.setdefault(tuple(bounds(index or (), layout.shape)), []).append(device)
    placed = []
    for group in _groups(list(holders), kind.itemsize, budget):
        buffers = _fill(store, layout, kind, group)
        for index in group:
            buffer = buffers.pop(index)
            # One device after the other: a buffer is free before the next pass begins.
            placed += [jax.block_until_ready(jax.device_put(buffer, d)) for d in holders[index]]
            del buffer
    return jax.make_array_from_single_device_arrays(layout.shape, sharding, placed)


def stored_dtype(store: Store, layout: Layout) -> np.dtype:
    """Returns the dtype that a parameter is read in: the widest of its tensors'."""
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


def _buffer(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An empty array that a CPU device takes as it is: jax copies what is not so aligned."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _finite(store: Store, name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts a few rows of a tensor; raises StoreProblem for what is no number, then or before."""
    with np.errstate(over="ignore"):
        cast = values.astype(dtype, copy=False)
    bits = cast.view(f"u{dtype.itemsize}")
    exponent = EXPONENTS[dtype]
    if not ((bits & exponent) == exponent).any():
        return cast
    at = storage.at(store.where, store.tensors[name].file)
    worst = np.abs(values.astype(np.float64)).max()
    if np.isfinite(worst):
        raise StoreProblem(
            f"tensor {quoted(name)} in {at} holds {worst:.6g}, too large for {dtype}; "
            f"take another dtype"
        )
    raise StoreProblem(
        f"tensor {quoted(name)} in {at} holds {worst}, which is no weight; the "
        f"checkpoint is damaged, or its training had failed: take another"
    )


def _fill(
    store: Store, layout: Layout, dtype: np.dtype, indices: Sequence[Index]
) -> dict[Index, np.ndarray]:
    """Reads the slices `indices` of a parameter in one pass over the tensors they touch.

    Blocks of rows arrive; a row is an entry of unfolded axis 0, which is axis `at` of ours.
    """
    depth = len(layout.stack)
    buffers = {index: _buffer([stop - start for start, stop in index], dtype) for index in indices}
    at = layout.order.index(0) if layout.order else 0
    wanted: list[TensorRows] = []
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
        wanted.append(TensorRows(name, layout.unfolded, first, last))
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
                strip = _finite(store, rows.name, strip, dtype)
                target[depth + at] = slice(row - inner[at][0], last - inner[at][0])
                buffers[index][tuple(target)] = strip.transpose(layout.order)
    return buffers
