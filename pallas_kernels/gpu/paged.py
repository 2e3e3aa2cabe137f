"""Decoding's paged attention on GPUs: pages are read where they lie, by many programs a context.

One program meets some of a context's cached tokens, for the queries of one kv head; a context is
cut into `splits` parts, since a few slots alone would leave most of a GPU idle. The parts'
softmaxes are merged by their logsumexps, as the caller merges private and shared parts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.tiles import State, nothing_yet, online, power_of_two, whole
from pallas_kernels.pages import Pages
from pallas_kernels.tiles import HIDDEN, LN2, LOG2E, dot

# A program meets so many bytes of keys at once, and of values: two blocks of each under way, beside
# the queries, fit the 99 KiB of shared memory that the smallest processors have.
_BLOCK = 2**14
_QUERIES = 64, 2**15  # of a kv head, that a program serves: at most so many, and so many bytes
_PROGRAMS = 512  # a few for each of a GPU's some hundred processors
_PART = 256  # tokens: below that a context is not cut


def attend_to_pages(
    pages: Pages,
    layer: Int[Array, ""],
    q_RMNH: Float[Array, "R M N H"],
    table_RP: Int[Array, "R P"],
    lens_R: Int[Array, " R"],
    first_RM: Int[Array, "R M"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "R M N H"], Float[Array, "R M N"]]:
    """M queries a row against its first `lens_R` tokens; (0, -1e30) where there are none.

    With `first_RM` a query sees no token before that one. The head size of the cache is a power of
    two of at least 16 (`dispatch.cache_head_size`). Returns float32.
    """
    (R, M, N, H), P, (rows, _, K, Z, C) = q_RMNH.shape, table_RP.shape[1], pages.data.shape
    if not P:
        return jnp.zeros(q_RMNH.shape, jnp.float32), jnp.full((R, M, N), HIDDEN, jnp.float32)
    group = N // K
    dtype = q_RMNH.dtype
    if pages.scales is None:
        dtype = jnp.promote_types(dtype, pages.data.dtype)
    row_bytes = C * jnp.dtype(dtype).itemsize
    queries = min(power_of_two(M * group), _QUERIES[0], _QUERIES[1] // row_bytes)
    blocks = pl.cdiv(M * group, queries)
    splits = min(max(1, _PROGRAMS // (R * K * blocks)), pl.cdiv(P * Z, _PART))
    # All queries of a kv head are one matrix: [R, K, M * G, H].
    q = q_RMNH.reshape(R, M, K, group, H).transpose(0, 2, 1, 3, 4).reshape(R, K, M * group, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, blocks * queries - M * group), (0, C - H)))
    q = q.astype(dtype)
    windows, window_specs = [], []
    if first_RM is not None:
        first = jnp.repeat(first_RM, group, axis=1).astype(jnp.int32)
        windows = [jnp.pad(first, ((0, 0), (0, blocks * queries - M * group)), "edge")]
        window_specs = [pl.BlockSpec((None, queries), lambda r, x, s: (r, x % blocks))]
    tokens = rows * 2 * K * Z
    cached = [
        x.reshape(shape) for x, shape in zip(pages.arrays, ((tokens, C), tokens), strict=False)
    ]
    of_queries = lambda r, x, s: (r, x // blocks, x % blocks, 0)  # noqa: E731
    row_number = (layer * pages.pages_per_layer).astype(jnp.int32).reshape(1)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            blocks=blocks,
            heads=K,
            page=Z,
            splits=splits,
            size=max(16, _BLOCK // row_bytes),
            scale=H**-0.5,
            windowed=first_RM is not None,
        ),
        grid=(R, K * blocks, splits),
        in_specs=[
            whole(row_number),
            pl.BlockSpec((None, P), lambda r, x, s: (r, 0)),
            whole(lens_R),
            pl.BlockSpec((None, None, queries, C), of_queries),
            *window_specs,
            *map(whole, cached),
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, queries, C),
                lambda r, x, s: (s, r, x // blocks, x % blocks, 0),
            ),
            pl.BlockSpec(
                (None, None, None, queries), lambda r, x, s: (s, r, x // blocks, x % blocks)
            ),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((splits, *q.shape[:3]), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(row_number, table_RP, lens_R.astype(jnp.int32), q, *windows, *cached)

    peak = lse.max(axis=0)
    weights = jnp.exp(lse - peak)  # of parts without a token beside others: exp(-1e30) is 0
    total = weights.sum(axis=0)
    out = (out * (weights / total)[..., None]).sum(axis=0)

    def by_member(x: Array) -> Array:
        x = x[:, :, : M * group].reshape(R, K, M, group, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(R, M, N, -1)

    lse = jnp.maximum(peak + jnp.log(total), HIDDEN)
    return by_member(out)[..., :H], by_member(lse)[..., 0]


def _kernel(
    row_number_ref, table_ref, lens_ref, q_ref, *refs,
    blocks: int, heads: int, page: int, splits: int, size: int, scale: float, windowed: bool,
):  # fmt: skip
    first_refs, refs = refs[:windowed], refs[windowed:]
    data_ref, *scales_ref, out_ref, lse_ref = refs
    row, head, split = pl.program_id(0), pl.program_id(1) // blocks, pl.program_id(2)
    length, q = lens_ref[row], q_ref[...]
    begin = 0
    first = first_refs[0][...] if windowed else None
    if windowed:
        begin = jnp.maximum(jnp.min(first), 0) // size
    share = pl.cdiv(pl.cdiv(length, size) - begin, splits)
    begin = begin + split * share
    end = jnp.minimum(begin + share, pl.cdiv(length, size))

    def cached(place: Array, kind: int, written: Array) -> Array:
        """Keys or values [tokens, H] in q's dtype, zeros where nothing was written."""
        at = place + kind * heads * page
        x = data_ref[at, :]
        if scales_ref:
            x = x.astype(jnp.float32) * scales_ref[0][at][:, None]
        # What was never written may be anything, NaN included: 0 * NaN must not spread.
        return jnp.where(written[:, None], x, 0).astype(q.dtype)

    def step(i: Array, state: State) -> State:
        at = i * size + jnp.arange(size, dtype=jnp.int32)
        written = at < length
        pages = table_ref[jnp.minimum(at // page, table_ref.shape[0] - 1)]
        place = ((row_number_ref[0] + pages) * (2 * heads) + head) * page + at % page
        scores = dot(q, cached(place, 0, written), 1, 1) * (scale * LOG2E)
        visible = jnp.broadcast_to(written[None, :], scores.shape)
        if windowed:
            visible &= at[None, :] >= first[:, None]
        return online(jnp.where(visible, scores, HIDDEN), cached(place, 1, written), state)

    peak, total, acc = jax.lax.fori_loop(begin, end, step, nothing_yet(*q.shape))
    seen = peak > HIDDEN  # of a query that saw nothing here the rest is nonsense
    total = jnp.where(seen, total, 1)
    out_ref[...] = jnp.where(seen[:, None], acc / total[:, None], 0)
    lse_ref[...] = jnp.where(seen, (peak + jnp.log2(total)) * LN2, HIDDEN)
