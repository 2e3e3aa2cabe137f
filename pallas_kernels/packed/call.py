"""The call of packed attention: heads first, rows padded to whole blocks, custom VJP."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.interpret import Interpret
from pallas_kernels.packed.backward import backward
from pallas_kernels.packed.forward import forward
from pallas_kernels.schedule import Schedule
from pallas_kernels.tiles import LANES, LOG2E, delta_of, kept, no_gradient


def packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    schedule: Schedule,
    interpret: Interpret = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The TPU path of `pallas_kernels.packed_attention`, which documents and checks it.

    `schedule` must have been built for these T and S, with blocks that are multiples of 128.
    """
    for name, size in (("q_size", schedule.q_size), ("k_size", schedule.k_size)):
        if size % LANES:
            raise ValueError(f"{name} is {size}; the TPU kernels need a multiple of {LANES}")
    # Three tables of int32 in a core's 1 MiB of scalar memory, which holds other things too.
    if schedule.room > 75_000:
        raise ValueError(
            f"a block list with room for {schedule.room} entries does not fit scalar memory "
            "(75,000 do): give fewer rows at a time (grpo.micro_batch_rows), or shorter ones "
            "(grpo.row_length)"
        )
    B, T, N, H = q_BTNH.shape
    q = _heads_first(q_BTNH, schedule.q_size)
    k, v = (_heads_first(x, schedule.k_size) for x in (k_BSKH, v_BSKH))
    out, lse = _attend(q, k, v, schedule, interpret)
    lse_BTN = lse.reshape(N, B, -1)[:, :, :T].transpose(1, 2, 0)
    return _heads_last(out, B, T), lse_BTN


def _heads_first(x_BTNH: Array, size: int) -> Array:
    """[B, T, N, H] -> [N, B * T padded to whole blocks, H]."""
    B, T, N, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
    return x.transpose(2, 0, 1, 3).reshape(N, -1, H)


def _heads_last(x: Array, rows: int, length: int) -> Array:
    N, _, H = x.shape
    return x.reshape(N, rows, -1, H)[:, :, :length].transpose(1, 2, 0, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, schedule: Schedule, interpret: Interpret) -> Any:
    return _attend_forward(q, k, v, schedule, interpret)[0]


def _attend_forward(q: Array, k: Array, v: Array, schedule: Schedule, interpret: Interpret) -> Any:
    out, lse = kept(*forward(q, k, v, schedule, interpret))
    return (out, lse), (q, k, v, schedule, out, lse)


def _attend_backward(interpret: Interpret, residuals: Any, cotangents: Any) -> Any:
    q, k, v, schedule, out, lse = residuals
    d_out, d_lse = cotangents
    # One operand, not two: each costs a grid step some twenty bundles of bookkeeping.
    stats = jnp.stack([lse * LOG2E, delta_of(d_out, out, d_lse)], axis=1)
    operands = (q, k, v, d_out, stats, schedule, interpret)
    d_q, d_k, d_v = backward(*operands)
    return d_q, d_k, d_v, no_gradient(schedule)


_attend.defvjp(_attend_forward, _attend_backward)
