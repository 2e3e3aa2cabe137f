"""LoRA, low-rank adapters (Hu and others, 2021), as a partition of the policy's tree.

A target matrix W [inputs, outputs] becomes W + alpha / rank * A B with A [inputs, rank] and B
[rank, outputs]; B starts at zero, so training starts at the policy itself. `partition` splits
an adapted policy into what is frozen and what is trained; joined (`parameters.join`) they are
one tree that `policy` runs, with x A B computed beside x W (`beside`, `matrices.Adapted`), in the
update and in the engine: a base in bfloat16 or int8 has no room for a small delta, and rounds it
away. So gradients, optimizer state, checkpoints and hand-offs are of the adapters' size.
`lora_merge` adds them up, in float32, for runs that train all weights on from there and for engines
that lose nothing by it. A tree without adapters passes through unchanged, so no other module needs
to know if there are any. A tree that has some already (`adapted`: a policy that was read with them)
says by itself which they are (`of`), and `partition` goes on with them. An engine may have those of
`several` policies beside one base, and every token chooses (`chosen`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.matrices import Adapted, Quantized
from notepad_jax.model.parameters import Params, Spec, join, specs
from notepad_jax.parallel import mesh as meshes
from notepad_jax.parallel import place

# Matrices that can be adapted.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
_IN, _OUT, SCALE = "{}_lora_in", "{}_lora_out", "lora_scale"
_RANKS = {_IN: -1, _OUT: 1}  # which axis they are
_WHOSE, CHOSEN = "lora_whose", "lora_chosen"  # of several: whose each rank is; whose a token wants


@dataclasses.dataclass(frozen=True)
class Lora:
    """A LoRA configuration: rank, alpha and target matrices."""

    rank: int
    alpha: float  # the adapters' product is multiplied by alpha / rank
    targets: tuple[str, ...]  # of TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; adapters need at least 1")
        for name in self.targets:
            if name not in TARGETS:
                raise ValueError(f"lora.targets has {name!r}; there are {', '.join(TARGETS)}")
        if not self.targets:
            raise ValueError(f"lora.targets is empty; choose of {', '.join(TARGETS)}")


def init(config: PolicyConfig, lora: Lora, key: Array) -> Params:
    """Returns fresh float32 adapters: {"layers": {"q_lora_in": [L, D, r], ...}}.

    Raises:
      ValueError: the policy has no such matrix (a mixture of experts has no `gate`).
    """
    layers: dict[str, Array] = {}
    shapes = _shapes(config, lora)
    every = _normal(key, tuple(into for into, _ in shapes.values()))
    for (name, (into, out)), drawn in zip(shapes.items(), every, strict=True):
        layers[_IN.format(name)] = drawn * math.prod(into[1:-1]) ** -0.5
        layers[_OUT.format(name)] = jnp.zeros(out)
    return {"layers": layers}


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Draws all matrices in one program; each shape alone would be one to compile."""
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def _shapes(config: PolicyConfig, lora: Lora) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The shapes of each target's A [L, *inputs, r] and B [L, r, *outputs]."""
    known, found = specs(config)["layers"], {}
    for name in lora.targets:
        if name not in known:
            raise ValueError(f"lora.targets has {name!r}, which this policy's layers do not have")
        layers, *sides = known[name].shape
        split = len(known[name].inputs)
        found[name] = (layers, *sides[:split], lora.rank), (layers, lora.rank, *sides[split:])
    return found


def shardings(params: Params, where: Any) -> Any:
    """Returns the shardings of a policy with adapters, given those of its base (`where`).

    `params`, arrays or abstract, say which adapters it has. Each factor is cut as its matrix is
    on that side; without adapters it is `where`.
    """
    layers, ours = dict(where["layers"]), params["layers"]
    for name in TARGETS:
        into, out = (way.format(name) for way in (_IN, _OUT))
        if into in ours:
            own = layers[name]
            layers[into], layers[out] = _sides(own, ours[into].ndim - 2, ours[out].ndim - 2)
            layers[SCALE] = place.replicated(own.mesh)
    return {**where, "layers": layers}


def _sides(matrix: NamedSharding, inputs: int, outputs: int) -> tuple[NamedSharding, NamedSharding]:
    """Where A and B of a stacked matrix live, which has so many input and output dimensions."""
    cut = (*matrix.spec, *[None] * (1 + inputs + outputs - len(matrix.spec)))
    into, out = (*cut[: 1 + inputs], None), (cut[0], None, *cut[1 + inputs :])
    return tuple(NamedSharding(matrix.mesh, meshes.trimmed(spec)) for spec in (into, out))


def _where(base: Params) -> Any:
    """The shardings of a base's leaves; what was not placed lies on the first device."""

    def one(leaf: Any) -> NamedSharding:
        found = getattr(leaf.values if isinstance(leaf, Quantized) else leaf, "sharding", None)
        return found if isinstance(found, NamedSharding) else place.first_device()

    return jax.tree.map(one, base, is_leaf=lambda x: isinstance(x, Quantized))


def abstract(
    config: PolicyConfig, lora: Lora, base: Params, dtype: str = "float32"
) -> tuple[Params, Params]:
    """Returns (frozen, trained), as `partition` does, of an abstract `base`.

    Nothing is drawn: `trained` are shapes, in `dtype`, and places.
    """
    fresh = jax.eval_shape(lambda key: init(config, lora, key), jax.random.key(0))
    there = shardings(fresh, _where(base))
    scale = jax.ShapeDtypeStruct((config.layers,), jnp.float32, sharding=there["layers"][SCALE])
    trained = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, dtype, sharding=where),
        fresh, factors(there),
    )  # fmt: skip
    return frozen(base, scale), trained


def rollout_target(config: PolicyConfig, lora: Lora, base: Params) -> Params:
    """Returns the abstract tree that an engine asks a hand-off for: adapters beside `base`.

    `base` is what it asks for of that alone (`parameters.rollout_target`). Adapters are in the
    dtype of the activations however the base is kept: the trainer's forward pass rounds its
    float32 ones to just that, so both multiply by the same numbers.
    """
    return join(*abstract(config, lora, base, config.dtype))


def frozen(base: Params, scale: Any) -> Params:
    """Returns the frozen partition of an adapted policy: the base and the adapters' `scale`."""
    return {**base, "layers": {**base["layers"], SCALE: scale}}


def partition(
    config: PolicyConfig, params: Params, lora: Lora, key: Array
) -> tuple[Params, Params]:
    """Returns (frozen, trained), on the mesh of `params`: base and scale, and adapters.

    The adapters are those that `params` has, or fresh ones. Raises ValueError where it has others
    than `lora` asks for.
    """
    check(of(params), lora)
    if SCALE in params["layers"]:
        return frozen(plain(params), params["layers"][SCALE]), factors(params)
    fresh = init(config, lora, key)
    trained = place.commit(fresh, factors(shardings(fresh, _where(params))))
    return frozen(params, _scale(config, lora, params)), trained


def adapted(config: PolicyConfig, base: Params, lora: Lora, adapters: Params) -> Params:
    """Returns a policy with `adapters`, of the shapes of `init` and on the mesh of `base`."""
    return join(frozen(base, _scale(config, lora, base)), adapters)


def several(base: Params, policies: Sequence[Params]) -> Params:
    """Returns `base` with the adapters of several policies side by side, as one of all their ranks.

    Tokens choose (`chosen`). Of `policies`, on the mesh of `base`, only the adapters are looked
    at; one without any is the base.
    """
    layers, ours = dict(plain(base)["layers"]), [policy["layers"] for policy in policies]
    scaled = [own[SCALE] for own in ours if SCALE in own]
    if not scaled:
        return base
    count, everywhere = len(scaled[0]), place.replicated(meshes.of(base))
    ranks = [found.rank if (found := of(policy)) else 0 for policy in policies]
    for way, axis in ((way.format(name), at) for name in TARGETS for way, at in _RANKS.items()):
        if theirs := [own[way] for own in ours if way in own]:
            narrow = jnp.zeros_like(theirs[0]).take(jnp.array([0]), axis)
            nothing = [narrow.repeat(rank, axis) for rank in ranks]
            parts = [own.get(way, none) for own, none in zip(ours, nothing, strict=True)]
            layers[way] = place.commit(jnp.concatenate(parts, axis), theirs[0].sharding)
    whose = np.repeat(np.arange(1, len(ranks) + 1, dtype=np.int32), ranks)
    none = np.zeros(count, np.float32)
    scales = [none, *(np.asarray(own.get(SCALE, none)) for own in ours)]  # device to host
    layers[SCALE] = place.commit(np.stack(scales, 1), everywhere)
    layers[_WHOSE] = place.commit(np.tile(whose, (count, 1)), everywhere)
    return {**base, "layers": layers}


def chosen(params: Params, whose_BT: Array) -> Params:
    """Returns `several` with each token's choice of policy: 0 is the base, 1 the first one.

    Shapes [1, T], [B, 1] and [B, T] will do. A policy that is alone stays as it is.
    """
    return {**params, CHOSEN: whose_BT} if of_several(params) else params


def of_several(params: Params) -> bool:
    """Whether a policy's adapters are those of `several`."""
    return _WHOSE in params["layers"]


def _scale(config: PolicyConfig, lora: Lora, base: Params) -> Array:
    scale = jnp.full((config.layers,), lora.alpha / lora.rank, jnp.float32)
    return place.commit(scale, place.replicated(meshes.of(base)))


def of(params: Params) -> Lora | None:
    """Returns the LoRA configuration of a policy; None where it has no adapters."""
    layers = params["layers"]
    if SCALE not in layers:
        return None
    targets = tuple(name for name in TARGETS if _IN.format(name) in layers)
    rank = layers[_IN.format(targets[0])].shape[-1]
    scale = np.asarray(layers[SCALE])  # device to host
    return Lora(rank, rank * float(scale[0]), targets)


def check(began: Lora | None, asked: Lora) -> None:
    """Raises ValueError unless the adapters that a policy `began` with are as `asked` for."""
    if began is None:
        return
    # A policy keeps alpha / rank, in float32.
    ours, theirs = (np.float32(one.alpha / one.rank) for one in (asked, began))
    if ours == theirs and asked.rank == began.rank and set(asked.targets) == set(began.targets):
        return
    raise ValueError(
        f"the policy has adapters with {_spelt(began)}, and the config asks for {_spelt(asked)}; "
        f"take over the first to go on with them, train all weights (grpo.lora.rank=0), or begin "
        f"with a policy in which they are added up (notepad-jax export-hf, --dtype float32)"
    )


def _spelt(lora: Lora) -> str:
    targets = tuple(name for name in TARGETS if name in lora.targets)
    said = {"rank": lora.rank, "alpha": f"{lora.alpha:g}", "targets": ",".join(targets)}
    return " ".join(f"grpo.lora.{key}={value}" for key, value in said.items())


def plain(params: Params) -> Params:
    """Returns a tree, of a policy or of one layer, without its adapters."""
    return {
        name: plain(leaf) if isinstance(leaf, Mapping) else leaf
        for name, leaf in params.items()
        if "lora_" not in name
    }


def axes(declared: Mapping[str, Spec]) -> dict[str, tuple[str | None, ...]]:
    """Returns the logical axes of one layer's adapters: each matrix' own, on that side."""
    found: dict[str, tuple[str | None, ...]] = {}
    for name in TARGETS:
        if name in declared:
            own, split = declared[name].axes[1:], len(declared[name].inputs)
            found[_IN.format(name)] = (*own[:split], None)
            found[_OUT.format(name)] = (None, *own[split:])
    return found


def beside(layer: Mapping[str, Any], whose_BT: Array | None = None) -> dict[str, Any]:
    """Returns one layer's parameters with every adapter in its matrix's place (`Adapted`).

    `whose_BT`: what tokens chose of `several`; None: the base for all.
    """
    found, scale, own = plain(layer), layer.get(SCALE), None
    if _WHOSE in layer:
        whose_BT = jnp.zeros((1, 1), jnp.int32) if whose_BT is None else whose_BT
        scale, own = scale[whose_BT], layer[_WHOSE] == whose_BT[..., None]
    for name in TARGETS:
        if _IN.format(name) in layer:
            a, b = layer[_IN.format(name)], layer[_OUT.format(name)]
            found[name] = Adapted(layer[name], a, b, scale, own)
    return found


def seen(trained: Params, theirs: Params) -> float | None:
    """Returns how much of a trained LoRA delta other adapters have: <D', D> / <D, D>.

    D is what the adapters of `trained` add, D' what those of `theirs` do, which lie where those
    do and have the same scale. None where `trained` adds nothing (yet), or has no adapters.
    """
    ours = trained["layers"]
    names = tuple(name for name in TARGETS if _IN.format(name) in ours)
    inner, whole = np.asarray(_overlaps(ours, theirs["layers"], names), np.float64)  # to the host
    return float(inner / whole) if whole else None


@functools.partial(jax.jit, static_argnums=2)
def _overlaps(ours: Params, theirs: Params, names: tuple[str, ...]) -> Array:
    """(<D', D>, <D, D>); with A B of rank r they are sums over [L, r, r]."""

    def factors(layers: Params, name: str) -> tuple[Array, Array]:
        a, b = (layers[way.format(name)].astype(jnp.float32) for way in (_IN, _OUT))
        return a.reshape(len(a), -1, a.shape[-1]), b.reshape(*b.shape[:2], -1)

    def inner(name: str, others: Params) -> Array:
        (a, b), (c, d) = factors(ours, name), factors(others, name)
        return jnp.sum(jnp.einsum("lir,lis->lrs", a, c) * jnp.einsum("lro,lso->lrs", b, d))

    nothing = jnp.zeros(())
    return jnp.stack([sum((inner(name, x) for name in names), nothing) for x in (theirs, ours)])


def factors(params: Params) -> Params:
    """Returns the adapters' A and B of a policy, as `init` makes them; without any, no leaves."""
    layers = params["layers"]
    return {"layers": {n: leaf for n, leaf in layers.items() if "lora_" in n and n != SCALE}}
