"""What the TPU kernels have in common: tiles of 128 lanes, exact products, interpret mode."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

LANES = 128
LOG2E = math.log2(math.e)

Interpret = bool | pltpu.InterpretParams  # True: on the CPU, in TPU interpret mode


def interpret_mode(interpret: Interpret) -> Interpret:
    """Returns what `pallas_call` takes: never True, which is the older mode and gives wrong
    gradients for right kernels."""
    return pltpu.InterpretParams() if interpret is True else interpret


def dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """The product of two matrices over the given axes, summed in float32.

    float32 operands would otherwise be rounded to bfloat16 on their way into the MXU.
    """
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def wide(x: Array, width: int) -> Array:
    """[rows, 128] of equal lanes -> [rows, width] of equal lanes."""
    return x[:, :width] if width <= LANES else jnp.tile(x, (1, width // LANES))
