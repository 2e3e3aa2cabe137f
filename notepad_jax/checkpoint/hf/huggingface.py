"""Import and export of Hugging Face folders: the table of a family, over safetensors.

Of the neighbours below, `names` knows what tensors are called and how they are folded, `config`
reads config.json, `headers`, `sharded_loading` and `writing` know files; this module joins them: a
`Layout` per parameter, `import_params` onto a mesh, `import_policy` onto one device,
`export_params` back. Arrays are committed to their places as they are made (`sharded_loading`), so
that nothing compiles twice for them. Sources may be buckets.
Memory: an import holds `budget` bytes beside what the devices hold, an export one tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from notepad_jax.checkpoint.hf import names, sharded_loading, storage, writing
from notepad_jax.checkpoint.hf.config import read_config, write_config
from notepad_jax.checkpoint.hf.fields import ImportProblem
from notepad_jax.checkpoint.hf.headers import NAMES, Safetensors
from notepad_jax.checkpoint.hf.sharded_loading import Layout
from notepad_jax.checkpoint.hf.storage import CONFIG, INDEX, WEIGHTS
from notepad_jax.checkpoint.hf.writing import PART_BYTES, Export, PlannedTensor
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import abstract_params
from notepad_jax.parallel import place
from notepad_jax.text import tokenizer

__all__ = ["CONFIG", "INDEX", "WEIGHTS", "ImportProblem", "read_config", "write_config"]

TOKENIZER = "tokenizer.model"
# What belongs to a policy beside weights and config.json; copied as it is.
COMPANIONS = ("generation_config.json", *tokenizer.FILES)
# Spellings of transformers 5 for what `write_config` says in those of transformers 4.
NEWER = ("dtype", "rope_parameters", "num_local_experts", "layer_types")

Tree = dict[str, Any]


def layouts(config: PolicyConfig) -> dict[tuple[str, ...], Layout]:
    """Returns the layout of every parameter in published tensors, by the parameter's path."""
    found = {}
    for path, group in itertools.groupby(names.table(config), key=lambda part: part.path):
        parts = list(group)
        stack = tuple(n + 1 for n in parts[-1].index)  # rows are in order, so this is the last
        inputs = parts[0].inputs or 0
        shape = parts[0].shape
        found[path] = Layout(
            names=tuple(part.name for part in parts),
            stack=stack,
            published=parts[0].published_shape,
            unfolded=(*shape[inputs:], *shape[:inputs]),
            order=(*range(len(shape) - inputs, len(shape)), *range(len(shape) - inputs)),
        )
    return found


# ---------------------------------------------------------------- import


@dataclasses.dataclass(frozen=True)
class Published:
    """A published policy whose headers were read and agree with each other; no weight was."""

    config: PolicyConfig
    store: sharded_loading.Store
    text: Mapping[str, Any]  # its config.json
    beside: Mapping[str, bytes]  # its tokenizer's files and generation_config.json
    kinds: Mapping[str, int]  # how its numbers are stored, and how many tensors are: "BF16", 290


def import_config(source: str | Path) -> PolicyConfig:
    """Reads the sizes of the policy in a folder or bucket."""
    kvstore = storage.open_kvstore(source)
    text = storage.read_json(str(source), kvstore, CONFIG)
    return read_config(text, f"{str(source).rstrip('/')}/{CONFIG}")


def open_policy(source: str | Path) -> tuple[PolicyConfig, Safetensors]:
    """Reads config.json and the headers, and compares them; no weight is read.

    Raises ImportProblem or StoreProblem (ValueErrors of one line).
    """
    config = import_config(source)
    store = Safetensors.open(source)
    shapes = {name: located.shape for name, located in store.tensors.items()}
    names.check(config, shapes, str(source))
    for layout in layouts(config).values():
        sharded_loading.check(store, layout)
    return config, store


def open_published(source: str | Path) -> Published:
    """Reads and checks what `open_policy` does, with everything that an import takes along."""
    config, store = open_policy(source)
    kinds = Counter(NAMES[located.dtype] for located in store.tensors.values())
    text = storage.read_json(str(source), store.kvstore, CONFIG)
    return Published(config, store, text, companions(source), dict(kinds.most_common()))


def import_policy(source: str | Path) -> tuple[PolicyConfig, Tree]:
    """Reads a folder onto the first device; returns the config and a tree in the stored dtype.

    `valid_vocab` is the size of the embedding unless the folder was exported by us: lower it
    to the tokenizer's size with `dataclasses.replace`. Raises as `open_policy`.
    """
    config, store = open_policy(source)
    first = place.first_device()
    return config, import_params(
        config, store, jax.tree.map(lambda _: first, abstract_params(config))
    )


def import_params(
    config: PolicyConfig,
    store: sharded_loading.Store,
    shardings: Any,
    dtype: str | None = None,
    placed: Callable[[int], None] = lambda size: None,
) -> Tree:
    """Reads the parameters onto the devices of `shardings` (a tree as `parameters.shardings`).

    They come in `dtype`, or in the stored one. Each process reads what its devices hold. The
    host's buffers are bounded by one device's share of the parameters. `placed` is told the
    bytes of each parameter when it is there.
    """
    share = largest_share(config, shardings, dtype or "float32")

    def leaf(path: tuple[str, ...], layout: Layout) -> jax.Array:
        sharding = shardings
        for key in path:
            sharding = sharding[key]
        array = sharded_loading.place(store, layout, sharding, dtype, budget=share)
        placed(array.nbytes)
        return array

    return _tree((path, leaf(path, layout)) for path, layout in layouts(config).items())


def as_stored(config: PolicyConfig, store: sharded_loading.Store) -> Tree:
    """Returns the shapes of the parameters and the dtypes they are stored in; reads no weight."""
    return _tree(
        (path, jax.ShapeDtypeStruct(layout.shape, sharded_loading.stored_dtype(store, layout)))
        for path, layout in layouts(config).items()
    )


def open_tree(config: PolicyConfig, store: sharded_loading.Store) -> Tree:
    """Returns lazy parameters, read when they are indexed (`sharded_loading.PublishedLeaf`)."""
    return _tree(
        (path, sharded_loading.PublishedLeaf(store, layout))
        for path, layout in layouts(config).items()
    )


def largest_share(config: PolicyConfig, shardings: Any, dtype: str) -> int:
    """Returns the bytes of all parameters that one device holds."""
    leaves = jax.tree.leaves(abstract_params(config, dtype))
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    )


def companions(source: str | Path) -> dict[str, bytes]:
    """Reads the tokenizer's files and generation_config.json of a folder, those it has."""
    kvstore = storage.open_kvstore(source)
    found = {n: storage.read_small(str(source), kvstore, n) for n in COMPANIONS}
    return {name: content for name, content in found.items() if content is not None}


def _tree(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> Tree:
    tree: Tree = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


# ---------------------------------------------------------------- export


def export_params(
    config: PolicyConfig,
    params: Any,
    folder: str | Path,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes `params` as a local Hugging Face folder, replacing an older export; see `export`."""
    export(config, params, Path(folder).absolute(), beside=beside, overwrite=True)
    return Path(folder).absolute()


def export(
    config: PolicyConfig,
    params: Any,
    target: str | Path,
    dtype: str | None = None,
    beside: Mapping[str, bytes] | None = None,
    like: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
    overwrite: bool = False,
    wrote: Callable[[int], None] = lambda size: None,
) -> Export:
    """Writes a policy as a Hugging Face folder, all or nothing, tensor by tensor (`writing.write`).

    Leaves of `params` are arrays of any sharding, or `lazy_arrays.Stored`: whatever has a shape,
    a dtype and `[index]`. They are written in `dtype`, or as they are. `beside` are files to
    add. `like` is the config.json that the policy was imported with: what it says beyond
    our own (token ids, versions) is kept. Same weights, same bytes. Raises ValueError.
    """
    leaves = {}
    for keys, wanted in jax.tree.flatten_with_path(abstract_params(config))[0]:
        path = tuple(key.key for key in keys)
        leaves[path] = leaf = _leaf(params, path)
        if tuple(leaf.shape) != wanted.shape:
            raise ImportProblem(
                f"{'/'.join(path)} has shape {tuple(leaf.shape)}, not {wanted.shape}"
            )
    table = layouts(config)  # after the shapes: a config may name more layers than there are
    entries = {
        name: (path, index)
        for path, layout in table.items()
        for name, index in zip(layout.names, np.ndindex(*layout.stack), strict=True)
    }

    def kind(path: tuple[str, ...]) -> np.dtype:
        return np.dtype(leaves[path].dtype if dtype is None else dtype)

    def value(name: str) -> np.ndarray:
        path, index = entries[name]
        entry = jax.device_get(leaves[path][index])  # device to host, one tensor at a time
        return table[path].fold(np.asarray(entry).astype(kind(path), copy=False))

    plan = [
        PlannedTensor(name, kind(path), table[path].published)
        for name, (path, _) in entries.items()
    ]
    written = {key: said for key, said in (like or {}).items() if key not in NEWER}
    written |= write_config(config, str(plan[0].dtype))
    files = {**(beside or {}), CONFIG: (json.dumps(written, indent=2) + "\n").encode()}
    return writing.write(
        target, plan, value, files, part_bytes, overwrite, lambda tensor: wrote(tensor.bytes)
    )


def _leaf(params: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if key not in params:
            raise ImportProblem(f"the parameters lack {'/'.join(path)}, which the config asks for")
        params = params[key]
    return params
