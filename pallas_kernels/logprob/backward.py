"""Token logprobs, backward: dx and dw, which accumulate along different axes.

dx of a token block sums over the vocabulary, dw of a vocabulary block over the tokens. Each
kernel keeps its accumulator in VMEM and computes the logits for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.logprob.blocks import (
    Setup,
    bounds_of,
    compiler_params,
    like,
    pad,
    row_slices,
    token_blocks,
    vary,
    varying,
    weight_spec,
)
from pallas_kernels.tiles import LOG2E, dot


def backward(setup: Setup, residuals: Any, cotangents: Any) -> Any:
    """Returns the gradients dx and dw, by a kernel each.

    d logits = (d_logprob (onehot - p) + d_lse p - d_entropy p (log p + entropy)) / temperature.
    The kernels see it as p (a + b log2 p) + c onehot, three numbers a token.
    """
    x, w, labels, lse, entropy = residuals
    d_logprob, d_lse, d_entropy = (d / setup.temperature for d in cotangents)
    factors_T4 = jnp.stack(
        [lse * LOG2E, d_lse - d_logprob - d_entropy * entropy, -d_entropy / LOG2E, d_logprob], 1
    )
    # Cotangents of results that all shards share are shared, too; the kernels' arguments vary.
    factors_T4 = vary(factors_T4, varying(x))
    results = []
    for call, largest in (
        (_dx_call, setup.sizes.dx_tokens),
        (_dw_call, setup.sizes.dw_tokens),
    ):
        tokens, padded = token_blocks(x.shape[0], largest)
        per_token = (pad(a, padded) for a in (labels[:, None], factors_T4, x))
        results.append(call(setup, tokens, bounds_of(setup, w), *per_token, w))
    dx, dw = results
    return dx[: x.shape[0]], dw, None


def _dx_call(
    setup: Setup, tokens: int, bounds_2: Array, labels_T1: Array, factors_T4: Array,
    x_TD: Array, w: Array,
) -> Array:  # fmt: skip
    """Grid: token blocks, then vocabulary blocks, as in the forward."""
    T, D = x_TD.shape
    V, size = setup.vocab(w), setup.sizes.dx_vocab
    blocks = pl.cdiv(min(V, setup.valid_vocab), size)
    row = lambda width: pl.BlockSpec((tokens, width), lambda t, v, _: (t, 0))  # noqa: E731
    return pl.pallas_call(
        functools.partial(_dx_kernel, setup=setup, ragged=V % size if blocks * size > V else 0),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(T // tokens, blocks),
            in_specs=[row(1), row(4), row(D), weight_spec(setup, D, size, lambda t, v, _: v)],
            out_specs=row(D),
            scratch_shapes=[pltpu.VMEM((tokens, D), jnp.float32)],
        ),
        out_shape=like((T, D), x_TD.dtype, x_TD),
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * T * D * V,
            bytes_accessed=T // tokens * w.size * w.dtype.itemsize
            + 2 * x_TD.size * x_TD.dtype.itemsize,
            transcendentals=T * V,
        ),
        interpret=setup.interpret,
        name="token_logprob_dx",
    )(bounds_2, labels_T1, factors_T4, x_TD, w)


def _dw_call(
    setup: Setup, tokens: int, bounds_2: Array, labels_T1: Array, factors_T4: Array,
    x_TD: Array, w: Array,
) -> Array:  # fmt: skip
    """Grid: vocabulary blocks (all of them: invalid ids get zeros), then token blocks."""
    T, D = x_TD.shape
    V, size = setup.vocab(w), setup.sizes.dw_vocab
    row = lambda width: pl.BlockSpec((tokens, width), lambda v, t, _: (t, 0))  # noqa: E731
    weights = weight_spec(setup, D, size, lambda v, t, _: v)
    return pl.pallas_call(
        functools.partial(_dw_kernel, setup=setup),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(V, size), T // tokens),
            in_specs=[row(1), row(4), row(D), weights],
            out_specs=weights,
            scratch_shapes=[
                pltpu.VMEM((size, D), jnp.float32),
                pltpu.VMEM((size, tokens), x_TD.dtype),
            ],
        ),
        out_shape=like(w.shape, setup.dw_dtype, x_TD),
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * T * D * V,
            bytes_accessed=pl.cdiv(V, size) * x_TD.size * x_TD.dtype.itemsize
            + w.size * (w.dtype.itemsize + setup.dw_dtype.itemsize),
            transcendentals=T * V,
        ),
        interpret=setup.interpret,
        name="token_logprob_dw",
    )(bounds_2, labels_T1, factors_T4, x_TD, w)


def _d_logits(
    setup: Setup, first: Array, end: Array, labels: Any, factors: Any, x: Any, weights: Array
) -> Iterator[tuple[Any, Array]]:
    """Yields slices of tokens and the cotangents of their logits with a block of weights.

    The cotangents are float32 [slice, vocab]; ids at or above `end` get 0.
    """
    for rows in row_slices(x.shape[0]):
        labels_R1, factors_R4, x_RD = labels[rows, :], factors[rows, :], x[rows, :]
        logits = dot(x_RD, weights, 1, 1 if setup.transposed else 0)
        ids = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        lse, a, b, c = (factors_R4[:, i : i + 1] for i in range(4))
        log_p = logits * setup.scale - lse
        d_logits = jnp.exp2(log_p) * (a + b * log_p) + jnp.where(ids == labels_R1, c, 0)
        # Past the end w may hold anything, NaN too: nothing computed from it may survive.
        yield rows, jnp.where(ids < end, d_logits, 0)


def _dx_kernel(
    bounds,  # SMEM int32 [2]
    labels, factors, x,  # [tokens, 1], [tokens, 4], [tokens, D]
    w,  # [D, vocab], or [vocab, D] if transposed
    dx,  # [tokens, D], x's dtype
    sums,  # scratch float32 [tokens, D]
    *, setup: Setup,
    ragged: int,  # how much of the last block lies inside w; 0: all of it
):  # fmt: skip
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    size = setup.vocab(w)
    if ragged:
        # The last block hangs over the end of w, where 0 * garbage may be NaN.
        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            ids = lax.broadcasted_iota(jnp.int32, w.shape, 0 if setup.transposed else 1)
            w[...] = jnp.where(ids < ragged, w[...], 0)

    weights = w[...].astype(x.dtype)
    first = bounds[0] + step * size
    for rows, d_logits in _d_logits(setup, first, bounds[1], labels, factors, x, weights):
        sums[rows, :] += dot(d_logits.astype(x.dtype), weights, 1, 0 if setup.transposed else 1)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        dx[...] = sums[...].astype(dx.dtype)


def _dw_kernel(
    bounds,  # SMEM int32 [2]
    labels, factors, x,  # [tokens, 1], [tokens, 4], [tokens, D]
    w,  # [D, vocab], or [vocab, D] if transposed
    dw,  # as w, in the dtype of its gradient
    sums,  # scratch float32 [vocab, D]: in a table's orientation for either
    d_logits_VT,  # scratch [vocab, tokens], x's dtype
    *, setup: Setup,
):  # fmt: skip
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    size = setup.vocab(w)
    weights = w[...].astype(x.dtype)
    first = bounds[0] + pl.program_id(0) * size
    for rows, d_logits in _d_logits(setup, first, bounds[1], labels, factors, x, weights):
        # Transposing this small tile is free; a product with x transposed costs half the speed.
        d_logits_VT[:, rows] = d_logits.astype(x.dtype).T
    sums[...] += dot(d_logits_VT[...], x[...], 1, 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        result = sums[...].astype(dw.dtype)
        dw[...] = result if setup.transposed else result.T
