"""A folder of orbax steps: written whole or not at all, looked through for damage, read.

A step is a folder named by its number. It appears by one rename, when orbax has written
everything and the `manifest` is in it, and it vanishes by one; whatever a kill leaves has
another name and is swept up by the next save. So retention is ours and not orbax's, which
would delete an old step before the new one has its manifest.
An engine, an evaluation or a resumed run reads `params` through `load_params`, each device its
own slices, onto any mesh; `training_state` and `handoff` (above) write and read the rest. Orbax
v1 is marked experimental, so only this module and its two neighbours above import it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint import best, manifest
from notepad_jax.checkpoint.checksums import HandoffError, compare, leaf_checksums, named_leaves
from notepad_jax.checkpoint.targets import as_published, cast, check_shapes, placed
from notepad_jax.parallel import hosts

STEP = re.compile(r"0|[1-9]\d*")
SET_ASIDE = re.compile(r"\d+\.set-aside")
LEFT_OVER = re.compile(r"\.\d+\.(writing|removed).*|\d+\.orbax-checkpoint-tmp.*")


class CheckpointError(ValueError):
    """A step that cannot be written or read; the message says which, and what is wrong."""


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
    """Returns the steps under `folder`, ascending; a save that was cut off is not among them."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir())
    return sorted(int(path.name) for path in found)


# ---------------------------------------------------------------- written


def write(
    folder: str | Path, step: int, parts: Mapping[str, Any], keep: int,
    keep_every: int | None = None,
) -> None:  # fmt: skip
    """Saves `parts` as a step, in place of it and of later ones, which then are deleted.

    The newest `keep` steps survive, multiples of `keep_every`, and the best one. Nothing is
    deleted before the new step is whole. One program at a time may write to a folder: where it
    has several processes, all of them call this, write what their devices hold, and the first
    does the rest; the folder is on a disk that all of them see.
    """
    folder = Path(folder).absolute()
    temporary = folder / f".{step}.writing"
    if hosts.first():
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder, LEFT_OVER)
    hosts.wait()
    try:
        with context():
            ocp.save_checkpointables(temporary, dict(parts))
        hosts.asked_of_first(lambda: _named(folder, step, temporary))
    except BaseException:
        _wait_for_threads()
        raise
    finally:
        if hosts.first():
            _sweep(folder, LEFT_OVER)
    if hosts.first():
        _sweep(folder, SET_ASIDE)
        retain(folder, keep, keep_every)


def _named(folder: Path, step: int, temporary: Path) -> None:
    """Gives a step that is written its name."""
    manifest.write(temporary)
    for later in reversed([found for found in steps_in(folder) if found >= step]):
        _remove(folder, later)
    os.rename(temporary, folder / str(step))
    _sync(folder)


def retain(folder: str | Path, keep: int, keep_every: int | None = None) -> None:
    """Deletes leftovers, and steps but the newest `keep`, multiples of `keep_every`, the best."""
    _sweep(Path(folder), LEFT_OVER)
    kept = best.read(folder)
    for old in steps_in(folder)[:-keep]:
        if (keep_every is None or old % keep_every) and (kept is None or old != kept.step):
            _remove(Path(folder), old)


def set_aside(folder: str | Path, after: int) -> None:
    """Takes their names from the steps later than `after`: a run goes on from there.

    They count no longer, whoever looks, and the next save deletes them; until then they lie
    in N.set-aside.
    """
    for later in reversed([found for found in steps_in(folder) if found > after]):
        aside = Path(folder) / f"{later}.set-aside"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(Path(folder) / str(later), aside)


def _remove(folder: Path, step: int) -> None:
    gone = folder / f".{step}.removed"
    os.rename(folder / str(step), gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sweep(folder: Path, names: re.Pattern[str]) -> None:
    for path in folder.iterdir():
        if names.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _wait_for_threads(seconds: float = 10.0) -> None:
    """Waits until orbax is done with a save that failed.

    When orbax raises (a full disk), threads of its own still write parts of the step, and make
    its folders anew if somebody has removed them.
    """
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            thread.join(max(0.0, end - time.monotonic()))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- looked through


def choose(
    folder: str | Path, asked: int | None, say: Callable[[str], None],
    items: Collection[str] | None = None,
) -> int:  # fmt: skip
    """Returns `asked`, or the newest step, whose files are as they were saved.

    Reads all bytes of the step, or of those `items` of it. Each newer step that is damaged is
    one line for `say`. Raises CheckpointError, in one line, where there is no good step.
    """
    folder, there, bad = Path(folder), steps_in(folder), []
    if asked is not None:
        if asked not in there:
            raise CheckpointError(
                f"{folder} has no step {asked}; there: {_listed(there) or 'none'}"
            )
        others = [step for step in there if step != asked]
        require(folder, asked, items, f"others there: {_listed(others)}" if others else "")
        return asked
    for step in reversed(there):
        found = manifest.damage(folder / str(step), items)
        if found is None:
            for line in bad:
                say(f"{folder}: {line}; the newest good step is {step}")
            return step
        bad.append(f"step {step} is damaged ({found})")
    if not there:
        raise CheckpointError(f"no finished checkpoint under {folder}")
    if not any((folder / str(step) / manifest.NAME).exists() for step in there):
        raise CheckpointError(
            f"no step under {folder} has a {manifest.NAME} (there: {_listed(there)}): saved by an "
            f"earlier version, or copied in part; go on with that version, or begin another run"
        )
    raise CheckpointError(f"no good step under {folder}: {', '.join(bad)}")


def require(
    folder: str | Path, step: int, items: Collection[str] | None = None, mend: str = ""
) -> None:
    """Raises CheckpointError, ending in `mend`, unless a step's files are as they were saved.

    Reads all bytes of the step, or of those `items` of it.
    """
    found = manifest.damage(Path(folder) / str(step), items)
    if found is not None:
        line = f"{folder}: step {step} is damaged ({found})"
        raise CheckpointError(f"{line}; {mend}" if mend else line)


def _listed(steps: Collection[int]) -> str:
    return ", ".join(map(str, steps))


# ---------------------------------------------------------------- read


def read_meta(folder: str | Path, step: int) -> dict[str, Any]:
    """Returns a step's `meta`, whose bytes are compared first. Raises CheckpointError."""
    require(folder, step, ("meta",))
    return json.loads((Path(folder) / str(step) / "meta" / "data.json").read_text("utf-8"))


def load_params(folder: str | Path, step: int, abstract_params: Any) -> tuple[Any, dict[str, Any]]:
    """Reads `params` alone from one step; returns (params, meta).

    Every device reads its own slices, in the saved dtype; the checksums are compared with
    those in `meta`; then leaves are cast. That covers every weight, so the files of `params`
    are hashed only where something is wrong, to name the one. Raises HandoffError on any
    difference, CheckpointError for damaged files.
    """
    folder = Path(folder).absolute()
    path = folder / str(step)
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


def _load_as_saved(path: Path, plain: Any) -> dict[str, Any]:
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


def as_stored(folder: str | Path, step: int) -> Any:
    """Returns the shapes and dtypes of a step's `params`; no weight is read."""
    with context():
        saved = ocp.checkpointables_metadata(Path(folder).absolute() / str(step))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved.metadata["params"])
