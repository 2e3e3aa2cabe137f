"""A mixture of experts in the place of a layer's feed-forward: Qwen3-MoE's.

A router sends each token to A of E small SwiGLUs and sums their outputs, weighted by the
router's probabilities. Tokens are sorted by expert, so that each of the three projections is
one grouped matrix product over the whole batch: jax's megablox kernel on TPUs,
`jax.lax.ragged_dot` elsewhere. No token is dropped and there is no capacity; a token's
result does not depend on what else is in the batch. `layers.DecoderLayer` calls it.

On a mesh, tokens are cut over "fsdp" and experts over "tensor" (`parallel.mesh`): each device
sorts its own tokens, its own experts first, computes those alone, and the devices that hold
the other experts add theirs.

Letters of this file: E experts, A experts per token, X tokens, M = X * A sorted rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from notepad_jax.model.config import Experts
from notepad_jax.model.matrices import Matrix, Quantized
from notepad_jax.parallel import shards
from notepad_jax.parallel.shards import ROWS

NAMES = ("router", "expert_gate", "expert_up", "expert_down")
EXPERTS = PartitionSpec("tensor")  # [E, ...]


def route(
    x_XD: Float[Array, "X D"], router_DE: Float[Array, "D E"], experts: Experts
) -> tuple[Int[Array, "X A"], Float[Array, "X A"]]:
    """Returns which experts each token goes to, best first, and their float32 weights."""
    logits_XE = jnp.matmul(x_XD.astype(jnp.float32), router_DE.astype(jnp.float32))
    weights_XA, chosen_XA = jax.lax.top_k(jax.nn.softmax(logits_XE, axis=-1), experts.per_token)
    if experts.normalize:
        weights_XA = weights_XA / jnp.sum(weights_XA, axis=-1, keepdims=True)
    return chosen_XA, weights_XA


def grouped_matmul(
    x_MD: Float[Array, "M D"], w_EDF: Matrix, sizes_E: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Grouped matrix product: the first sizes[0] rows by w[0], the next sizes[1] by w[1], ...

    Differentiable in x and in w where that is an array. Sizes must sum to M. The result has
    x's dtype; for int8 experts see `matrices.apply`.
    """
    if not isinstance(w_EDF, Quantized):
        return _grouped(x_MD, w_EDF, sizes_E, x_MD.dtype)
    product_MF = _grouped(x_MD, w_EDF.values, sizes_E, jnp.float32)
    rows = x_MD.shape[0]
    scale_MF = jnp.repeat(w_EDF.scale[:, 0], sizes_E, axis=0, total_repeat_length=rows)
    return (product_MF * scale_MF).astype(x_MD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(
    x_MD: Float[Array, "M D"], w_EDF: Array, sizes_E: Int[Array, " E"], dtype: Any
) -> Float[Array, "M F"]:
    """The product in x's dtype, summed in float32 and returned in `dtype`.

    Jax's own derivative would round the gradient of w to x's dtype. This one stays float32, for
    devices to sum, where w is (`matrices.seen`).
    """
    w_EDF = w_EDF.astype(x_MD.dtype)
    if not _has_kernel():
        return jax.lax.ragged_dot(x_MD, w_EDF, sizes_E, preferred_element_type=dtype)
    padded_MD, how = _tiled(x_MD, *w_EDF.shape[1:])
    return gmm(padded_MD, w_EDF, sizes_E, dtype, **how)[: len(x_MD)]


def _grouped_forward(x_MD: Array, w_EDF: Array, sizes_E: Array, dtype: Any) -> tuple[Array, Any]:
    cast_EDF, kind = w_EDF.astype(x_MD.dtype), jnp.zeros((), w_EDF.dtype)
    return _grouped(x_MD, cast_EDF, sizes_E, dtype), (x_MD, cast_EDF, sizes_E, kind)


def _grouped_backward(dtype: Any, kept: Any, d_MF: Array) -> tuple[Array, Array, None]:
    x_MD, w_EDF, sizes_E, kind = kept
    if not _has_kernel():
        w_EFD = w_EDF.swapaxes(1, 2)
        d_x_MD = jax.lax.ragged_dot(d_MF, w_EFD, sizes_E, preferred_element_type=dtype)
        d_w_EDF = jax.lax.ragged_dot_general(
            x_MD, d_MF, sizes_E, _BY_EXPERT, preferred_element_type=jnp.float32
        )
    else:
        padded_MD, how = _tiled(x_MD, *w_EDF.shape[1:])
        padded_MF, _ = _tiled(d_MF, *w_EDF.shape[1:])
        d_x_MD = gmm(padded_MF, w_EDF, sizes_E, x_MD.dtype, **how, transpose_rhs=True)
        d_w_EDF = tgmm(padded_MD.T, padded_MF, sizes_E, jnp.float32, **how)
    return d_x_MD[: len(x_MD)].astype(x_MD.dtype), d_w_EDF.astype(kind.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)

# [M, D] and [M, F], both sorted by expert, to [E, D, F]
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,), rhs_group_dimensions=(),
)  # fmt: skip


def _has_kernel() -> bool:
    return pallas_kernels.backend() in ("pallas", "interpret")


def _tiled(x_MD: Array, D: int, F: int) -> tuple[Array, dict[str, Any]]:
    """Rows padded to whole tiles, which megablox wants, and how it is called for [E, D, F].

    Padding belongs to no expert: never computed. Tiles are small in decoding, where every
    expert has a handful of tokens.
    """
    tile = 128 if len(x_MD) < 8192 else 512
    padded_MD = jnp.pad(x_MD, ((0, -len(x_MD) % tile), (0, 0)))
    interpret = pallas_kernels.backend() == "interpret"
    return padded_MD, dict(tiling=(tile, min(512, D), min(512, F)), interpret=interpret)


class RoutedSwiGLU(nnx.Module):
    """An MoE feed-forward: sum over a token's experts of weight * down(silu(gate x) * up x)."""

    def __init__(self, experts: Experts, params: Mapping[str, Matrix]):
        self.experts = experts
        for name in NAMES:
            setattr(self, name, nnx.Param(params[name]))

    def __call__(
        self, x_BTD: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T A"]]:
        """Returns (output in x's dtype, which experts each token was sent to)."""
        with jax.named_scope("route"):
            B, T, D = x_BTD.shape
            chosen, weights = route(x_BTD.reshape(B * T, D), self.router[...], self.experts)
            chosen_BTA, weights_BTA = (x.reshape(B, T, -1) for x in (chosen, weights))
        matrices = tuple(
            w.get_value() for w in (self.expert_gate, self.expert_up, self.expert_down)
        )
        call = shards.shard_map(_computed, (ROWS, ROWS, ROWS, EXPERTS), ROWS)
        return call(x_BTD, chosen_BTA, weights_BTA, matrices), chosen_BTA


def _computed(
    x_BTD: Float[Array, "B T D"],
    chosen_BTA: Int[Array, "B T A"],
    weights_BTA: Float[Array, "B T A"],
    matrices: tuple[Matrix, Matrix, Matrix],
) -> Float[Array, "B T D"]:
    """What the experts make of the tokens that they were chosen for, weighted and summed.

    `matrices` are gate, up and down, [experts of this shard, ...].
    """
    B, T, D = x_BTD.shape
    A = chosen_BTA.shape[-1]
    gate, up, down = matrices
    own = jax.tree.leaves(gate)[0].shape[0]
    with jax.named_scope("sort"):
        # Counted from this shard's first expert: its own come first, all others are `own`.
        mine_M = chosen_BTA.reshape(-1) - own * shards.number("tensor")
        mine_M = jnp.where((mine_M >= 0) & (mine_M < own), mine_M, own)
        order_M = jnp.argsort(mine_M)
        sizes_E = jnp.bincount(mine_M, length=own).astype(jnp.int32)
        computed_M1 = (jnp.arange(mine_M.size) < jnp.sum(sizes_E))[:, None]
        # Rows of others are never computed: whatever stands there, and its gradient, is 0.
        sorted_MD = jnp.where(computed_M1, x_BTD.reshape(B * T, D)[order_M // A], 0)
    with jax.named_scope("experts"):
        hidden_MF = jax.nn.silu(grouped_matmul(sorted_MD, gate, sizes_E))
        hidden_MF = hidden_MF * grouped_matmul(sorted_MD, up, sizes_E)
        hidden_MF = jnp.where(computed_M1, hidden_MF, 0)
        out_MD = jnp.where(computed_M1, grouped_matmul(hidden_MF, down, sizes_E), 0)
    # A gather by the inverse permutation: a scatter-add would sum in no fixed order.
    out_BTAD = out_MD[jnp.argsort(order_M)].reshape(B, T, A, D)
    out_BTD = jnp.einsum("btad,bta->btd", out_BTAD.astype(jnp.float32), weights_BTA)
    return shards.psum(out_BTD, "tensor").astype(x_BTD.dtype)


# ---------------------------------------------------------------- load statistics


def load(
    routes_LBTA: Int[Array, "L B T A"], counted_BT: Bool[Array, "B T"], experts: int
) -> Float[Array, "L E"]:
    """Counts the tokens each expert of each layer was given, float32; sums over batches add up.

    `routes` come from `policy.forward`; `counted` leaves padding out.
    """

    def one(routes_BTA: Array) -> Array:
        weight_BTA = jnp.broadcast_to(counted_BT[..., None], routes_BTA.shape)
        return jnp.bincount(
            routes_BTA.reshape(-1), weight_BTA.reshape(-1).astype(jnp.float32), length=experts
        )

    return jax.vmap(one)(routes_LBTA)


def load_metrics(load_LE: Float[Array, "L E"]) -> dict[str, Float[Array, ""]]:
    """Returns load-balance metrics of a summed `load`: means over layers.

    `moe_load_max`: the busiest expert's tokens over the average expert's; 1 is balance, E is
    collapse. `moe_load_idle`: the share of experts that were given nothing.
    """
    mean_L = jnp.maximum(jnp.mean(load_LE, axis=1), 1e-9)
    return {
        "moe_load_max": jnp.mean(jnp.max(load_LE, axis=1) / mean_L),
        "moe_load_idle": jnp.mean(load_LE == 0),
    }
