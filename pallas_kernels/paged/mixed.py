"""The mixed kernel: sequences with any number of new tokens; compute-bound.

Query blocks are cut at fixed places of the token axis, whatever the sequences; the kernel walks
a list of (query block, sequence) pairs, and for each pair the key blocks that its last query
can see. Rows of other sequences are masked; key blocks that every query of the block sees, the
great majority, do no mask work. The new keys and values are in the cache already (`write`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.paged.sizes import PagedSizes, entries, page_count
from pallas_kernels.paged.softmax import (
    accumulate,
    as_queries,
    finite_scales,
    first_rows,
    normalised,
    reset,
    scales_of,
)
from pallas_kernels.pages import Pages
from pallas_kernels.tiles import HIDDEN, LANES, dot, each


def _kernel(
    # prefetched scalars; an entry is one sequence within one query block
    seq_ref: Any,  # [E + 1]
    block_ref: Any,  # [E + 1]: the query block
    keys_ref: Any,  # [E + 1]: keys that the entry's last query sees
    base_ref: Any,  # [E + 1]: key blocks of the entries before
    rows_ref: Any,  # [B * P]
    kv_lens_ref: Any,  # [B]
    cu_ref: Any,  # [B + 1]
    # inputs
    q_ref: Any,  # [k * G, q, H]
    *refs: Any,  # the cache; out; scratch
    arrays: int,  # of the cache: 2 with scales
    table_width: int,  # P
    q_parts: int,  # pieces in which a query block is multiplied
) -> None:
    cache_refs, refs = refs[:arrays], refs[arrays:]  # [rows, 2, K, Z, H], [rows, 2, K, 1, Z]; HBM
    out_ref, *refs = refs  # [k * G, q, H]
    buffer_refs, refs = refs[:arrays], refs[arrays:]  # [2, pages, 2, k, Z, H], [.., 1, Z]
    m_ref, l_ref, acc_ref, sem = refs  # [k, G * q, 128], the same, [k, G * q, H]; [arrays, 2]
    _, pages, _, k_heads, Z, H = buffer_refs[0].shape
    q_size, G = q_ref.shape[1], q_ref.shape[0] // k_heads
    M, size = G * q_size, pages * Z
    e, entries = pl.program_id(1), pl.num_programs(1)
    heads = pl.ds(pl.program_id(0) * k_heads, k_heads)
    seq, q_block, base = seq_ref[e], block_ref[e], base_ref[e]
    blocks = pl.cdiv(keys_ref[e], size)

    def copies(row: Any, slot: Any, at: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(cache.at[row, :, heads], buffer.at[slot, at], sem.at[i, slot])
            for i, (cache, buffer) in enumerate(zip(cache_refs, buffer_refs, strict=True))
        ]

    def pages_of(entry: Any, c: Any) -> Any:
        return jnp.minimum(pages, pl.cdiv(keys_ref[entry], Z) - c * pages)

    def fetch(entry: Any, c: Any, slot: Any) -> None:
        first = seq_ref[entry] * table_width + c * pages

        @each(pages_of(entry, c))
        def _(i: Any) -> None:
            for copy in copies(rows_ref[first + i], slot, i):
                copy.start()

    def fetch_after(c: Any) -> None:
        """Starts the copies of the key block that follows, perhaps the next entry's first."""
        slot = lax.rem(base + c + 1, 2)
        pl.when(c + 1 < blocks)(lambda: fetch(e, c + 1, slot))
        pl.when((c + 1 >= blocks) & (e + 1 < entries))(lambda: fetch(e + 1, 0, slot))

    def wait(c: Any, slot: Any) -> None:
        @each(pages_of(e, c))
        def _(i: Any) -> None:
            for copy in copies(0, slot, i):
                copy.wait()

    # Query t of the token axis stands at position t + offset of its sequence.
    begin, end = cu_ref[seq], cu_ref[seq + 1]
    offset = kv_lens_ref[seq] - end
    t0 = q_block * q_size

    def limits() -> Array:
        """[M, 1]: the last key that each row sees; -1 for rows of other sequences."""
        row = lax.broadcasted_iota(jnp.int32, (M, 1), 0)
        t = t0 + (row & (q_size - 1))
        return jnp.where((t >= begin) & (t < end), t + offset, -1)

    def attend(c: Any, masked: bool) -> None:
        slot = lax.rem(base + c, 2)
        fetch_after(c)
        wait(c, slot)

        @each(k_heads)
        def _(k: Any) -> None:
            q = q_ref[pl.ds(k * G, G)].reshape(M, H)
            keys, values = (buffer_refs[0][slot, :, kind, k].reshape(size, H) for kind in (0, 1))
            k_scale, v_scale = (
                scales_of([buffer[slot, :, kind, k] for buffer in buffer_refs[1:]])
                for kind in (0, 1)
            )
            keys = as_queries(keys, q.dtype)
            if masked and v_scale is None:
                values = first_rows(values, keys_ref[e] - c * size)
            elif masked:
                v_scale = finite_scales(v_scale, keys_ref[e] - c * size)
            values = as_queries(values, q.dtype)
            if masked:
                last = limits() - c * size
            part = M // q_parts
            for at in range(0, M, part):
                s = dot(q[at : at + part], keys, 1, 1)
                s = s if k_scale is None else s * k_scale
                if masked:
                    column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
                    s = jnp.where(column <= last[at : at + part], s, HIDDEN)
                accumulate(s, values, m_ref, l_ref, acc_ref, (k, pl.ds(at, part)), v_scale)

    pl.when(e == 0)(lambda: fetch(0, 0, 0))
    pl.when((e == 0) | (block_ref[jnp.maximum(e - 1, 0)] != q_block))(
        lambda: reset(m_ref, l_ref, acc_ref)
    )
    pl.when(blocks == 0)(lambda: fetch_after(-1))
    # Blocks that every row of the query block sees to the end need no mask.
    alone = (begin <= t0) & (end >= t0 + q_size)
    full = jnp.where(alone, (t0 + offset + 1) // size, 0)
    full = jnp.clip(full, 0, blocks)  # an idle sequence would count below 0

    each(full)(functools.partial(attend, masked=False))
    each(full, blocks)(functools.partial(attend, masked=True))

    @pl.when((e + 1 == entries) | (block_ref[e + 1] != q_block))
    def _() -> None:
        @each(k_heads)
        def _(k: Any) -> None:
            out = normalised(l_ref, acc_ref, k).reshape(G, q_size, H)
            out_ref[pl.ds(k * G, G)] = out.astype(out_ref.dtype)


def attend(
    q_TNH: Array,
    pages: Pages,
    rows_BP: Array,
    kv_lens_B: Array,
    cu_B1: Array,
    active_B: Array,
    sizes: PagedSizes,
    interpret: Any,
) -> Array:
    """Paged attention of the active sequences; the rows of other tokens are unspecified."""
    _, _, K, Z, H = pages.data.shape
    B, P = rows_BP.shape
    T, N, _ = q_TNH.shape
    size, count_k = sizes.q_tokens, page_count(sizes.kv_tokens, Z)
    k_heads = K // sizes.head_split
    G, q_blocks = N // K, pl.cdiv(T, size)
    q_NTH = jnp.pad(q_TNH.swapaxes(0, 1), ((0, 0), (0, q_blocks * size - T), (0, 0)))

    begin_B, end_B = cu_B1[:-1], cu_B1[1:]
    first_B = begin_B // size
    blocks_B = jnp.where(active_B & (end_B > begin_B), (end_B - 1) // size - first_B + 1, 0)
    bound = q_blocks + min(B, T) + 1
    seq, index, count = entries(blocks_B, bound)
    block = first_B[seq] + index
    last = jnp.minimum(end_B[seq], (block + 1) * size)
    keys = jnp.maximum(kv_lens_B[seq] - end_B[seq] + last, 0)
    listed = jnp.arange(bound) < count
    # With nothing to do one entry is visited all the same: it writes zeros to block 0.
    block = jnp.where(listed, block, 0)
    keys = jnp.where(listed & (kv_lens_B[seq] > 0), keys, 0)
    base = jnp.cumsum(pl.cdiv(keys, count_k * Z), dtype=jnp.int32) - pl.cdiv(keys, count_k * Z)

    q_spec = pl.BlockSpec((k_heads * G, size, H), lambda c, e, seq, block, *_: (c, block[e], 0))
    out_NTH = pl.pallas_call(
        functools.partial(_kernel, arrays=len(pages.arrays), table_width=P, q_parts=sizes.q_parts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(sizes.head_split, jnp.maximum(count, 1)),
            in_specs=[q_spec, *(pl.BlockSpec(memory_space=pl.ANY) for _ in pages.arrays)],
            out_specs=q_spec,
            scratch_shapes=[
                *(
                    pltpu.VMEM((2, count_k, 2, k_heads, *x.shape[3:]), x.dtype)
                    for x in pages.arrays
                ),
                pltpu.VMEM((k_heads, G * size, LANES), jnp.float32),
                pltpu.VMEM((k_heads, G * size, LANES), jnp.float32),
                pltpu.VMEM((k_heads, G * size, H), jnp.float32),
                pltpu.SemaphoreType.DMA((len(pages.arrays), 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_NTH.shape, q_NTH.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=sizes.vmem_bytes,
        ),
        interpret=interpret,
        name="paged_mixed",
    )(seq, block, keys, base, rows_BP.reshape(-1), kv_lens_B, cu_B1, q_NTH, *pages.arrays)
    return out_NTH[:, :T].swapaxes(0, 1)
