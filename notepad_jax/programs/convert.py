"""`notepad-jax import-hf`: a published checkpoint as one of ours, and what `export` needs, too.

An imported policy is a folder with the published config.json and tokenizer files, and
`checkpoints/0`: an orbax step with `params` and `meta`, which `checkpoint.restore.load_params`
reads onto any mesh, as it reads a run's steps. It is written beside its destination and takes its
name at the end. Above: commands and `export`; below: checkpoint.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from notepad_jax.checkpoint.checksums import combine, leaf_checksums
from notepad_jax.checkpoint.hf import huggingface, storage
from notepad_jax.checkpoint.hf.folder_swap import new_folder
from notepad_jax.checkpoint.steps import write
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh
from notepad_jax.setup import habits, policies
from notepad_jax.telemetry.screen import Bar, Screen

DTYPES = ("bfloat16", "float32")
SUFFIX = ".gguf"
MEGABYTE = 10**6
AT_ONCE = 256 * MEGABYTE  # of a policy that may wait in memory, whole, until it is on disk
LOST = 0.1  # of a delta, relative: an export that loses more says what to do instead


@dataclasses.dataclass(frozen=True)
class Imported:
    """The result of `import_hf`: the folder, and what is in it."""

    source: str
    folder: str
    family: str  # model_type
    parameters: int
    dtype: str  # of the parameters that were written
    bytes: int
    devices: int  # over which the parameters were laid out
    seconds: float


# ---------------------------------------------------------------- in


def import_hf(
    source: str, folder: str | Path, screen: Screen,
    dtype: str | None = None, overwrite: bool = False,
) -> Imported:  # fmt: skip
    """Reads a Hugging Face folder or URL, or a GGUF file, and writes it as step 0 of a policy.

    Parameters are laid out over all devices as in training, and every device's slices are read by
    byte range. `dtype` None keeps config.json's; of a GGUF
    file it is float32 where all its numbers are, and else bfloat16. Raises ValueError for
    anything wrong with source or destination.
    """
    began = time.perf_counter()
    local(folder, "an import")
    apart(source, folder)
    published = _opened(source)
    config = published.config
    dtype = known(dtype or config.dtype, (*DTYPES, "float16"))
    layout = parameters.shardings(config, mesh.make(), mesh.TRAINING)
    config_json = (json.dumps(published.text, indent=2) + "\n").encode()
    kinds = ", ".join(f"{count} {kind}" for kind, count in published.kinds.items())
    screen.say(f"{source}: tensors are {kinds}; written as {dtype} (--dtype)")
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract(config, dtype))
    with new_folder(folder, total, overwrite) as temporary:
        bar = screen.bar("import", megabytes(total), "MB")
        params = huggingface.import_params(config, published.store, layout, dtype, counter(bar))
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


# ---------------------------------------------------------------- both


def known(dtype: str, known: tuple[str, ...]) -> str:
    if dtype not in known:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(known)}")
    return dtype


def local(folder: str | Path, what: str) -> None:
    if "://" in str(folder):
        raise ValueError(f"{folder}: {what} lies in a local folder; only Hugging Face sides may "
                         f"be buckets")  # fmt: skip


def apart(source: str | Path, target: str | Path) -> None:
    """Raises ValueError where a target, overwritten, would take its source along."""
    if "://" in str(source) or "://" in str(target):
        return
    read, written = Path(source).resolve(), Path(target).resolve()
    if read == written or written in read.parents:
        what = "is" if read == written else "holds"
        raise ValueError(f"{target} {what} the source; choose another destination")


def megabytes(size: int) -> int:
    return -(-size // MEGABYTE)


def counter(bar: Bar) -> Callable[[int], None]:
    """Returns a function that is told bytes and advances a bar of whole megabytes."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        before, done = done, done + size
        moved = megabytes(done) - megabytes(before)
        if moved:
            bar.advance(moved)

    return advance


def abstract(config: PolicyConfig, dtype: str) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(parameters.abstract_params(config, dtype))
