"""Whether two run folders hold the same training run, and where they first differ.

A run that was killed and resumed must leave what an uninterrupted one leaves: the lines of
metrics, ledger and trajectories byte for byte; the same steps and nothing beside them, in them
every leaf of params and optimizer state bit for bit, and equal `data` (the account of all draws,
with the groups that wait) and `meta`; of adapters the same base; a line of timings for each step;
no turns of a rollout under way. Clock readings, TensorBoard events and the names that orbax gives
its files may differ. Used by `kills`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint import best, commit, fence, steps
from notepad_jax.checkpoint.checksums import named_leaves
from notepad_jax.rollout import archive
from notepad_jax.telemetry.metrics import LEDGER, METRICS, TIMINGS, read_metrics
from notepad_jax.training import partial_rollout, record

WRITTEN = (METRICS, LEDGER, archive.FILE)  # byte for byte
TREES, JSONS = ("params", "opt"), ("data", "meta")  # of a step
SHOWN = 60  # bytes of a line around the first difference


def differences(whole: Path, other: Path) -> list[str]:
    """Returns where `other` differs from `whole`, a line for each file or part of a step.

    Each names the file and the first differing place; a file that cannot be read is a
    difference, too. Empty: the runs are the same.
    """
    found = [_of_bytes(whole / name, other / name) for name in WRITTEN]
    found.append(_of_timings(whole, other))
    for left in sorted(other.glob(partial_rollout.OTHERS.format("*")), key=str) + [
        other / partial_rollout.FILE
    ]:
        if left.exists():
            found.append(f"{left.name} was left behind")
    there = [_names(folder / "checkpoints") for folder in (whole, other)]
    if there[0] != there[1]:
        found.append(f"checkpoints: {there[0]} are now {there[1]}")
    beside = {best.NAME, record.BESIDE}
    for name in sorted(beside & set(there[0])):
        found.append(_of_bytes(*(folder / "checkpoints" / name for folder in (whole, other))))
    for step in sorted(set(there[0]) & set(there[1]) - beside):
        place = f"checkpoints/{step}/0" if step == steps.BASE else f"checkpoints/{step}"
        above, name = place.rsplit("/", 1)
        # In a bucket's copy in the folder of the life that saved it.
        pair = [commit.place(folder / above, int(name)) for folder in (whole, other)]
        found.extend(_of_trees(item, place, *pair) for item in TREES if _has(item, step))
        found.extend(_of_json(item, place, *pair) for item in JSONS if _has(item, step))
    return [one for one in found if one]


def leaves(step: Path, item: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a step's `params` or `opt` by path. Raises ValueError, OSError."""
    with steps.context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # orbax: what it thinks of other devices than they were on
        saved = ocp.checkpointables_metadata(step.absolute()).metadata[item]
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), saved
        )
        tree = ocp.load_checkpointables(step.absolute(), {item: target})[item]
    return jax.device_get(named_leaves(tree))


def _has(item: str, step: str) -> bool:
    """Whether a step, or the base of all steps, has a part of this name."""
    return step != steps.BASE or item in ("params", "meta")


def _names(checkpoints: Path) -> list[str]:
    """The steps, and whatever a save or a removal that was cut off has left among them."""
    names = {path.name for path in checkpoints.glob("*")}
    return sorted(names - {fence.FOLDER})  # how often a trainer began: as often as it was killed


def _of_bytes(whole: Path, other: Path) -> str:
    try:
        was, now = whole.read_bytes(), other.read_bytes()
    except OSError as problem:
        return f"{other.name}: {problem}"
    if was == now:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)
    at = min(len(was), len(now)) if at is None else at
    line, start = was.count(b"\n", 0, at) + 1, was.rfind(b"\n", 0, at) + 1
    shown = slice(max(start, at - SHOWN // 2), at + SHOWN // 2)
    return (
        f"{other.name}: line {line}, byte {at - start}: "
        f"{was[shown].decode(errors='replace')!r} is now {now[shown].decode(errors='replace')!r}"
    )


def _of_timings(whole: Path, other: Path) -> str:
    try:
        was, now = (
            [line["step"] for line in read_metrics(folder, TIMINGS)] for folder in (whole, other)
        )
    except (OSError, ValueError, KeyError) as problem:
        return f"{TIMINGS}: {problem!r}"
    return "" if was == now else f"{TIMINGS}: steps {was} are now {now}"


def _of_trees(item: str, place: str, whole: Path, other: Path) -> str:
    where = f"{place}/{item}"
    try:
        was, now = leaves(whole, item), leaves(other, item)
    except (OSError, ValueError) as problem:
        return f"{where}: {problem}"
    compared = {
        name: _of_leaves(was.get(name), now.get(name)) for name in sorted(set(was) | set(now))
    }
    found = [f"{where}: leaf {name}{said}" for name, said in compared.items() if said]
    more = f" (and {len(found) - 1} leaves more)" if len(found) > 1 else ""
    return found[0] + more if found else ""


def _of_leaves(was: np.ndarray | None, now: np.ndarray | None) -> str:
    if was is None or now is None:
        return f" is only in {'the other' if was is None else 'one'}"
    if (was.dtype, was.shape) != (now.dtype, now.shape):
        return f" was {was.dtype}{list(was.shape)} and is now {now.dtype}{list(now.shape)}"
    bits = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in (was, now)]
    if np.array_equal(*bits):
        return ""
    first = int(np.flatnonzero(bits[0] != bits[1])[0]) // was.dtype.itemsize
    place = [int(i) for i in np.unravel_index(first, was.shape)]
    return f"{place}: {was.reshape(-1)[first]!r} is now {now.reshape(-1)[first]!r}"


def _of_json(item: str, place: str, whole: Path, other: Path) -> str:
    where = f"{place}/{item}"
    try:
        was, now = (
            json.loads((step / item / "data.json").read_text(encoding="utf-8"))
            for step in (whole, other)
        )
    except (OSError, ValueError) as problem:
        return f"{where}: {problem}"
    return next((f"{where}{one}" for one in _of_values(was, now)), "")


def _of_values(was: Any, now: Any) -> Iterator[str]:
    """Yields where two JSON values differ, each as a path and both values."""
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        for key in was:
            yield from (f"/{key}{one}" for one in _of_values(was[key], now[key]))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for place, pair in enumerate(zip(was, now, strict=True)):
            yield from (f"/{place}{one}" for one in _of_values(*pair))
    elif was != now:
        yield f": {json.dumps(was)[:SHOWN]} is now {json.dumps(now)[:SHOWN]}"
