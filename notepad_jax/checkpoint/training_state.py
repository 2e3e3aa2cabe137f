"""The training state on disk: a folder of orbax steps, kept or dropped by a rule.

A step holds four checkpointables: `params` and `opt` (arrays), `data` (where the dataset
iterator stood, JSON) and `meta` (step, configs, seeds, checksums, JSON). They are separate
so that an engine reads `params` alone (`steps`, the neighbour below, which owns that
reading) and a person reads the other two with `cat`. A step becomes visible by one rename
after everything in it was written: a killed save leaves nothing that a restore would see.
Not thread safe, as orbax is not: call it from the training loop.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint import steps
from notepad_jax.checkpoint.checksums import combine, leaf_checksums
from notepad_jax.checkpoint.targets import check_shapes, placed


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or restored; the message says what to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """One restored step."""

    step: int
    params: Any
    opt: Any
    data: Any  # what `save` was given: JSON, or bytes
    meta: Mapping[str, Any]  # what `save` was given, and step, checksum, leaf_checksums


class Checkpoints:
    """Writes and restores the steps of one run; a context manager.

    `keep` newest steps survive, and every step divisible by `keep_every`.
    """

    def __init__(self, folder: str | Path, keep: int = 3, keep_every: int | None = None) -> None:
        self.folder = Path(folder).absolute()
        self._steps = steps.writer(self.folder, keep, keep_every)

    def save(
        self,
        step: int,
        params: Any,
        opt: Any,
        data: Any,
        meta: Mapping[str, Any],
        wait: bool = True,
    ) -> str:
        """Saves one step, in place of it and later ones; returns the checksum of `params`.

        With `wait=False` the arrays are copied and writing goes on in the background; the
        next save, `wait` or `close` waits for it and raises what went wrong.
        """
        leaves = leaf_checksums(params)
        total = combine(leaves)
        told = {**meta, "step": step, "checksum": total, "leaf_checksums": leaves}
        _check_json("meta", told)
        self._steps.wait()
        steps.drop_from(self._steps, step)
        parts = {"params": params, "opt": opt, "data": _to_json(data), "meta": told}
        self._steps.save_checkpointables_async(step, parts, force=True)
        if wait:
            self._steps.wait()
        return total

    def latest(self) -> int | None:
        """Returns the newest finished step, or None."""
        found = self.steps()
        return found[-1] if found else None

    def steps(self) -> list[int]:
        """Returns the finished steps, ascending."""
        self._steps.wait()
        return steps.steps_in(self.folder)

    def restore(self, abstract_params: Any, abstract_opt: Any, step: int | None = None) -> Saved:
        """Restores a step (the newest) into the shapes, dtypes and shardings asked for.

        The weights are compared with their checksums before they are cast. Raises
        CheckpointError or HandoffError.
        """
        found = self.steps()
        if not found:
            raise CheckpointError(f"no finished checkpoint under {self.folder}")
        step = found[-1] if step is None else step
        if step not in found:
            raise CheckpointError(f"no checkpoint of step {step} in {self.folder}; there: {found}")
        params, meta = steps.load_params(self.folder, step, abstract_params)
        path = self.folder / str(step)
        opt_target = placed(abstract_opt)
        with steps.context():
            kinds = ocp.checkpointables_metadata(path).metadata["opt"]
            check_shapes(kinds, opt_target, f"{path}/opt")
            parts = ocp.load_checkpointables(path, {"opt": opt_target, "data": None})
        return Saved(step, params, parts["opt"], _from_json(parts["data"]), meta)

    def wait(self) -> None:
        """Returns when nothing is being written any more."""
        self._steps.wait()

    def close(self) -> None:
        """Waits and lets go of the folder."""
        try:
            self._steps.close()
        finally:
            steps.wait_for_threads()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_json(name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(f"{name} is written as JSON and cannot be: {problem}") from None


def _to_json(data: Any) -> dict[str, Any]:
    """Wraps an iterator's state: JSON as it is, bytes as base64."""
    if isinstance(data, bytes):
        return {"base64": base64.b64encode(data).decode()}
    _check_json("data", data)
    return {"json": data}


def _from_json(stored: Mapping[str, Any]) -> Any:
    return base64.b64decode(stored["base64"]) if "base64" in stored else stored["json"]
