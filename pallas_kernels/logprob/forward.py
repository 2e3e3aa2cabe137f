"""Token logprobs, forward: a block of tokens stays in VMEM, the weights stream past it once."""

from __future__ import annotations

import functools
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
    weight_spec,
)
from pallas_kernels.tiles import HIDDEN, LANES, LOG2E, dot


def forward(setup: Setup, x: Array, w: Array, labels: Array) -> Any:
    T = x.shape[0]
    tokens, padded = token_blocks(T, setup.sizes.tokens)
    partials = _forward_call(
        setup, tokens, bounds_of(setup, w), pad(labels[:, None], padded), pad(x, padded), w
    )
    results = _merge(setup, *(p[:T] for p in partials))
    return results, (x, w, labels, *results[1:])


def _merge(setup: Setup, peak_TL: Array, sum_TL: Array, weighted_TL: Array, label_TL: Array):
    """Merges the lanes' partial softmaxes, then the shards', into the three results.

    With peak m, sum s = sum exp(z - m) and weighted u = sum exp(z - m) (z - m) in base 2, the
    logsumexp is m + log s and the entropy log s - u / s: it never sees the size of the logits.
    """
    across = (lambda f, a: a) if setup.axis_name is None else lambda f, a: f(a, setup.axis_name)
    peak = across(lax.pmax, peak_TL.max(axis=-1))
    down_TL = (peak_TL - peak[:, None]) * setup.scale
    weight_TL = jnp.exp2(down_TL)
    # A lane that saw no valid id has peak -1e30 and weight 0; it must not become 0 * inf.
    weighted_TL = jnp.where(weight_TL > 0, weighted_TL + down_TL * sum_TL, 0)
    total = across(lax.psum, jnp.sum(weight_TL * sum_TL, axis=-1))
    weighted = across(lax.psum, jnp.sum(weight_TL * weighted_TL, axis=-1)) / LOG2E
    label = across(lax.pmax, label_TL.max(axis=-1))  # all others hold -1e30
    log_total = jnp.log(total)
    logprob = (label - peak) / setup.temperature - log_total
    return logprob, peak / setup.temperature + log_total, log_total - weighted / total


def _forward_call(
    setup: Setup, tokens: int, bounds_2: Array, labels_T1: Array, x_TD: Array, w: Array
) -> Any:
    """Grid: token blocks, then vocabulary blocks: each token block sees each weight block once."""
    T, D = x_TD.shape
    V, size = setup.vocab(w), setup.sizes.vocab
    row = lambda width: pl.BlockSpec((tokens, width), lambda t, v, _: (t, 0))  # noqa: E731
    return pl.pallas_call(
        functools.partial(_forward_kernel, setup=setup),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # Blocks past the last valid id are not even read.
            grid=(T // tokens, pl.cdiv(min(V, setup.valid_vocab), size)),
            in_specs=[row(1), row(D), weight_spec(setup, D, size, lambda t, v, _: v)],
            out_specs=[row(LANES)] * 4,
        ),
        out_shape=[like((T, LANES), jnp.float32, x_TD)] * 4,
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * T * D * V,
            bytes_accessed=T // tokens * w.size * w.dtype.itemsize
            + x_TD.size * x_TD.dtype.itemsize,
            transcendentals=T * V,
        ),
        interpret=setup.interpret,
        name="token_logprob_forward",
    )(bounds_2, labels_T1, x_TD, w)


def _forward_kernel(
    bounds,  # SMEM int32 [2]: first id of this shard, end of its valid ids
    labels,  # [tokens, 1]
    x,  # [tokens, D]
    w,  # [D, vocab], or [vocab, D] if transposed
    peak, total, weighted, label,  # outputs and accumulators, float32 [tokens, 128]
    *, setup: Setup,
):  # fmt: skip
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        peak[...] = jnp.full_like(peak, HIDDEN)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)
        label[...] = jnp.full_like(label, HIDDEN)

    size = setup.vocab(w)
    first = bounds[0] + step * size
    # Unrolled on purpose: the scheduler runs one slice's softmax under the next one's product.
    for rows in row_slices(x.shape[0]):
        x_rows = x[rows, :]
        logits = dot(x_rows, w[...].astype(x.dtype), 1, 1 if setup.transposed else 0)
        lane = first + lax.broadcasted_iota(jnp.int32, (x_rows.shape[0], LANES), 1)
        to_label, to_end = labels[rows, :] - lane, bounds[1] - lane
        # Masking always costs 1% (the matrix unit is the bottleneck); a second, unmasked copy
        # of the code would double the time to compile.
        chunks = [
            (at, jnp.where(to_end > at, logits[:, at : at + LANES], HIDDEN))
            for at in range(0, size, LANES)
        ]
        old_peak, old_total = peak[rows, :], total[rows, :]
        new_peak = functools.reduce(jnp.maximum, (c for _, c in chunks), old_peak)
        down = (old_peak - new_peak) * setup.scale
        keep = jnp.exp2(down)
        new_total, new_weighted = keep * old_total, keep * (weighted[rows, :] + down * old_total)
        new_label = label[rows, :]
        for at, chunk in chunks:
            down = (chunk - new_peak) * setup.scale
            weight = jnp.exp2(down)
            new_total += weight
            new_weighted += weight * down
            new_label = jnp.where(to_label == at, chunk, new_label)
        peak[rows, :], total[rows, :] = new_peak, new_total
        weighted[rows, :], label[rows, :] = new_weighted, new_label
