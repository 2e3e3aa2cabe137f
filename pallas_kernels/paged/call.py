"""The call: checks, queries and tokens as the kernels want them, and who takes which sequence.

`decode` takes the leading sequences, `write` and then `mixed` the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.interpret import Interpret, interpret_mode
from pallas_kernels.paged import decode, mixed, write
from pallas_kernels.paged.sizes import PagedSizes, check_sizes, default_sizes
from pallas_kernels.tiles import LANES, LOG2E


def check_arguments(
    q_TNH: Any,
    k_TKH: Any,
    v_TKH: Any,
    data: Any,
    rows_BP: Any,
    kv_lens_B: Any,
    cu_q_lens_B1: Any,
) -> None:
    """Raises ValueError, with both numbers, where shapes or dtypes do not fit each other."""
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
    if jnp.dtype(data.dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"the cache is {data.dtype}; it must be float32 or bfloat16")


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
    data: Float[Array, "rows 2 K Z C"],
    rows_BP: Int[Array, "B P"],
    kv_lens_B: Int[Array, " B"],
    cu_q_lens_B1: Int[Array, " B+1"],
    distribution_3: Any = None,
    *,
    scale: float | None = None,
    sizes: PagedSizes | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "rows 2 K Z C"]]:
    """Writes the new keys and values of B sequences into the cache, then attends.

    Sequence b owns queries cu_q_lens[b] .. cu_q_lens[b + 1]; they are the last tokens of its
    context of kv_lens[b] tokens, and each sees the context up to and including itself. Queries
    past cu_q_lens[B] are padding: output 0, nothing written. A sequence without queries does
    nothing. One with queries and kv_len 0 (an idle slot) writes nothing and outputs 0.

    Args:
      q_TNH: float32 or bfloat16.
      k_TKH, v_TKH: the new keys and values, rounded to the cache's dtype.
      data: the cache, float32 or bfloat16; aliased to the second output, so donate it. Unwritten
        slots may hold anything, NaN included; bytes outside the new slots are left as they are.
        Its head size is H, or 128 for smaller heads, whose other lanes must be zeros: memory
        has lanes of 128 anyway, and XLA, which packs narrower arrays, would otherwise copy the
        whole cache into and out of the padded layout.
      rows_BP: int32, the rows of `data` that hold each context, in order; a row may appear in
        several sequences as long as none of them writes to it. Entries past a context's end are
        not read.
      kv_lens_B: int32, tokens of each context, new ones included: 0, or at least the q length.
      cu_q_lens_B1: int32, nondecreasing, from 0 to at most T.
      distribution_3: (decode, prefill, all), cumulative counts of sequences, as in
        tpu-inference: the first `decode` sequences have at most one query and take the decode
        kernel; those up to `all` take the mixed kernel (the middle number is not used); the
        rest are ignored. Python numbers compile only what they need; an int32 array compiles
        both kernels. None: all sequences are mixed.
      scale: of the scores; default H ** -0.5.
      sizes: block sizes; default by chip.
      interpret: run under `pltpu.InterpretParams()`, on CPU; an InterpretParams is used as is.
    Returns:
      (out_TNH, data): out in q's dtype. The softmax is float32; scores of a float32 cache are
      exact float32 products, of a bfloat16 one bfloat16 products summed in float32, with the
      scale folded into q beforehand.
    Raises:
      ValueError: shapes, head counts, dtypes or block sizes do not fit each other, pages that
        do not tile, or a page table too large for scalar memory.
    """
    check_arguments(q_TNH, k_TKH, v_TKH, data, rows_BP, kv_lens_B, cu_q_lens_B1)
    (T, N, H), K = q_TNH.shape, data.shape[2]
    sizes = default_sizes(N, K, H, data.dtype) if sizes is None else sizes
    check_sizes(sizes, data, rows_BP)
    decoding, end, has_decode, has_mixed = _split(distribution_3, rows_BP.shape[0])
    mode = interpret_mode(interpret)
    scale = H**-0.5 if scale is None else scale

    lanes = ((0, 0), (0, 0), (0, data.shape[4] - H))
    q = jnp.pad((q_TNH.astype(jnp.float32) * (scale * LOG2E)).astype(data.dtype), lanes)
    k, v = (jnp.pad(x.astype(data.dtype), lanes) for x in (k_TKH, v_TKH))
    tables = (rows_BP, kv_lens_B, cu_q_lens_B1)
    t = jnp.arange(T)[:, None, None]
    out = jnp.zeros(q.shape, q.dtype)
    with jax.named_scope("ragged_paged_attention"):
        if has_decode:
            out, data = decode.attend(q, k, v, data, *tables, decoding, sizes, mode)
            out = jnp.pad(out, ((0, T - out.shape[0]), (0, 0), (0, 0)))
        if has_mixed:
            order = jnp.arange(rows_BP.shape[0])
            active = (order >= decoding) & (order < end)
            data = write.write(k, v, data, *tables, active, sizes, mode)
            others = mixed.attend(q, data, *tables, active, sizes, mode)
            inside = (t >= cu_q_lens_B1[decoding]) & (t < cu_q_lens_B1[end])
            out = jnp.where(inside, others, out)
    return out[:, :, :H].astype(q_TNH.dtype), data
