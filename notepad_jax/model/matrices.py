"""A layer's matrices, and the one place where a matrix meets its input.

A matrix is an array or `Quantized`: int8 values and one float32 scale for every output
channel. Only an engine's copy of a policy is ever quantised, once, when it adopts published
weights (`checkpoint.handoff`); the trainer, checkpoints and exports hold arrays. `parameters`
(above) says which axes of a leaf are inputs, `layers` and `moe` multiply.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

LARGEST = 127  # -128 is not used: the grid is symmetric, so there is no zero point


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix `values * scale`; or shapes and shardings of one (`parameters.rollout_target`)."""

    values: Any  # int8, in the shape of the array that it stands for
    scale: Any  # float32, the same shape with 1 in the place of every input axis


Matrix = Array | Quantized


def quantize(matrix: Array, inputs: tuple[int, ...]) -> Quantized:
    """Rounds a matrix to the nearest of 255 multiples of each output channel's own scale.

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


def apply(x: Array, matrix: Matrix, inputs: int = 1) -> Array:
    """Returns x's last `inputs` axes summed against the matrix's first, in x's dtype.

    A scale belongs to an output channel, so it is applied to the product, and the product
    itself runs on int8 values that x's dtype holds exactly (bfloat16 holds integers to 256).
    It is summed in float32: without its scale a float16 product would overflow.
    """
    if not isinstance(matrix, Quantized):
        return jnp.tensordot(x, matrix.astype(x.dtype), inputs)
    values = matrix.values.astype(x.dtype)
    product = jnp.tensordot(x, values, inputs, preferred_element_type=jnp.float32)
    return (product * matrix.scale.reshape(matrix.scale.shape[inputs:])).astype(x.dtype)
