"""`notepad-jax import-hf` and `export-hf`: published checkpoints in, trained ones out.

An imported policy is a folder with the published config.json and tokenizer files, and
`checkpoints/0`: an orbax step with `params` and `meta`, which `checkpoint.steps.load_params`
reads onto any mesh, as it reads a run's steps. `export_hf` takes such a folder, a run or a folder
of adapters (`policies`) and streams it out, one tensor at a time, without restoring the tree:
here alone adapters are added in, and what that costs them is measured on the way.
`export_adapters` writes what a run with low-rank adapters trained, for PEFT. All write beside
their destination and take its name at the end.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from notepad_jax.checkpoint import lazy_arrays, steps
from notepad_jax.checkpoint.abstract_trees import placed
from notepad_jax.checkpoint.checksums import combine, leaf_checksums
from notepad_jax.checkpoint.hf import adapters, huggingface, storage
from notepad_jax.checkpoint.hf.folder_swap import new_folder
from notepad_jax.checkpoint.hf.rounding import Rounding, compared
from notepad_jax.checkpoint.hf.writing import PART_BYTES, Written
from notepad_jax.checkpoint.steps import read_meta, write
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh, rules
from notepad_jax.setup import habits, policies
from notepad_jax.telemetry.progress import Bar, Screen

DTYPES = ("bfloat16", "float32")
SUFFIX = ".gguf"
MEGABYTE = 10**6
AT_ONCE = 256 * MEGABYTE  # of a policy that may wait in memory, whole, until it is on disk
LOST = 0.1  # of a delta, relative: an export that loses more says what to do instead


@dataclasses.dataclass(frozen=True)
class Imported:
    """What `import_hf` made."""

    source: str
    folder: str
    family: str  # model_type
    parameters: int
    dtype: str  # of the parameters that were written
    bytes: int
    devices: int  # over which the parameters were laid out
    seconds: float


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `export_hf` or `export_adapters` wrote."""

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


# ---------------------------------------------------------------- in


def import_hf(
    source: str, folder: str | Path, screen: Screen,
    dtype: str | None = None, overwrite: bool = False, tensor: int = 1,
) -> Imported:  # fmt: skip
    """Reads a Hugging Face folder or URL, or a GGUF file, and writes it as step 0 of a policy.

    Parameters are laid out over all devices as in training (`tensor` devices share a head)
    and every device's slices are read by byte range. `dtype` None keeps config.json's; of a GGUF
    file it is float32 where all its numbers are, and else bfloat16. Raises ValueError for
    anything wrong with source or destination.
    """
    began = time.perf_counter()
    _local(folder, "an import")
    _apart(source, folder)
    published = _opened(source)
    config = published.config
    dtype = _known(dtype or config.dtype, (*DTYPES, "float16"))
    layout = parameters.shardings(config, mesh.make(tensor), rules.TRAINING)
    config_json = (json.dumps(published.text, indent=2) + "\n").encode()
    kinds = ", ".join(f"{count} {kind}" for kind, count in published.kinds.items())
    screen.say(f"{source}: tensors are {kinds}; written as {dtype} (--dtype)")
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in _abstract(config, dtype))
    with new_folder(folder, total, overwrite) as temporary:
        bar = screen.bar("import", _megabytes(total), "MB")
        params = huggingface.import_params(config, published.store, layout, dtype, _counter(bar))
        bar.finish()
        beside = {**published.beside, huggingface.CONFIG: config_json}
        for name, content in beside.items():
            (temporary / name).write_bytes(content)
        screen.say("writing the checkpoint")
        _save(temporary / policies.CHECKPOINTS, config, params)
    return Imported(
        source=str(source),
        folder=str(folder),
        family=published.text["model_type"],
        parameters=parameters.count(config),
        dtype=dtype,
        bytes=total,
        devices=jax.device_count(),
        seconds=time.perf_counter() - began,
    )


def _opened(source: str) -> huggingface.Published:
    """Opens a GGUF file, or a Hugging Face folder or URL."""
    if not _is_gguf(source):
        _refuse_folder_of_gguf(source)
        found = huggingface.open_published(source)
        return dataclasses.replace(found, beside={**found.beside, **habits.carried(source)})
    try:
        room = importlib.import_module("notepad_jax.checkpoint.gguf.policy")
    except ModuleNotFoundError as problem:
        raise ValueError(
            f"reading GGUF needs {problem.name}, which is not installed; "
            f"pip install 'notepad-jax[gguf]'"
        ) from None
    return room.open_policy(source)


def _is_gguf(source: str) -> bool:
    """Whether `source` is a file that says so, by its name or by its first bytes."""
    if "://" in str(source):
        if str(source).lower().endswith(SUFFIX):
            raise ValueError(f"{source}: a GGUF file is read from a local disk; copy it there")
        return False
    path = Path(source)
    if path.is_dir() or (path.exists() and not path.is_file()):
        return False
    if path.name.lower().endswith(SUFFIX) or not path.is_file():
        return path.name.lower().endswith(SUFFIX)
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _refuse_folder_of_gguf(source: str) -> None:
    """Raises ValueError for a folder whose only weights are GGUF files: one has to be named."""
    folder = Path(source)
    if "://" in str(source) or not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.lower().endswith(SUFFIX)]
    if found and not any(name.startswith(storage.WEIGHTS) for name in names):
        raise ValueError(
            f"{source} has no {storage.WEIGHTS}, and {len(found)} GGUF file(s); name the one to "
            f"import: {folder / found[0]}"
        )


def _save(folder: Path, config: PolicyConfig, params: Any) -> None:
    """Writes step 0: what a hand-off publishes, and the sizes of the policy."""
    leaves = leaf_checksums(params)
    meta = {
        "step": 0,
        "checksum": combine(leaves),
        "leaf_checksums": leaves,
        "policy": dataclasses.asdict(config),
    }
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    in_flight = max(sizes) + 1 if sum(sizes) > AT_ONCE else None
    write(folder, 0, {"params": params, "meta": meta}, keep=1, in_flight=in_flight)


# ---------------------------------------------------------------- out


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
    _known(dtype, DTYPES)
    found = _chosen(source, step, target, screen, "params")
    like = like or policies.folder_of(found)
    kvstore = storage.open_kvstore(like)
    text = storage.read_json(like, kvstore, huggingface.CONFIG)
    config = _sizes(found, like)
    rounding = Rounding(np.dtype(dtype))
    params = _streamed(found, config, rounding)
    if not _of_adapters(found):
        params = _beside_its_start(params, found, config, rounding)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in _abstract(config, dtype))
    bar = screen.bar("export", _megabytes(total), "MB")
    beside = huggingface.companions(like) | _habits(found, screen)
    written = huggingface.export(
        config, params, target, dtype, beside, text, part_bytes, overwrite, _counter(bar)
    )
    bar.finish()
    _tell_lost(rounding, _of_adapters(found), screen)
    return _exported(source, found, config, dtype, written, began, rounding)


def _of_adapters(found: policies.Named) -> bool:
    there = found.steps is not None and steps.base_of(found.steps, found.step) is not None
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
        base = steps.base_of(found.steps, found.step)
        own = lazy_arrays.open_tree(f"{found.steps}/{found.step}")
        if base is not None:
            mend = "resume the run, which saves it again, or export --adapters, which need it not"
            steps.require(base, 0, ("params",), mend)
            chosen = policies.trained_with(found.home)
            return adapters.added(lazy_arrays.open_tree(f"{base}/0"), chosen, own, rounding)
        params = own
    if not found.adapters:
        return params
    return adapters.added(params, *_of_folder(found, config), rounding)


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
    files call it: a path or a name that who gets them has. Adapters in a folder are written once
    more. Raises ValueError for anything wrong with either side, and for a run without adapters.
    """
    began = time.perf_counter()
    _known(dtype, DTYPES)
    found = _chosen(source, step, target, screen, "params")
    if found.adapters:
        config = _sizes(found, like or policies.folder_of(found))
        chosen, adapted = _of_folder(found, config)
        base = base or like or adapters.base_name(found.adapters)
    else:
        chosen = policies.trained_with(found.home)
        base = base or like or policies.base_of(found)
        config = _sizes(found, like or policies.folder_of(found))
        if steps.base_of(found.steps, found.step) is None:
            raise ValueError(
                f"{found.steps}/{found.step} has its adapters added in (an earlier version saved "
                f"it); export the policy, without --adapters"
            )
        adapted = lazy_arrays.open_tree(f"{found.steps}/{found.step}")
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(adapted))
    bar = screen.bar("export", _megabytes(size * np.dtype(dtype).itemsize), "MB")
    written = adapters.export_adapters(
        config, chosen, adapted, base, target, dtype, _habits(found, screen), overwrite,
        _counter(bar),
    )  # fmt: skip
    bar.finish()
    return _exported(source, found, config, dtype, written, began, Rounding(np.dtype(dtype)))


def _habits(found: policies.Named, screen: Screen) -> dict[str, bytes]:
    """Returns the files that say how the policy reads, for those who do not have its run."""
    return habits.files(policies.reads_as(found.name), Path(found.home), screen.warn)


def _of_folder(found: policies.Named, config: PolicyConfig) -> tuple[lora.Lora, Any]:
    """Reads adapters that lie in a folder, onto the first device."""
    opened = adapters.open_adapters(found.adapters, config, policies.folder_of(found))
    _, wanted = lora.abstract(config, opened.lora, placed(parameters.abstract_params(config)))
    there = jax.tree.map(lambda x: x.sharding, wanted)
    return opened.lora, adapters.import_adapters(opened, there)


def _exported(
    source: str | Path, found: policies.Named, config: PolicyConfig, dtype: str,
    written: Written, began: float, rounding: Rounding,
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


def _abstract(config: PolicyConfig, dtype: str) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(parameters.abstract_params(config, dtype))


def _chosen(
    source: str | Path, step: int | None, target: str, screen: Screen, item: str
) -> policies.Named:
    """Finds what to export: a step, or adapters.

    Good is a step whose `item` and `meta` are as they were saved; the rest is not read.
    """
    _local(source, "a checkpoint of ours")
    name = str(source) if step is None else f"{source}{policies.AT}{step}"
    if adapters.lie_in(name):
        item = "params"  # of their base, which has nothing else
    found = policies.resolved(name, screen.warn, (item, "meta"))
    if found.steps is None and not found.adapters:
        raise ValueError(
            f"{source} has no finished checkpoint; give a run (runs/NAME, runs/NAME@best), what "
            f"import-hf wrote, or a folder of adapters"
        )
    for read in (found.steps, found.home, found.adapters):
        if read:
            _apart(str(read), target)
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


# ---------------------------------------------------------------- both


def _known(dtype: str, known: tuple[str, ...]) -> str:
    if dtype not in known:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(known)}")
    return dtype


def _local(folder: str | Path, what: str) -> None:
    if "://" in str(folder):
        raise ValueError(f"{folder}: {what} lies in a local folder; only Hugging Face sides may "
                         f"be buckets")  # fmt: skip


def _apart(source: str | Path, target: str | Path) -> None:
    """Raises ValueError where a target, overwritten, would take its source along."""
    if "://" in str(source) or "://" in str(target):
        return
    read, written = Path(source).resolve(), Path(target).resolve()
    if read == written or written in read.parents:
        what = "is" if read == written else "holds"
        raise ValueError(f"{target} {what} the source; choose another destination")


def _megabytes(size: int) -> int:
    return -(-size // MEGABYTE)


def _counter(bar: Bar) -> Callable[[int], None]:
    """Returns a function that is told bytes and advances a bar of whole megabytes."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        before, done = done, done + size
        moved = _megabytes(done) - _megabytes(before)
        if moved:
            bar.advance(moved)

    return advance
