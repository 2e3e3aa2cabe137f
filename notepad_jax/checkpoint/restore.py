"""Restoring parameters from a checkpoint step of a run, with the base that adapters lie on.

An engine, an evaluation or a resumed run reads `params` through `load_params`, each device its own
slices, onto any mesh. Above: `handoff`, `training_state` and setup; below: `steps`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint import bucket, commit
from notepad_jax.checkpoint.abstract_trees import as_published, cast, check_shapes, placed
from notepad_jax.checkpoint.checksums import HandoffError, compare, leaf_checksums, named_leaves
from notepad_jax.checkpoint.steps import (
    BASE,
    CheckpointError,
    Folder,
    context,
    read_meta,
    require,
    steps_in,
)
from notepad_jax.model.parameters import join, without


def load_params(folder: Folder, step: int, abstract_params: Any) -> tuple[Any, dict[str, Any]]:
    """Reads a whole policy: what one step holds of it, and the base that it names.

    Returns (params, meta). As `load_own`.
    """
    target = placed(abstract_params)
    base = load_base(folder, read_meta(folder, step).get(BASE), target)
    own, meta = load_own(folder, step, without(target, base))
    return join(base, own), meta


def load_base(folder: Folder, named: str | None, abstract_params: Any) -> Any:
    """Reads the leaves of a target that all steps of `folder` share, which a step's `meta` `named`.

    Returns a tree of those leaves, empty where none are named. As `load_own`; HandoffError where
    others lie there.
    """
    if named is None:
        return {}
    place, target = bucket.path(folder) / BASE, placed(abstract_params)
    if not steps_in(place):
        raise CheckpointError(f"{place} is missing, and the steps beside it hold adapters alone")
    shared = without(target, without(target, _shapes(place, 0)))
    base, meta = load_own(place, 0, shared)
    if meta["checksum"] != named:
        raise HandoffError(
            f"{place} holds {meta['checksum']}, and the steps beside it need {named}"
        )
    return base


def load_own(folder: Folder, step: int, abstract_params: Any) -> tuple[Any, dict[str, Any]]:
    """Reads `params` alone from one step; returns (params, meta).

    Every device reads its own slices, in the saved dtype; the checksums are compared with
    those in `meta`; then leaves are cast. That covers every weight, so the files of `params`
    are hashed only where something is wrong, to name the one. Raises HandoffError on any
    difference, CheckpointError for damaged files.
    """
    path = commit.place(folder, step)
    meta = read_meta(folder, step)
    target = placed(abstract_params)
    try:
        loaded = _load_as_saved(path, as_published(target))
        compare(meta["leaf_checksums"], leaf_checksums(loaded["params"]), str(path))
    except Exception as problem:  # orbax and tensorstore raise of all kinds, in many lines
        require(folder, step, ("params",))
        if isinstance(problem, HandoffError):
            raise
        said = (str(problem).splitlines() or [type(problem).__name__])[0][:300]
        raise CheckpointError(f"{path}: params cannot be read: {said}") from problem
    return cast(loaded.pop("params"), target), meta


def _load_as_saved(path: Path | epath.Path, plain: Any) -> dict[str, Any]:
    with context():
        saved = ocp.checkpointables_metadata(path).metadata["params"]
        check_shapes(saved, plain, str(path))
        kinds = named_leaves(saved)
        as_saved = [
            jax.ShapeDtypeStruct(leaf.shape, kinds[name].dtype, sharding=leaf.sharding)
            for name, leaf in named_leaves(plain).items()
        ]
        as_saved = jax.tree.unflatten(jax.tree.structure(plain), as_saved)
        return ocp.load_checkpointables(path, {"params": as_saved})


def as_stored(folder: Folder, step: int) -> Any:
    """Returns the shapes and dtypes of a step's policy, with its base; no weight is read."""
    base = base_of(folder, step)
    return join({} if base is None else _shapes(base, 0), _shapes(folder, step))


def base_of(folder: Folder, step: int) -> Folder | None:
    """Returns the folder whose step 0 holds what a step leaves out; None where that is whole."""
    return bucket.path(folder) / BASE if BASE in read_meta(folder, step) else None


def _shapes(folder: Folder, step: int) -> Any:
    with context():
        saved = ocp.checkpointables_metadata(commit.place(folder, step))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved.metadata["params"])
