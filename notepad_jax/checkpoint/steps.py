"""A folder of orbax steps: written, told finished from unfinished, and `params` read alone.

An engine, an evaluation or a resumed run reads `params` through `load_params`, each device its
own slices, onto any mesh; `training_state` and `handoff` (above) write and read the rest. Orbax
v1 is marked experimental, so only this module and its two neighbours above import it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint.checksums import compare, leaf_checksums, named_leaves
from notepad_jax.checkpoint.targets import as_published, cast, check_shapes, placed


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


def wait_for_threads(seconds: float = 10.0) -> None:
    """Waits until orbax is done with a save that failed.

    When orbax raises (a full disk), threads of its own still write parts of the step, and make
    its folders anew if somebody has removed them.
    """
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            thread.join(max(0.0, end - time.monotonic()))


def drop_from(steps: ocp.training.Checkpointer, step: int) -> None:
    """Deletes `step` and later ones: a run that resumed further back writes them anew."""
    for later in [found.step for found in steps.checkpoints if found.step >= step]:
        steps.delete(later)


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
