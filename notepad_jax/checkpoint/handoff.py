"""The third bridge: a policy snapshot published by the trainer, adopted by the engine.

Two paths behind one interface. `InProcess` keeps a copy of the weights on the devices;
`ThroughStorage` writes an orbax step and reads `params` back alone, so trainer and engine
may be different processes on different machines with different meshes. Pointed at the
folder that `training_state.Checkpoints` writes, a hand-off at every step costs one save.

The checksum of every leaf is recorded at publication and compared at adoption, after the leaf
was laid out for its new devices and before it is cast to the engine's dtype, or quantised.
Below: `steps` (orbax), `targets` (what the engine asks for), `checksums`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint.checksums import HandoffError, combine, compare, leaf_checksums
from notepad_jax.checkpoint.steps import context, drop_from, load_params, steps_in, writer
from notepad_jax.checkpoint.targets import as_published, cast, check_shapes, placed
from notepad_jax.types import PolicySnapshot


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
