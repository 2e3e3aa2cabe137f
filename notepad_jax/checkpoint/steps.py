"""A folder of orbax checkpoint steps: written atomically, retained by a rule, checked for damage.

The folder is on a disk or in a bucket (gs://); how a step begins to count there, and ceases to,
stands in `commit`. Whatever a kill leaves does not count and is swept up by the next save. So
retention is ours and not orbax's, which would delete an old step before the new one has its
manifest.
Steps are read by `restore`; `training_state` and `handoff` (above) write and read what else a run
needs. Orbax v1 is marked experimental, so only these import it.

Leaves that no step changes (the base of adapters) lie there once, as step 0 of the folder `base`
beside the steps, and each step's `meta` names them by their checksum: a step is then of the
adapters' size, and a policy is what `restore.load_params` reads of both.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint import best, bucket, commit, manifest
from notepad_jax.checkpoint.checksums import combine, leaf_checksums
from notepad_jax.checkpoint.fence import Life, Superseded
from notepad_jax.checkpoint.hf.storage import first_line
from notepad_jax.parallel import hosts

Folder = str | Path | epath.Path
CHECKPOINTS = "checkpoints"  # what the folder of a run's steps is called
BESIDE = "run.json"  # a run's settings, among its steps where those lie elsewhere
BASE = "base"  # of the folder of what no step changes, and of its checksum in a step's meta
UNREADABLE = re.compile(r"\[.+\]|\\")  # in a path: orbax looks for its own files by a pattern


# Orbax counts its operations in the process, not in the thread: of two saves at once one takes the
# other's folders for leavings of its own and removes them.
_ORBAX = threading.Lock()


class CheckpointError(ValueError):
    """A step that cannot be written or read; the message says which, and what is wrong."""


@contextlib.contextmanager
def context(in_flight: int | None = None) -> Iterator[None]:
    """An orbax context, one thread at a time; `data` and `meta` are readable JSON files.

    Large leaves that are stacked over layers are written a layer at a time, so that an
    export (`lazy_arrays`) can read them so. `in_flight` is as in `write`.
    """
    registry = ocp.handlers.local_registry()
    for name in ("data", "meta"):
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=name)
    made = ocp.Context()
    made.checkpointables.registry = registry
    made.memory_options.write_concurrent_bytes = in_flight
    made.array_options.saving.scoped_storage_options_creator = _by_layer
    with _ORBAX, made:
        yield


def _by_layer(path: Any, leaf: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """A chunk for each layer where that is a megabyte or more; a small leaf stays whole."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    stacked = name.startswith("layers/") and leaf.ndim > 1
    if not stacked or leaf.nbytes < leaf.shape[0] * 2**20:
        return None
    return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,))


def place_of(run: Path, elsewhere: str) -> Path | epath.Path:
    """Returns where the steps of a run lie: in its own folder, or in one of its name `elsewhere`.

    `elsewhere` is a folder (~ is the home), a bucket's URL, or empty. Raises ValueError for
    another kind of URL.
    """
    elsewhere = os.path.expanduser(elsewhere)  # which a shell does not behind `=`
    return bucket.path(f"{elsewhere}/{run.name}" if elsewhere else run) / CHECKPOINTS


def steps_in(folder: Folder) -> list[int]:
    """Returns the steps under `folder`, ascending; a save that was cut off is not among them."""
    return commit.at(folder).steps()


def is_copy(folder: Folder) -> bool:
    """Whether `folder`, on a disk, has what a run writes beside steps that lie elsewhere alone."""
    return not bucket.is_bucket(folder) and (Path(folder) / BESIDE).is_file()


# ---------------------------------------------------------------- written


def check_place(folder: Folder, seconds: float = 60.0) -> None:
    """Raises CheckpointError, in one line, unless all processes can write steps to `folder`.

    Each writes a small file there, for which it has so many `seconds`, looks for those of the
    others and removes its own.
    """
    token = hosts.broadcast(lambda: uuid.uuid4().hex)
    ours = f".{token}-{hosts.index()}.seen"

    def wrote() -> None:
        try:
            bucket.kvstore(folder).write(ours, b"").result(timeout=seconds)
        except (ValueError, OSError) as problem:
            said = first_line(problem).replace("\0", "/")
            if isinstance(problem, TimeoutError):
                said = f"no answer in {seconds:g} s"
            if bucket.is_bucket(folder):
                said += "; is there such a bucket, and may you write there (gcloud auth list)?"
            raise CheckpointError(
                f"{folder} cannot be written, and checkpoints are to lie there: {said}"
            ) from None

    def looked() -> None:
        seen = [name for name in bucket.names(folder) if name.startswith(f".{token}")]
        if len(seen) < hosts.count():
            raise CheckpointError(
                f"{folder} is not one place for all processes: process {hosts.index()} sees what "
                f"{len(seen)} of {hosts.count()} wrote there; let checkpoint.folder be a bucket "
                f"(gs://...), or on a disk that all hosts see"
            )

    hosts.all_gather(wrote)
    try:
        hosts.all_gather(looked)
    finally:
        bucket.kvstore(folder).write(ours, None).result(timeout=seconds)


def write(
    folder: Folder, step: int, parts: Mapping[str, Any], keep: int, in_flight: int | None = None,
    life: Life | None = None,
) -> None:  # fmt: skip
    """Saves `parts` as a checkpoint step, in place of it and later ones, which are then deleted.

    The newest `keep` steps survive, and the best one. Nothing else is deleted before the new step
    is whole. One program at a time may write to a folder: where it has several processes, all of
    them call this, write what their devices hold, and the first does the rest; the folder is a
    bucket, or on a disk that all of them see. At most `in_flight` bytes of leaves wait to be there,
    more than the largest leaf has; without it all of them may, compressed, in memory. Raises
    Superseded, and changes nothing that counts, where a trainer of a higher `life` has taken the
    folder over.
    """
    if UNREADABLE.search(str(bucket.path(folder))):
        raise CheckpointError(
            f"{folder}: orbax cannot read what it writes below a folder with [...] or \\ in its "
            f"name; rename that"
        )
    shelf = commit.at(folder, life)
    hosts.broadcast(lambda: shelf.begin(step))
    try:
        with context(in_flight), _alone(Path(folder), in_flight is not None):
            ocp.save_checkpointables(shelf.under_way(step), dict(parts))
        content = manifest.made(shelf.under_way(step))
        hosts.broadcast(lambda: shelf.finish(step, content))
    except BaseException as problem:
        _wait_for_threads()
        _was_ours(life, problem)
        raise
    finally:
        if hosts.first():
            # A bucket that is gone has said so; what lies there does not count.
            with contextlib.suppress(ValueError, OSError):
                shelf.sweep(aside=False)
    if hosts.first():
        shelf.sweep(aside=True)
        retain(folder, keep, life)


def _was_ours(life: Life | None, problem: BaseException) -> None:
    """Raises Superseded where a save failed because a higher life swept up what it had written."""
    if life is not None and not isinstance(problem, Superseded):
        with contextlib.suppress(OSError):  # what failed says enough
            life.check()


def write_base(folder: Folder, base: Any, named: str | None, life: Life | None = None) -> str:
    """Saves the leaves that no step of `folder` changes, unless they lie there; returns their name.

    What lies there damaged is saved again. Raises CheckpointError unless they are those that the
    steps which are there have `named`.
    """
    leaves = leaf_checksums(base)
    ours, place = combine(leaves), bucket.path(folder) / BASE
    if named not in (None, ours):
        raise CheckpointError(
            f"the steps in {folder} belong on the base {named}, and this run would go on with "
            f"{ours}; go on with the policy and grpo.lora that it began with"
        )

    def found() -> str | None:
        return base_in(folder) if manifest.damage(commit.place(place, 0)) is None else None

    if hosts.broadcast(found) != ours:
        meta = {"step": 0, "checksum": ours, "leaf_checksums": leaves}
        write(place, 0, {"params": base, "meta": meta}, keep=1, life=life)
    return ours


def base_in(folder: Folder) -> str | None:
    """Returns the name, a checksum, of the base that lies beside the steps of `folder`, if any."""
    place = bucket.path(folder) / BASE
    found = steps_in(place) and manifest.damage(commit.place(place, 0), ("meta",)) is None
    return read_meta(place, 0)["checksum"] if found else None


def retain(folder: Folder, keep: int, life: Life | None = None) -> None:
    """Deletes leftovers, and steps but the newest `keep` and the best."""
    shelf = commit.at(folder, life)
    shelf.sweep(aside=False)
    kept = best.read(folder)
    for old in shelf.steps()[:-keep]:
        if kept is None or old != kept.step:
            shelf.remove(old)


def set_aside(folder: Folder, after: int, life: Life | None = None) -> None:
    """Makes the steps later than `after` count no longer: a run goes on from there.

    They are not listed any more, and the next save deletes them.
    """
    shelf = commit.at(folder, life)
    for later in reversed([found for found in shelf.steps() if found > after]):
        shelf.set_aside(later)


def _wait_for_threads(seconds: float = 10.0) -> None:
    """Waits until orbax is done with a save that failed.

    When orbax raises (a full disk), threads of its own still write parts of the step, and make
    its folders anew if they were removed.
    """
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            with contextlib.suppress(Exception):  # what failed was raised; a join says it again
                thread.join(max(0.0, end - time.monotonic()))


@contextlib.contextmanager
def _alone(folder: Path, one_by_one: bool) -> Iterator[None]:
    """Around a save: if it fails, waits until nothing changes under its folder any more.

    Leaves that are written one by one are no transaction: when the first has failed,
    tensorstore's own threads still write, and cannot be joined. What they then tell a loop
    that is closed is not passed on; the failure itself is raised.
    """
    if not one_by_one:
        yield
        return
    heard, sys.unraisablehook = sys.unraisablehook, lambda told: None
    log = logging.getLogger("asyncio")
    was, log.disabled = log.disabled, True
    try:
        yield
    except BaseException:
        _wait_for_threads()
        _until_quiet(folder, quiet=0.5, seconds=10.0)
        gc.collect()  # tasks that were not awaited say so when they go
        raise
    finally:
        sys.unraisablehook, log.disabled = heard, was


def _until_quiet(folder: Path, quiet: float, seconds: float) -> None:
    end, seen, since = time.monotonic() + seconds, None, 0.0
    while (now := time.monotonic()) < end and (seen is None or now - since < quiet):
        found = sorted(map(str, folder.rglob("*")))
        if found != seen:
            seen, since = found, now
        time.sleep(quiet / 10)


# ---------------------------------------------------------------- looked through


def choose(
    folder: Folder, asked: int | None, say: Callable[[str], None],
    items: Collection[str] | None = None,
) -> int:  # fmt: skip
    """Returns `asked`, or the newest step, whose files are as they were saved.

    Reads all bytes of the step, or of those `items` of it. Each newer step that is damaged is
    one line for `say`. Raises CheckpointError, in one line, where there is no good step.
    """
    folder, there, bad = bucket.path(folder), steps_in(folder), []
    if asked is not None:
        if asked not in there:
            raise CheckpointError(
                f"{folder} has no step {asked}; there: {_listed(there) or 'none'}"
            )
        others = [step for step in there if step != asked]
        require(folder, asked, items, f"others there: {_listed(others)}" if others else "")
        return asked
    for step in reversed(there):
        found = manifest.damage(commit.place(folder, step), items)
        if found is None:
            for line in bad:
                say(f"{folder}: {line}; the newest good step is {step}")
            return step
        bad.append(f"step {step} is damaged ({found})")
    if not there:
        raise CheckpointError(f"no finished checkpoint under {folder}")
    if not any((commit.place(folder, step) / manifest.NAME).exists() for step in there):
        raise CheckpointError(
            f"no step under {folder} has a {manifest.NAME} (there: {_listed(there)}): saved by an "
            f"earlier version, or copied in part; go on with that version, or begin another run"
        )
    raise CheckpointError(f"no good step under {folder}: {', '.join(bad)}")


def require(
    folder: Folder, step: int, items: Collection[str] | None = None, mend: str = ""
) -> Path | epath.Path:
    """Returns where a step's files lie, which are as they were saved.

    Reads all bytes of the step, or of those `items` of it. Raises CheckpointError, ending in
    `mend`, where they are not.
    """
    place = commit.place(folder, step)
    found = manifest.damage(place, items)
    if found is not None:
        line = f"{folder}: step {step} is damaged ({found})"
        raise CheckpointError(f"{line}; {mend}" if mend else line)
    return place


def _listed(steps: Collection[int]) -> str:
    return ", ".join(map(str, steps))


def read_meta(folder: Folder, step: int) -> dict[str, Any]:
    """Returns a step's `meta`, whose bytes are compared first. Raises CheckpointError."""
    return json.loads((require(folder, step, ("meta",)) / "meta/data.json").read_text("utf-8"))
