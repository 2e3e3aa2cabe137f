"""Decoding: the leading sequences of at most one token, limited by memory traffic.

All pages of all sequences form one flat list that is cut into blocks of a few MB, so a DMA
block is always full, however short the sequences are, and `buffers` blocks are in flight,
across sequences. A sequence's last page passes through VMEM anyway: the new key and value are
patched into it there, and only the touched tile goes back to memory.
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

from pallas_kernels.paged.sizes import PagedSizes, page_count, tile_rows
from pallas_kernels.paged.softmax import accumulate, first_rows, normalised, reset
from pallas_kernels.tiles import HIDDEN, LANES, dot, each


def _kernel(
    # prefetched scalars
    rows_ref: Any,  # [B * P]
    kv_lens_ref: Any,  # [B]
    cu_ref: Any,  # [B + 1]
    starts_ref: Any,  # [B + 1]: where each sequence's pages begin in the flat list
    count_ref: Any,  # [1]: sequences
    # inputs
    q_ref: Any,  # [T, k, G, H] in VMEM
    new_ref: Any,  # [T, k, 2, H] in VMEM
    _: Any,
    # outputs
    out_ref: Any,  # [T, k, G, H] in VMEM
    data_ref: Any,  # [rows, 2, K, Z, H], the cache, aliased
    # scratch
    buffer_ref: Any,  # [buffers, pages + chunk, 2, k, Z, H]
    m_ref: Any,  # [k, G, 128]
    l_ref: Any,  # [k, G, 128]
    acc_ref: Any,  # [k, G, H]
    read_sem: Any,  # [buffers]
    write_sem: Any,  # [buffers]
    *,
    table_width: int,  # P
    pages: int,  # a DMA block
    chunk: int,  # pages multiplied together
    tails: tuple[int, ...],  # the sizes in which a sequence's last pages may be: up to chunk
    buffers: int,
    unroll: int,  # heads handled together, to hide the latency of one behind another
) -> None:
    _, k_heads, Z, H = buffer_ref.shape[2:]
    tile = tile_rows(data_ref.dtype)
    heads = pl.ds(pl.program_id(0) * k_heads, k_heads)
    total = starts_ref[count_ref[0]]
    blocks = pl.cdiv(total, pages)

    def read(row: Any, slot: Any, at: Any) -> Any:
        return pltpu.make_async_copy(
            data_ref.at[row, :, heads], buffer_ref.at[slot, at], read_sem.at[slot]
        )

    def write(row: Any, slot: Any, at: Any, offset: Any) -> Any:
        """The tile of a page that holds a new token, back to memory."""
        return pltpu.make_async_copy(
            buffer_ref.at[slot, at, :, :, pl.ds(offset, tile)],
            data_ref.at[row, :, heads, pl.ds(offset, tile)],
            write_sem.at[slot],
        )

    def walk(block: Any, first: Any, visit: Any, state: Any) -> Any:
        """visit(sequence, begin, end, state) for each run of pages in a block of the list."""
        low, high = block * pages, jnp.minimum((block + 1) * pages, total)

        def body(carry: Any) -> Any:
            seq, state = carry
            begin = jnp.maximum(starts_ref[seq], low)
            end = jnp.minimum(starts_ref[seq + 1], high)
            return seq + 1, visit(seq, begin, end, state)

        seq, state = lax.while_loop(lambda c: starts_ref[c[0]] < high, body, (first, state))
        # A sequence cut by the block's end is the first of the next block.
        return jnp.where(starts_ref[seq] > high, seq - 1, seq), state

    def fetch(block: Any, first: Any) -> Any:
        """Starts the copies of a block's pages; returns the next block's first sequence."""
        slot = lax.rem(block, buffers)

        def visit(seq: Any, begin: Any, end: Any, state: Any) -> Any:
            entry = seq * table_width - starts_ref[seq]

            @each(begin, end)
            def _(i: Any) -> None:
                read(rows_ref[entry + i], slot, i - block * pages).start()

            return state

        return walk(block, first, visit, 0)[0]

    def patch(seq: Any, slot: Any, at: Any) -> None:
        """Puts the new token of a sequence into its last page, in VMEM, and sends the tile."""
        position = kv_lens_ref[seq] - 1
        in_page = lax.rem(position, Z)
        offset = pl.multiple_of(in_page // tile * tile, tile)
        here = lax.broadcasted_iota(jnp.int32, (tile, H), 0) == in_page - offset
        token = cu_ref[seq]

        @each(k_heads)
        def _(k: Any) -> None:
            fresh = new_ref[token, k]  # [2, H]
            for kind in (0, 1):
                at_tile = (slot, at, kind, k, pl.ds(offset, tile))
                # float32: selects of packed types need packed masks, which v5e lacks.
                old = buffer_ref[at_tile].astype(jnp.float32)
                row = fresh[kind : kind + 1].astype(jnp.float32)
                new = jnp.where(here, jnp.broadcast_to(row, old.shape), old)
                buffer_ref[at_tile] = new.astype(buffer_ref.dtype)

        row = rows_ref[seq * table_width + position // Z]
        write(row, slot, at, offset).start()

    def attend(seq: Any, slot: Any, at: Any, valid: Any, count: int, masked: bool) -> None:
        """`count` pages from page `at` of the buffer, of which the first `valid` tokens count."""
        token, size = cu_ref[seq], count * Z

        @each(k_heads // unroll)
        def _(i: Any) -> None:
            for k in [i * unroll + j for j in range(unroll)]:
                keys = buffer_ref[slot, pl.ds(at, count), 0, k].reshape(size, H)
                values = buffer_ref[slot, pl.ds(at, count), 1, k].reshape(size, H)
                s = dot(q_ref[token, k], keys, 1, 1)
                if masked:
                    s = jnp.where(lax.broadcasted_iota(jnp.int32, s.shape, 1) < valid, s, HIDDEN)
                    values = first_rows(values, valid)
                accumulate(s, values, m_ref, l_ref, acc_ref, k)

    def compute(block: Any, first: Any) -> Any:
        """Returns the next block's first sequence and the number of tiles sent to memory."""
        slot, low = lax.rem(block, buffers), block * pages

        def visit(seq: Any, begin: Any, end: Any, sent: Any) -> Any:
            done = (end == starts_ref[seq + 1]) & (end > begin)

            @pl.when(begin == starts_ref[seq])
            def _() -> None:
                reset(m_ref, l_ref, acc_ref)

            @pl.when(done)
            def _() -> None:
                patch(seq, slot, end - 1 - low)

            # Tokens of this sequence from page `begin` to page `end`.
            position = (begin - starts_ref[seq]) * Z
            tokens = jnp.minimum(kv_lens_ref[seq] - position, (end - begin) * Z)

            @each(pl.cdiv(end - begin, chunk))
            def _(c: Any) -> None:
                at, valid = begin - low + c * chunk, tokens - c * chunk * Z
                full = valid >= chunk * Z
                pl.when(full)(lambda: attend(seq, slot, at, valid, chunk, masked=False))
                below = 0
                for count in tails:  # the smallest that holds what is left
                    fits = ~full & (valid > below) & ((valid <= count * Z) | (count == chunk))
                    pl.when(fits)(
                        functools.partial(attend, seq, slot, at, valid, count, masked=True)
                    )
                    below = count * Z

            @pl.when(done)
            def _() -> None:
                token = cu_ref[seq]

                @each(k_heads)
                def _(k: Any) -> None:
                    out_ref[token, k] = normalised(l_ref, acc_ref, k).astype(out_ref.dtype)

            return sent + done.astype(jnp.int32)

        return walk(block, first, visit, 0)

    def wait_reads(block: Any) -> None:
        slot = lax.rem(block, buffers)
        size = jnp.minimum(pages, total - block * pages)

        @each(size)
        def _(i: Any) -> None:
            read(0, slot, i).wait()

    def wait_writes(slot: Any, count: Any) -> None:
        @each(count)
        def _(i: Any) -> None:
            write(0, slot, 0, 0).wait()

    def start(block: Any, seq: Any) -> Any:
        return lax.cond(block < blocks, lambda: fetch(block, seq), lambda: seq)

    def step(block: Any, carry: Any) -> Any:
        ahead, here, sent = carry
        # The block before this one is computed: its buffer is free once its tiles are out.
        wait_writes(lax.rem(block + buffers - 1, buffers), sent)
        ahead = start(block + buffers - 1, ahead)
        wait_reads(block)
        here, sent = compute(block, here)
        return ahead, here, sent

    ahead = lax.fori_loop(0, buffers - 1, start, jnp.int32(0))
    out_ref[...] = jnp.zeros_like(out_ref)  # rows of idle slots and padding
    _, _, sent = lax.fori_loop(0, blocks, step, (ahead, jnp.int32(0), jnp.int32(0)))
    wait_writes(lax.rem(blocks + buffers - 1, buffers), sent)


def attend(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    data: Array,
    rows_BP: Array,
    kv_lens_B: Array,
    cu_B1: Array,
    count: Any,
    sizes: PagedSizes,
    interpret: Any,
) -> tuple[Array, Array]:
    """The first `count` sequences: at most one token each, so the first min(B, T) tokens."""
    _, _, K, Z, H = data.shape
    B, P = rows_BP.shape
    T, N = min(B, q_TNH.shape[0]), q_TNH.shape[1]
    G = N // K
    rows = pl.cdiv(G, 8) * 8
    q = q_TNH[:T].reshape(T, K, G, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    new = jnp.stack([k_TKH[:T], v_TKH[:T]], 2)  # [T, K, 2, H]
    active = (cu_B1[1:] > cu_B1[:-1]) & (jnp.arange(B) < count)
    used = jnp.where(active, pl.cdiv(kv_lens_B, Z), 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(used, dtype=jnp.int32)])
    k_heads = K // sizes.head_split
    page_bytes = 2 * k_heads * Z * H * data.dtype.itemsize
    pages = max(1, sizes.decode_block_bytes // page_bytes)
    chunk = min(pages, page_count(sizes.decode_chunk_rows // k_heads, Z))
    parts = (page_count(max(1, chunk * Z // n), Z) for n in (4, 2, 1))
    tails = tuple(sorted({part for part in parts if part < chunk} | {chunk}))
    unroll = next(u for u in (4, 2, 1) if k_heads % u == 0)
    body = functools.partial(
        _kernel,
        table_width=P,
        pages=pages,
        chunk=chunk,
        tails=tails,
        buffers=sizes.decode_buffers,
        unroll=unroll,
    )
    by_head = lambda c, *_: (0, c, 0, 0)  # noqa: E731
    out, data = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(sizes.head_split,),
            in_specs=[
                pl.BlockSpec((T, k_heads, rows, H), by_head),
                pl.BlockSpec((T, k_heads, 2, H), by_head),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((T, k_heads, rows, H), by_head),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            scratch_shapes=[
                pltpu.VMEM((sizes.decode_buffers, pages + chunk - 1, 2, k_heads, Z, H), data.dtype),
                pltpu.VMEM((k_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((k_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((k_heads, rows, H), jnp.float32),
                pltpu.SemaphoreType.DMA((sizes.decode_buffers,)),
                pltpu.SemaphoreType.DMA((sizes.decode_buffers,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((T, K, rows, H), q_TNH.dtype),
            jax.ShapeDtypeStruct(data.shape, data.dtype),
        ],
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            vmem_limit_bytes=sizes.vmem_bytes,
        ),
        interpret=interpret,
        name="paged_decode",
    )(rows_BP.reshape(-1), kv_lens_B, cu_B1, starts, jnp.reshape(count, (1,)), q, new, data)
    return out[:, :, :G].reshape(T, N, H), data
