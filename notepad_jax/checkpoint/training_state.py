"""Checkpoints of the training state: a folder of steps, kept or dropped by a rule.

A step holds four checkpointables: `params` and `opt` (arrays), `data` (where the dataset iterator
stood, JSON) and `meta` (step, configs, seeds, checksums, JSON). They are separate so that an engine
reads `params` alone (`restore`, the neighbour below, which owns that reading) and a person reads
the other two with `cat`. `params` are what is trained; what a run leaves as it is, the base of
adapters, it saves once for all its steps (`keep_base`). All bytes of a step are compared with its
manifest before anything of it is used, and where the newest is damaged, an older one is restored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from notepad_jax.checkpoint import best, bucket, commit, fence, restore, steps
from notepad_jax.checkpoint.abstract_trees import check_shapes, placed
from notepad_jax.checkpoint.checksums import combine, leaf_checksums
from notepad_jax.checkpoint.steps import CheckpointError
from notepad_jax.parallel import hosts


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """One restored checkpoint step."""

    step: int
    params: Any
    opt: Any
    data: Any  # what `save` was given: JSON
    meta: Mapping[str, Any]  # what `save` was given, and step, checksum, leaf_checksums


class Checkpoints:
    """Saves and restores the checkpoints of one run.

    `keep` newest steps survive, and the best. Whatever changes something raises
    `fence.Superseded`, in one line, once another trainer took the steps over.
    """

    def __init__(self, folder: steps.Folder, keep: int = 3) -> None:
        self.folder = bucket.path(folder)
        self._keep = keep
        self._base: dict[str, str] = {}  # what a step's meta says of what no step changes
        self.life = fence.Life(self.folder)

    def take_over(self) -> None:
        """Makes this the one trainer that may change the steps; an earlier one is over."""
        number = hosts.broadcast(lambda: fence.take(self.folder).number)
        self.life = fence.Life(self.folder, number)

    def keep_base(self, base: Any) -> None:
        """Saves the leaves that no step of the run changes, once; the steps to come name them.

        A run without such leaves has none saved. Raises CheckpointError where the step that was
        restored belongs on others.
        """
        if jax.tree.leaves(base):
            named = self._base.get(steps.BASE)
            self._base = {steps.BASE: steps.write_base(self.folder, base, named, self.life)}

    def save(self, step: int, params: Any, opt: Any, data: Any, meta: Mapping[str, Any]) -> str:
        """Saves one step, in place of it and later ones; returns the checksum of `params`."""
        leaves = leaf_checksums(params)
        total = combine(leaves)
        told = {**meta, **self._base, "step": step, "checksum": total, "leaf_checksums": leaves}
        for name, value in (("meta", told), ("data", data)):
            _check_json(name, value)
        parts = {"params": params, "opt": opt, "data": data, "meta": told}
        steps.write(self.folder, step, parts, self._keep, life=self.life)
        return total

    def steps(self) -> list[int]:
        """Returns the steps, ascending, as the first process sees them."""
        return hosts.broadcast(lambda: steps.steps_in(self.folder))

    def restore(
        self, abstract_params: Any, abstract_opt: Any, say: Callable[[str], None],
        step: int | None = None,
    ) -> Saved:  # fmt: skip
        """Restores `step`, or the newest good one, in the shapes, dtypes and places asked for.

        Its `params` are what was saved of it, without a base. All bytes of the step are compared
        with its manifest first, and the weights with their checksums before they are cast. `say`
        is told of every damaged step that is passed over. Raises CheckpointError or HandoffError,
        in one line.
        """
        asked = step
        step = hosts.broadcast(lambda: steps.choose(self.folder, asked, say))
        params, meta = restore.load_own(self.folder, step, abstract_params)
        self._base = {name: said for name, said in meta.items() if name == steps.BASE}
        path = commit.place(self.folder, step)
        opt_target = placed(abstract_opt)
        with steps.context():
            kinds = ocp.checkpointables_metadata(path).metadata["opt"]
            check_shapes(kinds, opt_target, f"{path}/opt")
            parts = ocp.load_checkpointables(path, {"opt": opt_target, "data": None})
        return Saved(step, params, parts["opt"], parts["data"], meta)

    def go_on_from(self, step: int) -> None:
        """Sets later steps aside (`steps.set_aside`); ends what a killed save began to delete."""
        hosts.broadcast(lambda: self._go_on_from(step))

    def _go_on_from(self, step: int) -> None:
        steps.set_aside(self.folder, step, self.life)
        steps.retain(self.folder, self._keep, self.life)

    def mark(self, found: best.Best | None) -> None:
        """Marks a step as the best on held-out tasks (`best.mark`)."""
        hosts.broadcast(lambda: self._mark(found))

    def _mark(self, found: best.Best | None) -> None:
        self.life.check()
        best.mark(self.folder, found)


def _check_json(name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(f"{name} is written as JSON and cannot be: {problem}") from None
