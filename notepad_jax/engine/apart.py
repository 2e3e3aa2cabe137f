"""An engine's matrices of layers, apart where launches run faster so, and the memory it takes.

A scan over layers copies each layer's matrices out of their stack before it multiplies. Decoding
does little but read weights, so that copy is most of it on a CPU, where matrices that lie apart
share the stack's memory. On a GPU it is a third, and they take as much memory again: there a policy
is taken apart if it is small beside the device, and for decoding alone: prefill is products, and a
program without a loop over layers takes thrice the time to compile. On a CPU that computes in
float32 adapters are added in on the way (`lora_merge.exact`): two products less for each matrix,
and the programs are those of a policy without adapters. Above: `executor`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from notepad_jax.model import lora, lora_merge, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Adapted, Unstacked
from notepad_jax.model.parameters import Params
from notepad_jax.parallel import place
from notepad_jax.parallel.mesh import memory_stats

SHARE = 1 / 5  # of a GPU's memory, that the weights' second copy may take: 7B in bfloat16 of 80 GB


class Placed(NamedTuple):
    """A policy's parameters as the launches are given them."""

    prefill: Params
    decode: Params


class Apart:
    """The matrices of the policy of a row's engines; what a policy has of the one before is kept.

    Nothing is held by this: what an engine gives back between rollouts is free.
    """

    def __init__(self, config: PolicyConfig, mesh: Mesh):
        self._config, self.mesh = config, mesh
        self._asked = threading.Lock()  # each engine asks in a thread of its own
        self._made: dict[str, _Made] = {}

    def of(self, params: Params) -> Placed:
        """Returns `params`, arrays or abstract ones, as launches run fastest."""
        if not wanted(params, self.mesh):
            return Placed(params, params)
        with self._asked:
            apart = self._apart(params)
        return Placed(apart if _shared(self.mesh) else params, apart)

    def _apart(self, params: Params) -> Params:
        adapted = added(self._config, params, self.mesh)
        layers = {"layers": params["layers"]}  # nothing else is written anew
        merged = functools.cache(lambda: lora_merge.in_place(layers)["layers"])

        def one(name: str, leaf: Any) -> Unstacked:
            made_of = jax.tree.leaves(adapted.get(name, leaf))
            own = self._made[name].again(made_of) if name in self._made else None
            if own is None:
                real = isinstance(leaf, jax.Array)
                stack = merged()[name] if real and name in adapted else leaf
                own = Unstacked(tuple(place.entries(stack)))
                if real:
                    self._made[name] = _Made(tuple(map(weakref.ref, made_of)), weakref.ref(own))
            return own

        return parameters.unstacked(self._config, lora.plain(params) if adapted else params, one)


class _Made(NamedTuple):
    """A matrix that was taken apart, for as long as it lives."""

    made_of: tuple[weakref.ref[Any], ...]  # the stack, and the adapters that were added to it
    own: weakref.ref[Unstacked]

    def again(self, made_of: Sequence[Any]) -> Unstacked | None:
        """Returns it where it would be made of the same memory."""
        known = [ref() for ref in self.made_of]
        same = len(known) == len(made_of) and all(
            one is not None and place.same(one, other)
            for one, other in zip(known, made_of, strict=True)
        )
        return self.own() if same else None


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


def added(config: PolicyConfig, params: Params, mesh: Mesh) -> dict[str, Adapted]:
    """Returns the matrices that adapters are added into on `mesh`, arrays or abstract."""
    return lora_merge.exact(config, params) if _shared(mesh) else {}


def copied_bytes(config: PolicyConfig, params: Params, mesh: Mesh) -> int:
    """Bytes of a device that matrices apart take beside the stacks; `params` may be abstract."""
    if not wanted(params, mesh):
        return 0
    if _shared(mesh):
        return _bytes([leaf.matrix for leaf in added(config, params, mesh).values()])
    found: list[Any] = []
    parameters.unstacked(config, params, lambda _, leaf: found.append(leaf))
    return _bytes(found)


def _bytes(leaves: Sequence[Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
