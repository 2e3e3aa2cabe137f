"""An engine's matrices of layers, apart where launches run faster so, and the memory it takes.

A scan over layers copies each layer's matrices out of their stack before it multiplies. Decoding
does little but read weights, so that copy is most of it on a CPU, where matrices that lie apart
share the stack's memory. On a GPU it is a third, and they take as much memory again: there a policy
is taken apart if it is small beside the device, and for decoding alone: prefill is products, and a
program without a loop over layers takes thrice the time to compile. Above: `executor`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Unstacked
from notepad_jax.model.parameters import Params
from notepad_jax.parallel import place
from notepad_jax.parallel.mesh import memory_stats

SHARE = 1 / 5  # of a GPU's memory, that the weights' second copy may take: 7B in bfloat16 of 80 GB


class Placed(NamedTuple):
    """A policy's parameters as the launches are given them."""

    prefill: Params
    decode: Params


class Apart:
    """The matrices of one engine's policy; those that a policy has of the one before are the same.

    Nothing is held by this: what an engine gives back between rollouts is free.
    """

    def __init__(self, config: PolicyConfig, mesh: Mesh):
        self._config, self._mesh = config, mesh
        self._made: dict[str, tuple[weakref.ref[Any], weakref.ref[Unstacked]]] = {}  # of a stack

    def of(self, params: Params) -> Placed:
        """Returns `params`, arrays or abstract ones, as launches run fastest."""
        if not wanted(params, self._mesh):
            return Placed(params, params)
        apart = parameters.unstacked(self._config, params, self._one)
        return Placed(apart if _shared(self._mesh) else params, apart)

    def _one(self, name: str, leaf: Any) -> Unstacked:
        stack, own = (alive() for alive in self._made.get(name, (_nothing, _nothing)))
        if stack is None or own is None or not place.same(stack, leaf):
            own = Unstacked(tuple(place.entries(leaf)))
            if isinstance(leaf, jax.Array):
                self._made[name] = weakref.ref(leaf), weakref.ref(own)
        return own


def _nothing() -> None:
    """Of a stack that was never seen."""


def wanted(params: Params, mesh: Mesh) -> bool:
    """Whether launches of `params`, arrays or abstract ones, on `mesh` have matrices apart."""
    if mesh.size > 1:
        return False
    device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return _shared(mesh)
    return _bytes(jax.tree.leaves(params)) <= SHARE * memory_stats(device).get("bytes_limit", 0)


def _shared(mesh: Mesh) -> bool:
    """Whether matrices apart share their stack's memory."""
    return mesh.devices.flat[0].platform == "cpu"


def copied_bytes(config: PolicyConfig, params: Params, mesh: Mesh) -> int:
    """Bytes of a device that matrices apart take beside the stacks; `params` may be abstract."""
    if _shared(mesh) or not wanted(params, mesh):
        return 0
    found: list[Any] = []
    parameters.unstacked(config, params, lambda _, leaf: found.append(leaf))
    return _bytes(found)


def _bytes(leaves: Sequence[Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
