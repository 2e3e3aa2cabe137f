"""The calls of paged attention: checks, operands, and which kernel takes which sequence.

`paged_attention` decodes, over `PageTables`. `ragged_paged_attention` takes any mix: `decode` has
the leading sequences, `write` and then `mixed` the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.interpret import Interpret, interpret_mode
from pallas_kernels.paged import decode, mixed, runs, write
from pallas_kernels.paged.sizes import PagedSizes, check_sizes, default_sizes
from pallas_kernels.pages import CACHE_DTYPES, Pages, PageTables, quantised
from pallas_kernels.tiles import LANES, LOG2E


def check_arguments(
    q_TNH: Any,
    k_TKH: Any,
    v_TKH: Any,
    pages: Pages,
    rows_BP: Any,
    kv_lens_B: Any,
    cu_q_lens_B1: Any,
) -> None:
    """Raises ValueError, with both numbers, where shapes or dtypes do not fit each other."""
    data = pages.data
    if q_TNH.ndim != 3 or data.ndim != 5 or rows_BP.ndim != 2:
        raise ValueError(
            f"q has {q_TNH.ndim} axes, the cache {data.ndim} and the page table {rows_BP.ndim}; "
            "they need 3 (T, N, H), 5 (rows, 2, K, Z, H) and 2 (B, P)"
        )
    (T, N, H), (_, kinds, K, _, cache_H) = q_TNH.shape, data.shape
    B = rows_BP.shape[0]
    if kinds != 2:
        raise ValueError(f"axis 1 of the cache has size {kinds}; keys and values make it 2")
    if N % K:
        raise ValueError(f"{N} query heads cannot be split over {K} kv heads")
    if not (H == cache_H or H < cache_H == LANES):
        raise ValueError(f"queries have head size {H}, the cache has {cache_H}")
    for name, x in (("k", k_TKH), ("v", v_TKH)):
        if x.shape != (T, K, H):
            raise ValueError(
                f"{name} has shape {x.shape}; queries and cache make it {(T, K, H)} (T, K, H)"
            )
    if kv_lens_B.shape != (B,):
        raise ValueError(f"kv_lens has shape {kv_lens_B.shape}; the page table has {B} rows")
    if cu_q_lens_B1.shape != (B + 1,):
        raise ValueError(
            f"cu_q_lens has shape {cu_q_lens_B1.shape}; a page table of {B} rows needs {(B + 1,)}"
        )
    for name, x in (("the page table", rows_BP), ("kv_lens", kv_lens_B), ("cu", cu_q_lens_B1)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{name} is {x.dtype}; scalars must be int32")
    if str(jnp.dtype(data.dtype)) not in CACHE_DTYPES:
        raise ValueError(f"the cache is {data.dtype}; it must be one of {', '.join(CACHE_DTYPES)}")
    want = (*data.shape[:3], 1, data.shape[3]) if quantised(data.dtype) else None
    found = None if pages.scales is None else pages.scales.shape
    if found != want:
        raise ValueError(f"a cache of {data.dtype} {data.shape} has scales {found}; make it {want}")


def _split(distribution_3: Any, sequences: int) -> tuple[Any, Any, bool, bool]:
    """(decode sequences, all sequences, may there be decode, may there be mixed)."""
    if distribution_3 is None:
        return 0, sequences, False, True
    if isinstance(distribution_3, Sequence | np.ndarray):
        decode, _, end = (int(x) for x in distribution_3)
        if not 0 <= decode <= end <= sequences:
            raise ValueError(
                f"{decode} decode sequences of {end} in all do not fit a table of {sequences}"
            )
        return decode, end, decode > 0, end > decode
    if distribution_3.shape != (3,):
        raise ValueError(f"distribution has shape {distribution_3.shape}; it needs (3,)")
    return distribution_3[0], distribution_3[2], True, True


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    pages: Pages,
    rows_BP: Int[Array, "B P"],
    kv_lens_B: Int[Array, " B"],
    cu_q_lens_B1: Int[Array, " B+1"],
    distribution_3: Any = None,
    *,
    sizes: PagedSizes | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "T N H"], Pages]:
    """Ragged paged attention: writes new keys and values of B sequences into the cache, attends.

    Sequence b owns queries cu_q_lens[b] .. cu_q_lens[b + 1]; they are the last tokens of its
    context of kv_lens[b] tokens, and each sees the context up to and including itself. Queries
    past cu_q_lens[B] are padding: output 0, nothing written. A sequence without queries does
    nothing. One with queries and kv_len 0 (an idle slot) writes nothing and outputs 0.

    Args:
      q_TNH: float32 or bfloat16.
      k_TKH, v_TKH: the new keys and values, rounded to the cache's dtype.
      pages: the cache; aliased to the second output, so donate it. Unwritten slots may hold
        anything, NaN included; bytes outside the new slots are left as they are.
        Its head size is H, or 128 for smaller heads, whose other lanes must be zeros: memory
        has lanes of 128 anyway, and XLA, which packs narrower arrays, would otherwise copy the
        whole cache into and out of the padded layout.
      rows_BP: int32, the rows of `pages.data` that hold each context, in order; a row may appear in
        several sequences as long as none of them writes to it. Entries past a context's end are
        not read.
      kv_lens_B: int32, tokens of each context, new ones included: 0, or at least the q length.
      cu_q_lens_B1: int32, nondecreasing, from 0 to at most T.
      distribution_3: (decode, prefill, all), cumulative counts of sequences, as in
        tpu-inference: the first `decode` sequences have at most one query and take the decode
        kernel; those up to `all` take the mixed kernel (the middle number is not used); the
        rest are ignored. Python numbers compile only what they need; an int32 array compiles
        both kernels. None: all sequences are mixed.
      sizes: block sizes; default by chip.
      interpret: run under `pltpu.InterpretParams()`, on CPU; an InterpretParams is used as is.
    Returns:
      (out_TNH, pages): out in q's dtype. The softmax is float32; scores of a float32 cache are
      exact float32 products, of a bfloat16 one bfloat16 products summed in float32, with the
      scale folded into q beforehand. Products with an int8 cache are of q's dtype.
    Raises:
      ValueError: shapes, head counts, dtypes or block sizes do not fit each other, pages that
        do not tile, or a page table too large for scalar memory.
    """
    check_arguments(q_TNH, k_TKH, v_TKH, pages, rows_BP, kv_lens_B, cu_q_lens_B1)
    (T, N, H), K, B = q_TNH.shape, k_TKH.shape[1], rows_BP.shape[0]
    sizes = default_sizes(N, K, H, pages.data.dtype) if sizes is None else sizes
    check_sizes(sizes, pages.data, rows_BP.size)
    decoding, end, has_decode, has_mixed = _split(distribution_3, B)
    mode = interpret_mode(interpret)

    q, new = _operands(q_TNH, k_TKH, v_TKH, pages)
    cu = cu_q_lens_B1
    t, order = jnp.arange(T)[:, None, None], jnp.arange(B)
    out = jnp.zeros(q.shape, q.dtype)
    with jax.named_scope("ragged_paged_attention"):
        if has_decode:
            some = min(B, T)  # at most one query each
            active = (cu[1:] > cu[:-1]) & (order < decoding)
            token_B = jnp.clip(cu[:-1], 0, some - 1)
            tables = PageTables.apart(rows_BP)
            listed = runs.list_runs(0, tables, kv_lens_B, active, token_B, pages.page_size)
            first, pages = decode.attend(
                q[:some], tuple(x[:some] for x in new), pages, listed, token_B[:, None], False,
                sizes, mode,
            )  # fmt: skip
            out = jnp.pad(first, ((0, T - some), (0, 0), (0, 0)))
        if has_mixed:
            active = (order >= decoding) & (order < end)
            pages = write.write(new, pages, rows_BP, kv_lens_B, cu, active, sizes, mode)
            others = mixed.attend(q, pages, rows_BP, kv_lens_B, cu, active, sizes, mode)
            inside = (t >= cu[decoding]) & (t < cu[end])
            out = jnp.where(inside, others, out)
    return out[:, :, :H].astype(q_TNH.dtype), pages


def paged_attention(
    q_BNH: Float[Array, "B N H"],
    k_BKH: Float[Array, "B K H"],
    v_BKH: Float[Array, "B K H"],
    pages: Pages,
    layer: Int[Array, ""],
    tables: PageTables,
    kv_lens_B: Int[Array, " B"],
    *,
    sizes: PagedSizes | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "B N H"], Pages]:
    """The decode step of `pallas_kernels.paged_attention`, reading shared pages once a row.

    `sizes` and `interpret` as in `ragged_paged_attention`; it raises the same.
    """
    B, N, H = q_BNH.shape
    starts = jax.ShapeDtypeStruct((B + 1,), jnp.int32)
    check_arguments(q_BNH, k_BKH, v_BKH, pages, tables.private_BQ, kv_lens_B, starts)
    sizes = default_sizes(N, k_BKH.shape[1], H, pages.data.dtype) if sizes is None else sizes
    check_sizes(sizes, pages.data, tables.shared_RP.size + tables.private_BQ.size)
    q, new = _operands(q_BNH, k_BKH, v_BKH, pages)
    first_row = layer * pages.pages_per_layer
    order = jnp.arange(B, dtype=jnp.int32)
    with jax.named_scope("paged_attention"):
        listed = runs.list_runs(first_row, tables, kv_lens_B, kv_lens_B > 0, order, pages.page_size)
        out, pages = decode.attend(
            q, new, pages, listed, tables.members_RM, tables.shared_RP.shape[1] > 0, sizes,
            interpret_mode(interpret),
        )  # fmt: skip
    return out[:, :, :H].astype(q_BNH.dtype), pages


def _operands(
    q_TNH: Array, k_TKH: Array, v_TKH: Array, pages: Pages
) -> tuple[Array, tuple[Array, ...]]:
    """Queries, scaled, as wide as the cache; new entries [T, K, 2, C] and perhaps [T, K, 2]."""
    H = q_TNH.shape[2]
    dtype = q_TNH.dtype if pages.scales is not None else pages.data.dtype
    q = (q_TNH.astype(jnp.float32) * (H**-0.5 * LOG2E)).astype(dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pages.data.shape[4] - H)))
    return q, pages.entries(jnp.stack([k_TKH, v_TKH], 2))
