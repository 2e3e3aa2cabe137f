"""`notepad-jax export-hf`: exports a checkpoint as Hugging Face loads it, or its adapters alone.

`export_hf` takes what `convert` imported, a run or a folder of adapters (`policies`) and streams it
out, one tensor at a time, without restoring the tree: here alone adapters are added in, and what
that costs them is measured on the way. `export_adapters` writes what a run with low-rank adapters
trained, for PEFT. Both write beside their destination and take its name at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from notepad_jax.checkpoint import commit, lazy_arrays, restore, steps
from notepad_jax.checkpoint.abstract_trees import placed
from notepad_jax.checkpoint.hf import adapters, added, huggingface, storage
from notepad_jax.checkpoint.hf.added import Rounding, compared
from notepad_jax.checkpoint.hf.writing import PART_BYTES, Export
from notepad_jax.checkpoint.steps import read_meta
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.programs.convert import (
    DTYPES,
    LOST,
    abstract,
    apart,
    counter,
    known,
    local,
    megabytes,
)
from notepad_jax.setup import habits, policies
from notepad_jax.telemetry.screen import Screen


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of `export_hf` or `export_adapters`: the folder, and what is in it."""

    source: str
    step: int | None  # None: adapters, or their base, which have none
    folder: str
    family: str  # model_type
    files: tuple[str, ...]
    tensors: int
    dtype: str
    bytes: int  # of tensors
    # Of what a run learnt, where its start is still here, and of adapters that were added in
    # (`rounding.Rounding`); None where nothing is known of it.
    delta_lost: float | None
    moved: int | None  # weights that training changed
    unseen: int | None  # of those, by less than `dtype` can hold
    seconds: float


def export_hf(
    source: str | Path, target: str, screen: Screen,
    dtype: str = "bfloat16", part_bytes: int = PART_BYTES,
    step: int | None = None, like: str | None = None, overwrite: bool = False,
) -> Exported:  # fmt: skip
    """Writes a policy of ours, of a run one step (the newest good one), as Hugging Face does.

    Into a folder or a bucket; adapters are added in, and a line says what `dtype` takes of what
    they, or a run's weights, have learnt. config.json's token ids,
    generation_config.json and the tokenizer's files come from `like`, a Hugging Face folder or
    URL: by default the imported folder itself, or the policy that the run started from. Raises
    ValueError for anything wrong with either side.
    """
    began = time.perf_counter()
    known(dtype, DTYPES)
    found = _chosen(source, step, target, screen, like)
    like = like or policies.folder_of(found)
    kvstore = storage.open_kvstore(like)
    text = storage.read_json(like, kvstore, huggingface.CONFIG)
    config = _sizes(found, like)
    rounding = Rounding(np.dtype(dtype))
    params = _streamed(found, config, rounding)
    if not _of_adapters(found):
        params = _beside_its_start(params, found, config, rounding)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract(config, dtype))
    bar = screen.bar("export", megabytes(total), "MB")
    beside = huggingface.companions(like) | _habits(found, screen)
    written = huggingface.export(
        config, params, target, dtype, beside, text, part_bytes, overwrite, counter(bar)
    )
    bar.finish()
    _tell_lost(rounding, _of_adapters(found), screen)
    return _exported(source, found, config, dtype, written, began, rounding)


def _of_adapters(found: policies.Named) -> bool:
    there = found.steps is not None and restore.base_of(found.steps, found.step) is not None
    return there or bool(found.adapters)


def _tell_lost(rounding: Rounding, adapted: bool, screen: Screen) -> None:
    """Says in one line what became of what was learnt, where that is known."""
    if rounding.lost is None:
        return
    what, mend = "what was learnt", "use --dtype float32"
    if adapted:
        screen.say("the adapters were added in")
        what, mend = "what they add", f"{mend}, or --adapters, which writes them alone"
    line = (
        f"of {rounding.moved:,} weights that training moved, {rounding.unseen:,} "
        f"({100 * rounding.unseen / rounding.moved:.0f}%) moved by less than {rounding.dtype} can "
        f"hold; rounding left {what} with a relative error of {rounding.lost:.2g}"
    )
    if rounding.lost > LOST:
        screen.warn(f"{line}: {mend}")
    else:
        screen.say(line)


def _streamed(found: policies.Named, config: PolicyConfig, rounding: Rounding) -> Any:
    """Opens the weights of a policy as a tree of leaves that are read when they are indexed.

    Where it has adapters they are added in as it is read, and `rounding` sees how.
    """
    if found.steps is None:
        params = huggingface.open_tree(*huggingface.open_policy(found.home))
    else:
        base = restore.base_of(found.steps, found.step)
        own = lazy_arrays.open_tree(commit.place(found.steps, found.step))
        if base is not None:
            mend = "resume the run, which saves it again, or export --adapters, which need it not"
            steps.require(base, 0, ("params",), mend)
            chosen = policies.trained_with(found.home)
            return added.added(lazy_arrays.open_tree(commit.place(base, 0)), chosen, own, rounding)
        params = own
    if not found.adapters:
        return params
    return added.added(params, *_of_folder(found, config), rounding)


def _beside_its_start(
    params: Any, found: policies.Named, config: PolicyConfig, rounding: Rounding
) -> Any:
    """Returns the weights of a run, compared when they are read with those that it began with."""
    began = policies.began_with(found)
    if began is None:
        return params
    try:
        start = _streamed(began, config, Rounding(rounding.dtype))
    except ValueError:  # damaged, or of another kind by now: nothing is known then
        return params
    return compared(params, start, rounding)


def export_adapters(
    source: str | Path, target: str, screen: Screen, dtype: str = "float32",
    step: int | None = None, like: str | None = None, overwrite: bool = False,
    base: str | None = None,
) -> Exported:  # fmt: skip
    """Writes the adapters of a run, of one step (the newest good one), as PEFT loads them.

    They belong on the policy that the run started from, or on the base of the adapters that it
    started from. `like` is another Hugging Face folder with its config.json, and `base` what the
    files call it: a path or a name where they will be loaded. Adapters in a folder are written
    once more. Raises ValueError for anything wrong with either side, or a run without adapters.
    """
    began = time.perf_counter()
    known(dtype, DTYPES)
    found = _chosen(source, step, target, screen, like, base)
    if found.adapters:
        config = _sizes(found, like or policies.folder_of(found))
        chosen, adapted = _of_folder(found, config)
        base = base or like or adapters.base_name(found.adapters)
    else:
        chosen = policies.trained_with(found.home)
        base = base or like or policies.base_of(found)
        config = _sizes(found, like or policies.folder_of(found))
        if restore.base_of(found.steps, found.step) is None:
            raise ValueError(
                f"{found.steps}/{found.step} has its adapters added in (an earlier version saved "
                f"it); export the policy, without --adapters"
            )
        adapted = lazy_arrays.open_tree(commit.place(found.steps, found.step))
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(adapted))
    bar = screen.bar("export", megabytes(size * np.dtype(dtype).itemsize), "MB")
    written = adapters.export_adapters(
        config, chosen, adapted, base, target, dtype, _habits(found, screen), overwrite,
        counter(bar),
    )  # fmt: skip
    bar.finish()
    return _exported(source, found, config, dtype, written, began, Rounding(np.dtype(dtype)))


def _habits(found: policies.Named, screen: Screen) -> dict[str, bytes]:
    """Returns the files that say how the policy reads, to be used without its run."""
    return habits.files(policies.reads_as(found.name), Path(found.home), screen.warn)


def _of_folder(found: policies.Named, config: PolicyConfig) -> tuple[lora.Lora, Any]:
    """Reads adapters that lie in a folder, onto the first device."""
    opened = adapters.open_adapters(found.adapters, config, policies.folder_of(found))
    _, wanted = lora.abstract(config, opened.lora, placed(parameters.abstract_params(config)))
    there = jax.tree.map(lambda x: x.sharding, wanted)
    return opened.lora, adapters.import_adapters(opened, there)


def _exported(
    source: str | Path, found: policies.Named, config: PolicyConfig, dtype: str,
    written: Export, began: float, rounding: Rounding,
) -> Exported:  # fmt: skip
    return Exported(
        source=str(source),
        step=None if found.adapters else found.step,
        folder=written.folder,
        family=huggingface.write_config(config, dtype)["model_type"],
        files=written.files,
        tensors=written.tensors,
        dtype=dtype,
        bytes=written.bytes,
        delta_lost=rounding.lost,
        moved=rounding.moved if rounding.lost is not None else None,
        unseen=rounding.unseen if rounding.lost is not None else None,
        seconds=time.perf_counter() - began,
    )


def _chosen(
    source: str | Path, step: int | None, target: str, screen: Screen, *read: str | None
) -> policies.Named:
    """Finds what to export: a step, or adapters.

    Raises ValueError, too, where `target` would replace it, what else is `read`, or its base.
    """
    local(source, "a checkpoint of ours")
    name = str(source) if step is None else f"{source}{policies.AT}{step}"
    found = policies.resolved(name, screen.warn)
    if found.steps is None and not found.adapters:
        raise ValueError(
            f"{source} has no finished checkpoint; give a run (runs/NAME, runs/NAME@best), what "
            f"import-hf wrote, or a folder of adapters"
        )
    with contextlib.suppress(ValueError):  # of a run that does not say, `like` has to
        read += (policies.folder_of(found),)
    for one in filter(None, (found.steps, found.home, found.adapters, *read)):
        if Path(str(one)).exists():  # `base` may be a name
            apart(str(one), target)
    return found


def _sizes(found: policies.Named, like: str) -> PolicyConfig:
    """Returns the sizes of the policy that `like` describes.

    The step's own record of them must agree: the tokenizer of another policy is no help.
    """
    config = huggingface.import_config(like)
    if found.steps is None:
        return config
    recorded = read_meta(found.steps, found.step).get("policy") or {}
    ours = json.loads(json.dumps(dataclasses.asdict(config)))
    for key in sorted(set(recorded) & set(ours) - {"dtype", "valid_vocab", "family"}):
        if recorded[key] != ours[key]:
            raise ValueError(
                f"{found.steps}/{found.step} has {key}={recorded[key]}, and {like} {ours[key]}; "
                f"name the Hugging Face folder of this policy (like)"
            )
    if "valid_vocab" in recorded:
        config = dataclasses.replace(config, valid_vocab=recorded["valid_vocab"])
    return config
