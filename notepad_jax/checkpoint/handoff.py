"""The third bridge: a policy snapshot published by the trainer, adopted by the engine.

Two paths behind one interface. `InProcess` keeps a copy of the weights on the devices;
`ThroughStorage` writes an orbax step and reads `params` back alone, so trainer and engine
may be different processes on different machines with different meshes. Pointed at the
folder that `manager.Checkpoints` writes, a hand-off at every step costs one save.

Nobody should have to wonder whether weights really arrived: the checksum of every leaf is
recorded at publication and compared at adoption, after the leaf was laid out for its new
devices and before it is cast to the engine's dtype, or quantised. Orbax v1 is marked
experimental, so only this module and `manager` (the neighbour above) import it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from orbax.checkpoint import v1 as ocp

from notepad_jax.model.matrices import Quantized, quantize
from notepad_jax.types import PolicySnapshot


class HandoffError(ValueError):
    """Weights that are missing, of another shape, or not the ones that were published."""


@runtime_checkable
class Handoff(Protocol):
    """Carries the newest policy from a trainer to an engine."""

    def publish(self, snapshot: PolicySnapshot) -> str:
        """Makes `snapshot` the newest one; returns its checksum."""

    def newest(self) -> int | None:
        """Returns the version that `adopt` would return, or None before any publication."""

    def adopt(self, abstract_params: Any) -> PolicySnapshot:
        """Returns the newest snapshot in the dtypes and shardings of `abstract_params`.

        `abstract_params` is a tree of `jax.ShapeDtypeStruct`s (or of arrays); a leaf with
        no sharding goes to the default device, and in the place of a matrix that is to be
        quantised stands a `Quantized` of two of them. Raises HandoffError.
        """


# ---------------------------------------------------------------- checksums


def _mix(x: Any) -> Any:
    """Scrambles uint32s of jax or numpy one to one (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


_SHIFT = np.uint32(0x9E3779B9)  # element 0 must not be scrambled to 0
_BLOCK = 1 << 16  # elements that numpy scrambles at once, small enough for a core's cache


def _leaf_sum(leaf: Array) -> Array:
    """Sums, modulo 2**32, each element's bit pattern scrambled with its position.

    A sum of integers does not depend on the order, hence not on the sharding. One changed
    bit always changes it, because for a fixed position the scrambling is one to one.
    """
    width = leaf.dtype.itemsize * 8
    pattern = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    bits = jax.lax.bitcast_convert_type(pattern, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    position = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
        position = position * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, leaf.shape, axis
        )
    return jnp.sum(_mix(bits + _mix(position + _SHIFT)), dtype=jnp.uint32)


def part_sum(part: np.ndarray, first: int) -> int:
    """Returns what a part adds to its leaf's sum, for those who read a leaf part by part.

    `first` is the row-major position in the leaf of the part's first element; the others
    follow it without a gap. Parts' sums add up modulo 2**32.
    """
    flat = np.ascontiguousarray(part).reshape(-1)
    bits, total = flat.view(f"uint{flat.dtype.itemsize * 8}"), 0
    for start in range(0, flat.size, _BLOCK):
        block = bits[start : start + _BLOCK].astype(np.uint32)
        position = np.arange(block.size, dtype=np.uint32) + np.uint32((first + start) % 2**32)
        total += int(_mix(block + _mix(position + _SHIFT)).sum(dtype=np.uint64))
    return total % 2**32


def described(leaf: Any, total: int) -> str:
    """Returns a leaf's checksum from its sum; `leaf` has a dtype and a shape."""
    return f"{leaf.dtype}[{'x'.join(map(str, leaf.shape))}]:{total:08x}"


@jax.jit
def _leaf_sums(params: Any) -> Array:
    return jnp.stack([_leaf_sum(leaf) for leaf in jax.tree.leaves(params)])


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of `tree` by path, such as "layers/q", in the tree's own order."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def leaf_checksums(params: Any) -> dict[str, str]:
    """Returns, per leaf path, a checksum of its bits, dtype and shape.

    The sums are made on the devices that hold the leaves; four bytes a leaf come back.
    Leaves must be at most 32 bits wide.
    """
    named = named_leaves(params)
    for name, leaf in named.items():
        if leaf.dtype.itemsize > 4:
            raise HandoffError(f"{name} is {leaf.dtype}; a policy's leaves have at most 32 bits")
    if not named:
        return {}
    sums = jax.device_get(_leaf_sums(params))  # device to host, 4 bytes per leaf
    return {
        name: described(leaf, int(value))
        for (name, leaf), value in zip(named.items(), sums, strict=True)
    }


def combine(leaves: Mapping[str, str]) -> str:
    """Returns 16 hexadecimal digits for a table of leaf checksums."""
    text = json.dumps(sorted(leaves.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def checksum(params: Any) -> str:
    """Returns 16 hexadecimal digits that name these weights, whatever their sharding.

    Any changed bit, swapped or transposed leaf, dtype or leaf name changes it.
    """
    return combine(leaf_checksums(params))


def compare(published: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    """Raises HandoffError naming the first leaf that differs from what was published."""
    for name in sorted(set(published) | set(found)):
        was, now = published.get(name, "absent"), found.get(name, "absent")
        if was != now:
            raise HandoffError(
                f"{where}: leaf {name!r} was published as {was} and arrived as {now}; "
                f"these are not the published weights, so publish again"
            )


# ---------------------------------------------------------------- reading one step


def context() -> ocp.Context:
    """Returns the orbax context in which `data` and `meta` are readable JSON files.

    Large leaves that are stacked over layers are written a layer at a time, so that an
    export (`stored`) can read them so.
    """
    registry = ocp.handlers.local_registry()
    for name in ("data", "meta"):
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=name)
    made = ocp.Context()
    made.checkpointables.registry = registry
    made.array_options.saving.scoped_storage_options_creator = _by_layer
    return made


def _by_layer(path: Any, leaf: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """A chunk for each layer where that is a megabyte or more; a small leaf stays whole."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    stacked = name.startswith("layers/") and leaf.ndim > 1
    if not stacked or leaf.nbytes < leaf.shape[0] * 2**20:
        return None
    return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,))


def steps_in(folder: str | Path) -> list[int]:
    """Returns the steps under `folder` whose save was finished, ascending.

    A save in progress, or one that was killed, is not among them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if re.fullmatch(r"\d+", path.name)]
    return sorted(int(name) for name in names if _is_finished(folder / name))


def _is_finished(step: Path) -> bool:
    """Whether orbax wrote its commit time, the last thing before a step gets its name.

    `ocp.is_orbax_checkpoint` alone says yes to a folder with half of the files.
    """
    mark = step / "_CHECKPOINT_METADATA"
    if not mark.is_file() or not ocp.is_orbax_checkpoint(step):
        return False
    try:
        return bool(json.loads(mark.read_text()).get("commit_timestamp_nsecs"))
    except (OSError, ValueError):  # deleted, or being written, while we look
        return False


def placed(abstract: Any) -> Any:
    """Returns `abstract` with the default device where no sharding is named."""
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None) or default  # numpy arrays have none
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, abstract)


def check_shapes(saved: Any, wanted: Any, where: str) -> None:
    """Raises HandoffError where the trees' leaf names or shapes differ."""
    have, want = named_leaves(saved), named_leaves(wanted)
    for name in sorted(set(have) | set(want)):
        if name not in have:
            raise HandoffError(f"{where} has no leaf {name!r}, which the policy needs")
        if name not in want:
            raise HandoffError(f"{where} has a leaf {name!r}, which the policy does not know")
        if tuple(have[name].shape) != tuple(want[name].shape):
            raise HandoffError(
                f"{where}: leaf {name!r} has shape {tuple(have[name].shape)}, the policy needs "
                f"{tuple(want[name].shape)}; the two were built from different model configs"
            )


def as_published(target: Any) -> Any:
    """Returns `target` without quantisation: shapes and places as weights are published."""
    return jax.tree.map(
        lambda x: x.values if isinstance(x, Quantized) else x,
        target,
        is_leaf=lambda x: isinstance(x, Quantized),
    )


_quantize = jax.jit(quantize, static_argnums=1)


def _in_form(leaf: Array, wanted: Any) -> Any:
    if not isinstance(wanted, Quantized):
        return leaf if leaf.dtype == wanted.dtype else leaf.astype(wanted.dtype)
    inputs = tuple(axis for axis, size in enumerate(wanted.scale.shape) if size == 1)
    return jax.device_put(_quantize(leaf, inputs), jax.tree.map(lambda x: x.sharding, wanted))


def cast(params: Any, target: Any) -> Any:
    """Returns `params` in the dtypes of `target`, quantised where `target` is.

    `params` lie where `as_published(target)` says. One leaf is cast at a time and then let
    go, so where nobody else holds `params` the devices never hold both policies whole.
    """
    leaves, tree = jax.tree.flatten(params)
    del params
    for i, wanted in enumerate(tree.flatten_up_to(target)):
        leaves[i] = _in_form(leaves[i], wanted)
    return jax.tree.unflatten(tree, leaves)


def load_params(folder: str | Path, step: int, abstract_params: Any) -> tuple[Any, dict[str, Any]]:
    """Reads `params` alone from one step; returns (params, meta).

    Every device reads its own slices, in the saved dtype; the checksums are compared with
    those in `meta`; then leaves are cast. Raises HandoffError on any difference.
    """
    path = Path(folder).absolute() / str(step)
    target = placed(abstract_params)
    plain = as_published(target)
    with context():
        saved = ocp.checkpointables_metadata(path).metadata["params"]
        check_shapes(saved, plain, str(path))
        kinds = named_leaves(saved)
        as_saved = [
            jax.ShapeDtypeStruct(leaf.shape, kinds[name].dtype, sharding=leaf.sharding)
            for name, leaf in named_leaves(plain).items()
        ]
        as_saved = jax.tree.unflatten(jax.tree.structure(plain), as_saved)
        loaded = ocp.load_checkpointables(path, {"params": as_saved, "meta": None})
    meta = loaded["meta"]
    compare(meta["leaf_checksums"], leaf_checksums(loaded["params"]), str(path))
    return cast(loaded.pop("params"), target), meta


def as_stored(folder: str | Path, step: int) -> Any:
    """Returns the shapes and dtypes of a step's `params`; no weight is read."""
    with context():
        saved = ocp.checkpointables_metadata(Path(folder).absolute() / str(step))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved.metadata["params"])


# ---------------------------------------------------------------- the two paths


@jax.jit
def _copy(params: Any) -> Any:
    return jax.tree.map(jnp.copy, params)


@dataclasses.dataclass(frozen=True, eq=False)
class _Published:
    snapshot: PolicySnapshot
    leaf_checksums: Mapping[str, str]


class InProcess:
    """Trainer and engine in one process: the published copy stays on the devices.

    The copy is what makes it safe for the trainer to donate its parameters to the next
    update while the engine still decodes with the previous ones.
    """

    def __init__(self) -> None:
        self._published: _Published | None = None

    def publish(self, snapshot: PolicySnapshot) -> str:
        leaves = leaf_checksums(snapshot.params)
        copied = PolicySnapshot(snapshot.version, _copy(snapshot.params))
        self._published = _Published(copied, leaves)
        return combine(leaves)

    def newest(self) -> int | None:
        return None if self._published is None else self._published.snapshot.version

    def adopt(self, abstract_params: Any) -> PolicySnapshot:
        if self._published is None:
            raise HandoffError("no policy was published yet; publish one before adopting")
        snapshot, target = self._published.snapshot, placed(abstract_params)
        plain = as_published(target)
        where = f"policy version {snapshot.version}"
        check_shapes(snapshot.params, plain, where)
        shardings = jax.tree.map(lambda x: x.sharding, plain)
        params = jax.device_put(snapshot.params, shardings)
        compare(self._published.leaf_checksums, leaf_checksums(params), where)
        return PolicySnapshot(snapshot.version, cast(params, target))


class ThroughStorage:
    """Trainer and engine share a folder of orbax steps; a policy version is a step number.

    `publish` writes `params` and `meta`, unless the folder already holds that version (the
    training checkpoint of the same step): then it only proves that they are the same.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder = Path(folder).absolute()
        self._keep = keep  # steps that survive when publish writes

    def publish(self, snapshot: PolicySnapshot) -> str:
        leaves = leaf_checksums(snapshot.params)
        path = self.folder / str(snapshot.version)
        if snapshot.version in steps_in(self.folder):
            with context():
                meta = ocp.load_checkpointables(path, {"meta": None})["meta"]
            compare(meta["leaf_checksums"], leaves, f"{path}, saved before,")
            return combine(leaves)
        meta = {"step": snapshot.version, "checksum": combine(leaves), "leaf_checksums": leaves}
        with writer(self.folder, self._keep, keep_every=None) as steps:
            drop_from(steps, snapshot.version)
            steps.save_checkpointables(
                snapshot.version, {"params": snapshot.params, "meta": meta}, force=True
            )
        return combine(leaves)

    def newest(self) -> int | None:
        found = steps_in(self.folder)
        return found[-1] if found else None

    def adopt(self, abstract_params: Any) -> PolicySnapshot:
        version = self.newest()
        if version is None:
            raise HandoffError(f"no finished snapshot under {self.folder}; publish one first")
        try:
            params, _ = load_params(self.folder, version, abstract_params)
        except (OSError, KeyError, ValueError):
            if version in steps_in(self.folder):
                raise
            # The trainer, in another process, replaced this version while it was being read.
            return self.adopt(abstract_params)
        return PolicySnapshot(version, params)


def writer(folder: str | Path, keep: int, keep_every: int | None) -> ocp.training.Checkpointer:
    """Opens `folder` for writing: newest `keep` steps survive, and multiples of `keep_every`.

    What a killed save left behind is removed, so one process at a time may write.
    """
    policies = ocp.training.preservation_policies
    kept: list[Any] = [policies.LatestN(keep)]
    if keep_every is not None:
        kept.append(policies.EveryNSteps(keep_every))
    return ocp.training.Checkpointer(
        Path(folder).absolute(),
        context=context(),
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=policies.AnyPreservationPolicy(kept),
        cleanup_tmp_directories=True,
    )


def drop_from(steps: ocp.training.Checkpointer, step: int) -> None:
    """Deletes `step` and later ones: a run that resumed further back writes them anew."""
    for later in [found.step for found in steps.checkpoints if found.step >= step]:
        steps.delete(later)
