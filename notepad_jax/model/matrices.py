"""Weight matrices, plain, int8-quantised, or with LoRA, and their one matrix product (`apply`).

A matrix is an array; or `Quantized`, int8 values and one float32 scale for every output
channel; or `OfLayer`, one of several that lie apart; or `Adapted`, any of these with a low-rank
product beside it. Only an engine's copy of a policy is ever quantised, once, when it adopts
published weights (`checkpoint.handoff`), or taken apart (`parameters.unstacked`); a trainer's and
an engine's are both adapted (`lora`), and `apply` is the one formula for both, so the sampler
sees what was trained. Checkpoints and exports hold arrays. `parameters` (above) says which axes
of a leaf are inputs, `layers` and `moe` multiply.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from notepad_jax.parallel import shards

LARGEST = 127  # -128 is not used: the grid is symmetric, so there is no zero point


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An int8 matrix `values * scale`; or its shapes, shardings (`parameters.rollout_target`)."""

    values: Any  # int8, in the shape of the array that it stands for
    scale: Any  # float32, the same shape with 1 in the place of every input axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A matrix with LoRA, `matrix + scale * a b`, that is not added up (`lora_merge.exact`)."""

    matrix: Any  # [*inputs, *outputs]: an array, `Quantized` or `OfLayer`
    a: Any  # [*inputs, r]
    b: Any  # [r, *outputs]
    scale: Any  # float32: a scalar, or [B, T] where tokens have adapters of their own
    own: Any = None  # bool [B, T, r]: which of r belong to a token's adapters; None: all do


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unstacked:
    """A matrix of all layers, one array a layer, where else one would be stacked.

    A scan copies each layer's slice out of a stack before it multiplies. A few rows at a time,
    as in decoding, a CPU does little but read weights, so that copy is most of the time.
    """

    layers: tuple[Any, ...]

    def of(self, layer: Array) -> OfLayer:
        return OfLayer(self.layers, layer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfLayer:
    """The matrix `layers[layer]`, of a layer that is known when the program runs."""

    layers: tuple[Any, ...]
    layer: Any  # int32


Matrix = Array | Quantized | Adapted | OfLayer


def quantize(matrix: Array, inputs: tuple[int, ...]) -> Quantized:
    """Quantises a matrix to int8: the nearest of 255 multiples of each output channel's scale.

    The largest magnitude of a channel becomes 127, so every element is off by at most half a
    scale, and a matrix that was made of such multiples comes back as it is.

    Args:
      matrix: stacked or not; any floating dtype.
      inputs: axes that a product sums over; what differs along another axis has a scale of
        its own (a layer, an expert, an output channel).
    """
    matrix = matrix.astype(jnp.float32)
    scale = jnp.max(jnp.abs(matrix), axis=inputs, keepdims=True) / LARGEST
    scale = jnp.where(scale == 0, 1.0, scale)  # a channel of zeros; 0/0 would make it NaN
    values = jnp.clip(jnp.round(matrix / scale), -LARGEST, LARGEST)
    return Quantized(values.astype(jnp.int8), scale)


def seen(leaf: Matrix, axes: tuple[str | None, ...], dtype: Any) -> Matrix:
    """Returns a leaf rounded to `dtype` and gathered for a forward pass, however it is kept.

    Trainer and engine may keep a policy in different dtypes; both come through here, so they
    compute with the same numbers wherever the engine's copy is a cast of the trainer's. A
    float32 leaf stays float32, with the values of `dtype`: so does its gradient, however many
    tokens and devices that is a sum over.
    """
    if isinstance(leaf, Quantized | OfLayer):
        return leaf
    return shards.gathered(leaf, axes, dtype)


def apply(x: Array, matrix: Matrix, inputs: int = 1) -> Array:
    """Returns x's last `inputs` axes summed against the matrix's first, in x's dtype."""
    if isinstance(matrix, OfLayer):
        each = [lambda x, own=own: apply(x, own, inputs) for own in matrix.layers]
        return jax.lax.switch(matrix.layer, each, x)  # the other layers' are not touched
    if isinstance(matrix, Quantized):
        return _summed(x, matrix, inputs).astype(x.dtype)
    if isinstance(matrix, Adapted):
        whole = _summed(x, matrix.matrix, inputs) + delta(x, matrix, inputs)
        return whole.astype(x.dtype)
    if matrix.dtype == x.dtype:
        return jnp.tensordot(x, matrix, inputs)  # its own derivatives are of that dtype, too
    return _product(x, matrix, inputs).astype(x.dtype)


def _summed(x: Array, matrix: Array | Quantized | OfLayer, inputs: int) -> Array:
    """Returns x's product with a matrix, summed in float32 and not rounded yet.

    The scale of an int8 matrix belongs to an output channel, so it is applied to the product,
    which itself runs on int8 values that x's dtype holds exactly (bfloat16 holds integers to
    256); without its scale a float16 product would overflow.
    """
    if isinstance(matrix, OfLayer):
        each = [lambda x, own=own: _summed(x, own, inputs) for own in matrix.layers]
        return jax.lax.switch(matrix.layer, each, x)
    if isinstance(matrix, Quantized):
        product = _product(x, matrix.values, inputs)
        return product * matrix.scale.reshape(matrix.scale.shape[inputs:])
    return _product(x, matrix, inputs)


def delta(x: Array, adapted: Adapted, inputs: int = 1) -> Array:
    """Returns what the adapter adds to x's product with its matrix, float32.

    In bfloat16 W + AB rounds AB away: a step of 1e-5 is less than half a unit in the last
    place of most weights. Beside W it keeps its own 8 bits, and float32 until it is added.
    Where several policies' adapters lie side by side a token sees none but its own.
    """
    low = _product(x, adapted.a, inputs).astype(x.dtype)
    if adapted.own is None:
        return _product(low, adapted.b, 1) * adapted.scale
    product = _product(jnp.where(adapted.own, low, 0), adapted.b, 1)
    return product * jnp.expand_dims(adapted.scale, range(adapted.scale.ndim, product.ndim))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, matrix: Array, inputs: int) -> Array:
    """The product of x and a matrix in x's dtype, summed and returned in float32.

    Its derivative is made of products in x's dtype, too. Jax's own would meet the float32
    cotangent with float32 copies of x and of the matrix; but that cotangent comes from a
    result which was rounded to x's dtype, so it has no more digits than that. The matrix' own
    gradient is summed over all rows before it is rounded to the matrix' dtype, if it is.
    """
    return jnp.tensordot(x, matrix.astype(x.dtype), inputs, preferred_element_type=jnp.float32)


def _product_forward(x: Array, matrix: Array, inputs: int) -> tuple[Array, Any]:
    # Kept for the way back in x's dtype, which is narrower than a float32 matrix.
    cast, kind = matrix.astype(x.dtype), jnp.zeros((), matrix.dtype)
    return _product(x, cast, inputs), (x, cast, kind)


def _product_backward(inputs: int, kept: Any, d_out: Array) -> tuple[Array, Array]:
    x, matrix, kind = kept
    d_out, rows = d_out.astype(x.dtype), tuple(range(x.ndim - inputs))
    outputs = tuple(range(inputs, matrix.ndim))
    last = tuple(range(len(rows), d_out.ndim))
    # In x's dtype, or devices that cut the outputs would sum d_x once for every such product.
    d_x = jnp.tensordot(d_out, matrix, (last, outputs))
    d_matrix = jnp.tensordot(x, d_out, (rows, rows), preferred_element_type=jnp.float32)
    return d_x, d_matrix.astype(kind.dtype)


_product.defvjp(_product_forward, _product_backward)
