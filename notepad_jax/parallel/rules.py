"""Sharding rules: the one table from logical axes to mesh axes.

A parameter declares logical axes (`model.parameters`), never mesh axes. To lay a policy out
differently, change this table. Heads and feed-forward are split over "tensor", as in
Megatron; what is left is split over "fsdp" along the width or the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

TRAINING: Mapping[str, str | None] = {
    "layer": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "tensor",  # whole experts; none is cut
    "vocab": "tensor",
}

# An engine reads every weight at every step: nothing is gathered, only heads are split.
SERVING: Mapping[str, str | None] = TRAINING | {"embed": None}


def sharding(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    rules: Mapping[str, str | None],
) -> NamedSharding:
    """Returns the sharding of an array with these logical axes.

    Mesh axes of one device cut nothing and are not named, nor are trailing dimensions that are
    whole, so that layouts that are the same compare equal. Raises ValueError for an axis that
    the table does not know, or a dimension that its mesh axis does not divide.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; there are {', '.join(rules)}")
        target = rules[axis] if axis is not None else None
        if target is not None and size % mesh.shape[target]:
            raise ValueError(
                f"{size} {axis} cannot be split over {target}={mesh.shape[target]}; "
                f"use a divisor of {size}"
            )
        spec.append(target if target is not None and mesh.shape[target] > 1 else None)
    return NamedSharding(mesh, trimmed(spec))


def trimmed(spec: Sequence[str | None]) -> PartitionSpec:
    """A PartitionSpec without the unsharded dimensions at its end."""
    cut = [i for i, name in enumerate(spec) if name is not None]
    return PartitionSpec(*spec[: cut[-1] + 1 if cut else 0])
