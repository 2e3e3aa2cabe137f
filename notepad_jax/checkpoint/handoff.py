"""The weight hand-off (bridge three): a policy that the trainer publishes and the engine adopts.

Two paths behind one interface, each built with what the engine asks for. `InProcess` makes the
engine's copy when a policy is published; `ThroughStorage` writes an orbax step and reads
`params` back alone, so trainer and engine may be different processes on different machines
with different meshes; the folder may be a bucket. Pointed at the folder that
`training_state.Checkpoints` writes, a hand-off at every step costs one save.

What is published is what is trained. Leaves that no step changes, the base of adapters, are
handed over once: in memory when the bridge is built, through storage at the first adoption of a
step that names them (`steps.write_base`). What is adopted is always the whole policy, and its
versions share the base.

The checksum of every leaf is compared when the leaf was laid out for its new devices: through
storage with the one that was recorded at publication, before it is cast to the engine's dtype, or
quantised; in memory with that of what left, which was cast before. They cover every weight, so an
adoption does not hash the files of `params` as well: that would be a second reading of all weights
at every step. Below: `steps` and `restore` (orbax), `abstract_trees` (what the engine asks for),
`checksums`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from notepad_jax.checkpoint import bucket
from notepad_jax.checkpoint.abstract_trees import (
    as_published,
    carry,
    check_shapes,
    narrowed,
    placed,
    share,
)
from notepad_jax.checkpoint.checksums import (
    HandoffError,
    combine,
    compare,
    leaf_checksums,
)
from notepad_jax.checkpoint.fence import Life
from notepad_jax.checkpoint.restore import load_base, load_own
from notepad_jax.checkpoint.steps import BASE, Folder, read_meta, set_aside, steps_in, write
from notepad_jax.model.parameters import join, without
from notepad_jax.parallel import hosts
from notepad_jax.types import PolicySnapshot


@runtime_checkable
class Handoff(Protocol):
    """A weight hand-off: carries the newest policy from a trainer to an engine.

    Built with a target, a tree as `abstract_trees` describes it: every snapshot is adopted in its
    shapes, dtypes and places.
    """

    def publish(self, snapshot: PolicySnapshot) -> None:
        """Makes `snapshot` the newest one.

        Afterwards the trainer may donate the snapshot's arrays. Raises HandoffError.
        """

    def newest(self) -> int | None:
        """Returns the version that `adopt` would return, or None before any publication."""

    def adopt(self) -> PolicySnapshot:
        """Returns the newest snapshot as the target asks for it. Raises HandoffError.

        In memory each is adopted once.
        """


class InProcess:
    """A hand-off in memory, within one process: to publish is to make the engine's copy.

    The copy is made layer by layer, straight into the engine's dtypes and places
    (`abstract_trees.carry`): beside what the trainer and the engine hold already, a hand-off takes
    the new copy and a few layers of one leaf. `adopt` gives that copy away, once: what lets
    go of it has its memory.

    `base` are the target's leaves that are never published, of arrays that are not donated. Where
    the engine asks for one as it lies there, it is shared and takes no memory.
    """

    def __init__(self, target: Any, base: Any = None) -> None:
        base, target = base or {}, placed(target)
        self._target = without(target, base)
        wanted = without(target, self._target)
        check_shapes(base, as_published(wanted), "the base")
        self._base = share(base, wanted, "the base")
        self._published: PolicySnapshot | None = None  # not adopted yet
        self._newest: int | None = None

    def publish(self, snapshot: PolicySnapshot) -> None:
        where = f"policy version {snapshot.version}"
        check_shapes(snapshot.params, as_published(self._target), where)
        self._published = None
        params = carry(snapshot.params, self._target, where)
        self._published = PolicySnapshot(snapshot.version, join(self._base, params))
        self._newest = snapshot.version

    def newest(self) -> int | None:
        return self._newest

    def adopt(self) -> PolicySnapshot:
        if self._published is None:
            raise HandoffError(
                "no policy was published yet; publish one before adopting"
                if self._newest is None
                else f"policy version {self._newest} was adopted already; publish one again"
            )
        adopted, self._published = self._published, None  # the adopter alone holds it
        return adopted


class ThroughStorage:
    """A hand-off through a shared folder of orbax steps; a policy version is a step number.

    The folder is on a disk or in a bucket. Where the trainer has several processes, all of them
    publish and adopt at the same point, each what its own engine asks for.
    `publish` writes `params` and `meta`, unless the folder already holds that version (the
    training checkpoint of the same step): then it only proves that they are the same. It raises
    `fence.Superseded` where a higher `life` of the trainer has taken the folder over. Where only
    engines read the folder, leaves are written as they keep them (`narrow`): bfloat16 is half
    of the masters' bytes, and what arrives is the same.

    `base` are the target's leaves that are never published, where the adopter has them already;
    otherwise they are read from the folder.
    """

    def __init__(
        self, folder: Folder, target: Any, keep: int = 2, life: Life | None = None,
        base: Any = None, narrow: bool = False,
    ) -> None:  # fmt: skip
        self.folder = bucket.path(folder)
        self._life = life or Life(self.folder)
        self._target = target
        self._keep = keep  # steps that survive when publish writes
        base, target = base or {}, placed(target)
        self._written = without(target, base) if narrow else None  # None: leaves as they come
        given = share(base, without(target, without(target, base)), "the base")
        # The name of the one that was read, and it.
        self._base: tuple[str | None, Any] = None, given

    def publish(self, snapshot: PolicySnapshot) -> None:
        params, path = snapshot.params, self.folder / str(snapshot.version)
        if self._written is not None:
            check_shapes(params, as_published(self._written), str(path))
            params = narrowed(params, self._written)
        leaves = leaf_checksums(params)
        if snapshot.version in hosts.broadcast(self._ours):
            meta = read_meta(self.folder, snapshot.version)
            compare(meta["leaf_checksums"], leaves, f"{path}, saved before,")
            return
        meta = {"step": snapshot.version, "checksum": combine(leaves), "leaf_checksums": leaves}
        parts = {"params": params, "meta": meta}
        write(self.folder, snapshot.version, parts, self._keep, life=self._life)

    def _ours(self) -> list[int]:
        """Returns the steps; those of a higher life are not ours to go on from."""
        self._life.check()
        return steps_in(self.folder)

    def newest(self) -> int | None:
        found = self._steps()
        return found[-1] if found else None

    def versions(self) -> list[int]:
        """Returns the versions that can be adopted, ascending."""
        return steps_in(self.folder)

    def forget(self, after: int) -> None:
        """Makes later versions than `after` count no longer; one process does that."""
        set_aside(self.folder, after, self._life)

    def _steps(self) -> list[int]:
        return hosts.broadcast(self.versions)

    def adopt(self, version: int | None = None) -> PolicySnapshot:
        """Returns `version`, or the newest, as the target asks for it. Raises HandoffError."""
        if version is not None:
            return PolicySnapshot(version, self._read(version))
        version = self.newest()
        if version is None:
            raise HandoffError(f"no finished snapshot under {self.folder}; publish one first")
        try:
            params = self._read(version)
        except (OSError, KeyError, ValueError):
            if hosts.count() > 1 or version in steps_in(self.folder):
                raise
            # The trainer, in another process, replaced this version while it was being read.
            return self.adopt()
        return PolicySnapshot(version, params)

    def _read(self, version: int) -> Any:
        named = read_meta(self.folder, version).get(BASE)
        if named != self._base[0]:
            self._base = named, load_base(self.folder, named, self._target)
        base = self._base[1]
        own, _ = load_own(self.folder, version, without(self._target, base))
        return join(base, own)
