"""Ragged paged attention on TPU: decode, prefill over cached pages, and both in one call.

The engine hands over the tokens of B sequences laid end to end, and a cache cut into pages
(`pages`). Three Pallas kernels do the work; `reference` has their plain-jnp twin.

Decode (`_decode_kernel`), the leading sequences of at most one token, is limited by memory
traffic. All pages of all sequences form one flat list that is cut into blocks of a few MB, so
a DMA block is always full, however short the sequences are, and `buffers` blocks are in
flight, across sequences. A sequence's last page passes through VMEM anyway: the new key and
value are patched into it there, and only the touched tile goes back to memory.

Mixed (`_mixed_kernel`), all other sequences, is limited by the matrix units. Query blocks
are cut at fixed places of the token axis, whatever the sequences; the kernel walks a list of
(query block, sequence) pairs, and for each pair the key blocks that its last query can see.
Rows of other sequences are masked; key blocks that every query of the block sees, the great
majority, do no mask work. Its new keys and values are written before it by `_write_kernel`, page
by page (read, shift, select, write: DMAs need tiles of 16 rows, new tokens begin anywhere).
An XLA scatter would do the same, but as one small read-modify-write a token, one after the
other; whole pages cost 4 page transfers each, pipelined (an estimate at 8,192 tokens on v5e:
0.1 ms, where attention among them takes 3 ms).

Every head of a page is a plain tile, so nothing here needs `ref.reshape` or `ref.bitcast`,
and all of it runs under `pltpu.InterpretParams`, race detection included.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tuning
from pallas_kernels.tiles import LANES, LOG2E, Interpret, dot, interpret_mode, wide

# A running maximum starts far above a masked score and far below a real one: a query that has
# seen no key yet then gives masked keys the weight exp2(_MASK - _START) = 0, not exp2(0) = 1.
_START, _MASK = -1e20, -1e30
_MIB = 2**20
_SMEM_BYTES = _MIB * 15 // 16  # v5e .. tpu7x have 1 MiB of scalar memory a core


@dataclasses.dataclass(frozen=True)
class PagedSizes:
    """Block sizes of `ragged_paged_attention`; heads are those of one core."""

    q_tokens: int  # mixed: queries a block; a power of two, a multiple of 16
    q_parts: int  # mixed: pieces it is multiplied in, so that one's softmax hides another's
    kv_tokens: int  # mixed: keys a block, fetched and multiplied together
    decode_block_bytes: int  # decode: a DMA block, keys and values of all heads
    decode_chunk_rows: int  # decode: keys times heads multiplied together
    decode_buffers: int  # decode: DMA blocks held at once
    head_split: int  # 2 where a chip's two cores share one program (v5p), else 1
    vmem_bytes: int  # limit given to the compiler


def default_sizes(q_heads: int, kv_heads: int, head_size: int, dtype: Any) -> PagedSizes:
    """Returns the sizes for the chip that is compiled for, fitted to the heads.

    The figures in the table were chosen at 28/4 and 32/4 heads of 128 in bfloat16. Other ratios
    get as many queries a block as give a kv head about 1,024 rows, within 8,192 rows for all
    heads; a key block stays within 4 MiB.
    """
    sizes = PagedSizes(**tuning.paged_blocks())
    split = sizes.head_split if kv_heads % sizes.head_split == 0 else 1
    q_tokens = 16
    while 2 * q_tokens <= min(1024 * kv_heads // q_heads, 8192 * split // q_heads):
        q_tokens *= 2
    token_bytes = 2 * kv_heads // split * max(head_size, LANES) * jnp.dtype(dtype).itemsize
    kv_tokens = min(sizes.kv_tokens, max(LANES, 4 * _MIB // token_bytes // LANES * LANES))
    return dataclasses.replace(
        sizes,
        q_tokens=q_tokens,
        q_parts=min(sizes.q_parts, q_tokens // 16),
        kv_tokens=kv_tokens,
        head_split=split,
    )


def _ceil(a: Any, b: int) -> Any:
    return (a + b - 1) // b


def _page_count(tokens: int, page_size: int) -> int:
    """Pages that hold about `tokens` tokens: at most one lane tile or a multiple of it, else 1."""
    unit = math.lcm(page_size, LANES)
    if tokens >= unit:
        return tokens // unit * unit // page_size
    return max(1, min(tokens, LANES) // page_size)


def _tile_rows(dtype: Any) -> int:
    """Rows of a tile: what a DMA into the middle of a page must be a multiple of."""
    return 32 // jnp.dtype(dtype).itemsize


def _online(s: Array, v: Array, m_ref: Any, l_ref: Any, acc_ref: Any, at: Any) -> None:
    """One step of the online softmax, base 2: scores s [M, C] against values v [C, H]."""
    m_old = m_ref[at]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - wide(m_new, s.shape[1]))
    keep = jnp.exp2(m_old - m_new)
    l_ref[at] = keep * l_ref[at] + p.sum(axis=1, keepdims=True)
    m_ref[at] = m_new
    pv = dot(p.astype(v.dtype), v, 1, 0)
    acc_ref[at] = wide(keep, pv.shape[1]) * acc_ref[at] + pv


def _reset(m_ref: Any, l_ref: Any, acc_ref: Any) -> None:
    m_ref[...] = jnp.full_like(m_ref, _START)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def _normalised(l_ref: Any, acc_ref: Any, at: Any) -> Array:
    """acc / l; 0 for a query that saw no key (its acc is 0)."""
    total = l_ref[at]
    inverse = 1 / jnp.where(total == 0, 1, total)
    acc = acc_ref[at]
    return acc * wide(inverse, acc.shape[1])


# ---------------------------------------------------------------- decode


def _decode_kernel(
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
    tile = _tile_rows(data_ref.dtype)
    heads = pl.ds(pl.program_id(0) * k_heads, k_heads)
    total = starts_ref[count_ref[0]]
    blocks = _ceil(total, pages)

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

            def start(i: Any, _: Any) -> Any:
                read(rows_ref[entry + i], slot, i - block * pages).start()
                return _

            return lax.fori_loop(begin, end, start, state)

        return walk(block, first, visit, 0)[0]

    def patch(seq: Any, slot: Any, at: Any) -> None:
        """Puts the new token of a sequence into its last page, in VMEM, and sends the tile."""
        position = kv_lens_ref[seq] - 1
        in_page = lax.rem(position, Z)
        offset = pl.multiple_of(in_page // tile * tile, tile)
        here = lax.broadcasted_iota(jnp.int32, (tile, H), 0) == in_page - offset
        token = cu_ref[seq]

        def one(k: Any, _: Any) -> Any:
            fresh = new_ref[token, k]  # [2, H]
            for kind in (0, 1):
                at_tile = (slot, at, kind, k, pl.ds(offset, tile))
                # float32: selects of packed types need packed masks, which v5e lacks.
                old = buffer_ref[at_tile].astype(jnp.float32)
                row = fresh[kind : kind + 1].astype(jnp.float32)
                new = jnp.where(here, jnp.broadcast_to(row, old.shape), old)
                buffer_ref[at_tile] = new.astype(buffer_ref.dtype)
            return _

        lax.fori_loop(0, k_heads, one, 0)
        row = rows_ref[seq * table_width + position // Z]
        write(row, slot, at, offset).start()

    def attend(seq: Any, slot: Any, at: Any, valid: Any, count: int, masked: bool) -> None:
        """`count` pages from page `at` of the buffer, of which the first `valid` tokens count."""
        token, size = cu_ref[seq], count * Z

        def some_heads(i: Any, _: Any) -> Any:
            for k in [i * unroll + j for j in range(unroll)]:
                keys = buffer_ref[slot, pl.ds(at, count), 0, k].reshape(size, H)
                values = buffer_ref[slot, pl.ds(at, count), 1, k].reshape(size, H)
                s = dot(q_ref[token, k], keys, 1, 1)
                if masked:
                    s = jnp.where(lax.broadcasted_iota(jnp.int32, s.shape, 1) < valid, s, _MASK)
                    # Slots past the length may hold NaN, and 0 * NaN would spread.
                    ok = lax.broadcasted_iota(jnp.int32, values.shape, 0) < valid
                    values = jnp.where(ok, values.astype(jnp.float32), 0).astype(values.dtype)
                _online(s, values, m_ref, l_ref, acc_ref, k)
            return _

        lax.fori_loop(0, k_heads // unroll, some_heads, 0)

    def compute(block: Any, first: Any) -> Any:
        """Returns the next block's first sequence and the number of tiles sent to memory."""
        slot, low = lax.rem(block, buffers), block * pages

        def visit(seq: Any, begin: Any, end: Any, sent: Any) -> Any:
            done = (end == starts_ref[seq + 1]) & (end > begin)

            @pl.when(begin == starts_ref[seq])
            def _() -> None:
                _reset(m_ref, l_ref, acc_ref)

            @pl.when(done)
            def _() -> None:
                patch(seq, slot, end - 1 - low)

            # Tokens of this sequence from page `begin` to page `end`.
            position = (begin - starts_ref[seq]) * Z
            tokens = jnp.minimum(kv_lens_ref[seq] - position, (end - begin) * Z)

            def one(c: Any, _: Any) -> Any:
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
                return _

            lax.fori_loop(0, _ceil(end - begin, chunk), one, 0)

            @pl.when(done)
            def _() -> None:
                token = cu_ref[seq]

                def store(k: Any, _: Any) -> Any:
                    out_ref[token, k] = _normalised(l_ref, acc_ref, k).astype(out_ref.dtype)
                    return _

                lax.fori_loop(0, k_heads, store, 0)

            return sent + done.astype(jnp.int32)

        return walk(block, first, visit, 0)

    def wait_reads(block: Any) -> None:
        slot = lax.rem(block, buffers)
        size = jnp.minimum(pages, total - block * pages)

        def wait(i: Any, _: Any) -> Any:
            read(0, slot, i).wait()
            return _

        lax.fori_loop(0, size, wait, 0)

    def wait_writes(slot: Any, count: Any) -> None:
        def wait(i: Any, _: Any) -> Any:
            write(0, slot, 0, 0).wait()
            return _

        lax.fori_loop(0, count, wait, 0)

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


def _decode(
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
    rows = _ceil(G, 8) * 8
    q = q_TNH[:T].reshape(T, K, G, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    new = jnp.stack([k_TKH[:T], v_TKH[:T]], 2)  # [T, K, 2, H]
    active = (cu_B1[1:] > cu_B1[:-1]) & (jnp.arange(B) < count)
    used = jnp.where(active, _ceil(kv_lens_B, Z), 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(used, dtype=jnp.int32)])
    k_heads = K // sizes.head_split
    page_bytes = 2 * k_heads * Z * H * data.dtype.itemsize
    pages = max(1, sizes.decode_block_bytes // page_bytes)
    chunk = min(pages, _page_count(sizes.decode_chunk_rows // k_heads, Z))
    parts = (_page_count(max(1, chunk * Z // n), Z) for n in (4, 2, 1))
    tails = tuple(sorted({part for part in parts if part < chunk} | {chunk}))
    unroll = next(u for u in (4, 2, 1) if k_heads % u == 0)
    body = functools.partial(
        _decode_kernel,
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


# ---------------------------------------------------------------- writing


def _write_kernel(
    seq_ref: Any,  # [E]: an entry is one page of one sequence
    page_ref: Any,  # [E]: its place in the sequence's table
    rows_ref: Any,  # [B * P]
    kv_lens_ref: Any,  # [B]
    cu_ref: Any,  # [B + 1]
    low_ref: Any,  # [2, K, Z, H]: new tokens, a block and
    high_ref: Any,  # [2, K, Z, H]: the next one; a page's tokens begin somewhere in the first
    old_ref: Any,  # [2, K, Z, H]
    out_ref: Any,  # [2, K, Z, H]
) -> None:
    e = pl.program_id(0)
    seq, page = seq_ref[e], page_ref[e]
    _, K, Z, H = out_ref.shape
    source, begin, end = _page_window(seq, page, kv_lens_ref, cu_ref, Z)
    shift = lax.rem(source, Z)
    slot = lax.broadcasted_iota(jnp.int32, (Z, H), 0)
    fresh = (slot >= begin) & (slot < end)

    def one(k: Any, _: Any) -> Any:
        for kind in (0, 1):
            # Rows rotate only as 32-bit values; bf16 survives the way there and back.
            window = jnp.concatenate([low_ref[kind, k], high_ref[kind, k]]).astype(jnp.float32)
            new = pltpu.roll(window, lax.rem(2 * Z - shift, 2 * Z), 0)[:Z]
            old = old_ref[kind, k].astype(jnp.float32)
            out_ref[kind, k] = jnp.where(fresh, new, old).astype(out_ref.dtype)
        return _

    lax.fori_loop(0, K, one, 0)


def _page_window(seq: Any, page: Any, kv_lens_ref: Any, cu_ref: Any, Z: int) -> tuple:
    """Where a page's slots lie among the new tokens.

    Returns the index of slot 0 among the new tokens, which are preceded by Z rows of padding,
    and the range of slots that are new.
    """
    first_new = kv_lens_ref[seq] - (cu_ref[seq + 1] - cu_ref[seq])
    source = cu_ref[seq] + page * Z - first_new + Z
    begin = jnp.maximum(first_new - page * Z, 0)
    return source, begin, jnp.minimum(kv_lens_ref[seq] - page * Z, Z)


def _entries(counts_B: Array, bound: int) -> tuple[Array, Array, Array]:
    """A list of `counts_B[b]` entries for each b.

    Returns ([E] b, [E] index within b, [] entries); E = bound. Unused entries repeat the last b.
    """
    ends_B = jnp.cumsum(counts_B, dtype=jnp.int32)
    e = jnp.arange(bound, dtype=jnp.int32)
    b = jnp.sum(ends_B[None, :] <= e[:, None], axis=1, dtype=jnp.int32)
    b = jnp.minimum(b, counts_B.shape[0] - 1)
    return b, e - (ends_B - counts_B)[b], ends_B[-1]


def _write(
    k_TKH: Array,
    v_TKH: Array,
    data: Array,
    rows_BP: Array,
    kv_lens_B: Array,
    cu_B1: Array,
    active_B: Array,
    sizes: PagedSizes,
    interpret: Any,
) -> Array:
    """Writes the new tokens of the active sequences, page by page."""
    R, _, K, Z, H = data.shape
    (T, _, _), (B, P) = k_TKH.shape, rows_BP.shape
    q_lens_B = cu_B1[1:] - cu_B1[:-1]
    first_B = (kv_lens_B - q_lens_B) // Z
    pages_B = jnp.where(active_B & (kv_lens_B > 0), _ceil(kv_lens_B, Z) - first_B, 0)
    # Q tokens touch at most (Q - 2) // Z + 2 pages.
    seq, index, count = _entries(pages_B, T // Z + 2 * min(B, T))
    page = index + first_B[seq]
    # With nothing to write one entry is visited all the same; it finds no new slot. Its place
    # in the table must exist, whatever lies there.
    page = jnp.where(jnp.arange(page.shape[0]) < count, page, P)
    blocks = _ceil(T, Z) + 2
    new = jnp.stack([k_TKH, v_TKH]).transpose(0, 2, 1, 3).astype(data.dtype)
    new = jnp.pad(new, ((0, 0), (0, 0), (Z, (blocks - 1) * Z - T), (0, 0)))

    def source(e: Any, seq: Any, page: Any, rows: Any, kv_lens: Any, cu: Any) -> Any:
        return jnp.clip(_page_window(seq[e], page[e], kv_lens, cu, Z)[0] // Z, 0, blocks - 2)

    def target(e: Any, seq: Any, page: Any, rows: Any, *_: Any) -> Any:
        row = rows[seq[e] * P + jnp.minimum(page[e], P - 1)]
        return jnp.clip(row, 0, R - 1), 0, 0, 0, 0

    new_block = lambda extra: pl.BlockSpec(  # noqa: E731
        (2, K, Z, H), lambda *args: (0, 0, source(*args) + extra, 0)
    )
    page_block = pl.BlockSpec((None, 2, K, Z, H), target)
    return pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(jnp.maximum(count, 1),),
            in_specs=[new_block(0), new_block(1), page_block],
            out_specs=page_block,
        ),
        out_shape=jax.ShapeDtypeStruct(data.shape, data.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=sizes.vmem_bytes,
        ),
        interpret=interpret,
        name="paged_write",
    )(seq, page, rows_BP.reshape(-1), kv_lens_B, cu_B1, new, new, data)


# ---------------------------------------------------------------- mixed


def _mixed_kernel(
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
    data_ref: Any,  # [rows, 2, K, Z, H] in HBM
    # outputs
    out_ref: Any,  # [k * G, q, H]
    # scratch
    buffer_ref: Any,  # [2, pages, 2, k, Z, H]
    m_ref: Any,  # [k, G * q, 128]
    l_ref: Any,  # [k, G * q, 128]
    acc_ref: Any,  # [k, G * q, H]
    sem: Any,  # [2]
    *,
    table_width: int,  # P
    q_parts: int,  # pieces in which a query block is multiplied
) -> None:
    _, pages, _, k_heads, Z, H = buffer_ref.shape
    q_size, G = q_ref.shape[1], q_ref.shape[0] // k_heads
    M, size = G * q_size, pages * Z
    e, entries = pl.program_id(1), pl.num_programs(1)
    heads = pl.ds(pl.program_id(0) * k_heads, k_heads)
    seq, q_block, base = seq_ref[e], block_ref[e], base_ref[e]
    blocks = _ceil(keys_ref[e], size)

    def copy(row: Any, slot: Any, at: Any) -> Any:
        return pltpu.make_async_copy(
            data_ref.at[row, :, heads], buffer_ref.at[slot, at], sem.at[slot]
        )

    def pages_of(entry: Any, c: Any) -> Any:
        return jnp.minimum(pages, _ceil(keys_ref[entry], Z) - c * pages)

    def fetch(entry: Any, c: Any, slot: Any) -> None:
        first = seq_ref[entry] * table_width + c * pages

        def start(i: Any, _: Any) -> Any:
            copy(rows_ref[first + i], slot, i).start()
            return _

        lax.fori_loop(0, pages_of(entry, c), start, 0)

    def fetch_after(c: Any) -> None:
        """Starts the copies of the key block that follows, perhaps the next entry's first."""
        slot = lax.rem(base + c + 1, 2)
        pl.when(c + 1 < blocks)(lambda: fetch(e, c + 1, slot))
        pl.when((c + 1 >= blocks) & (e + 1 < entries))(lambda: fetch(e + 1, 0, slot))

    def wait(c: Any, slot: Any) -> None:
        def one(i: Any, _: Any) -> Any:
            copy(0, slot, i).wait()
            return _

        lax.fori_loop(0, pages_of(e, c), one, 0)

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

        def head(k: Any, _: Any) -> Any:
            q = q_ref[pl.ds(k * G, G)].reshape(M, H)
            keys = buffer_ref[slot, :, 0, k].reshape(size, H)
            values = buffer_ref[slot, :, 1, k].reshape(size, H)
            if masked:
                # Slots that no query sees may hold NaN, and 0 * NaN would spread.
                row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
                ok = row < keys_ref[e] - c * size
                values = jnp.where(ok, values.astype(jnp.float32), 0).astype(values.dtype)
                last = limits() - c * size
            part = M // q_parts
            for at in range(0, M, part):
                s = dot(q[at : at + part], keys, 1, 1)
                if masked:
                    column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
                    s = jnp.where(column <= last[at : at + part], s, _MASK)
                _online(s, values, m_ref, l_ref, acc_ref, (k, pl.ds(at, part)))
            return _

        lax.fori_loop(0, k_heads, head, 0)

    pl.when(e == 0)(lambda: fetch(0, 0, 0))
    pl.when((e == 0) | (block_ref[jnp.maximum(e - 1, 0)] != q_block))(
        lambda: _reset(m_ref, l_ref, acc_ref)
    )
    pl.when(blocks == 0)(lambda: fetch_after(-1))
    # Blocks that every row of the query block sees to the end need no mask.
    alone = (begin <= t0) & (end >= t0 + q_size)
    full = jnp.where(alone, (t0 + offset + 1) // size, 0)
    full = jnp.clip(full, 0, blocks)  # an idle sequence would count below 0

    def loop(low: Any, high: Any, masked: bool) -> None:
        def one(c: Any, _: Any) -> Any:
            attend(c, masked)
            return _

        lax.fori_loop(low, high, one, 0)

    loop(0, full, masked=False)
    loop(full, blocks, masked=True)

    @pl.when((e + 1 == entries) | (block_ref[e + 1] != q_block))
    def _() -> None:
        def store(k: Any, _: Any) -> Any:
            out = _normalised(l_ref, acc_ref, k).reshape(G, q_size, H)
            out_ref[pl.ds(k * G, G)] = out.astype(out_ref.dtype)
            return _

        lax.fori_loop(0, k_heads, store, 0)


def _mixed(
    q_TNH: Array,
    data: Array,
    rows_BP: Array,
    kv_lens_B: Array,
    cu_B1: Array,
    active_B: Array,
    sizes: PagedSizes,
    interpret: Any,
) -> Array:
    """Attention of the active sequences; the rows of other tokens are unspecified."""
    _, _, K, Z, H = data.shape
    B, P = rows_BP.shape
    T, N, _ = q_TNH.shape
    size, pages = sizes.q_tokens, _page_count(sizes.kv_tokens, Z)
    k_heads = K // sizes.head_split
    G, q_blocks = N // K, _ceil(T, size)
    q_NTH = jnp.pad(q_TNH.swapaxes(0, 1), ((0, 0), (0, q_blocks * size - T), (0, 0)))

    begin_B, end_B = cu_B1[:-1], cu_B1[1:]
    first_B = begin_B // size
    blocks_B = jnp.where(active_B & (end_B > begin_B), (end_B - 1) // size - first_B + 1, 0)
    bound = q_blocks + min(B, T) + 1
    seq, index, count = _entries(blocks_B, bound)
    block = first_B[seq] + index
    last = jnp.minimum(end_B[seq], (block + 1) * size)
    keys = jnp.maximum(kv_lens_B[seq] - end_B[seq] + last, 0)
    listed = jnp.arange(bound) < count
    # With nothing to do one entry is visited all the same: it writes zeros to block 0.
    block = jnp.where(listed, block, 0)
    keys = jnp.where(listed & (kv_lens_B[seq] > 0), keys, 0)
    base = jnp.cumsum(_ceil(keys, pages * Z), dtype=jnp.int32) - _ceil(keys, pages * Z)

    q_spec = pl.BlockSpec((k_heads * G, size, H), lambda c, e, seq, block, *_: (c, block[e], 0))
    out_NTH = pl.pallas_call(
        functools.partial(_mixed_kernel, table_width=P, q_parts=sizes.q_parts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(sizes.head_split, jnp.maximum(count, 1)),
            in_specs=[q_spec, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((2, pages, 2, k_heads, Z, H), data.dtype),
                pltpu.VMEM((k_heads, G * size, LANES), jnp.float32),
                pltpu.VMEM((k_heads, G * size, LANES), jnp.float32),
                pltpu.VMEM((k_heads, G * size, H), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
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
    )(seq, block, keys, base, rows_BP.reshape(-1), kv_lens_B, cu_B1, q_NTH, data)
    return out_NTH[:, :T].swapaxes(0, 1)


# ---------------------------------------------------------------- the call


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


def check_sizes(sizes: PagedSizes, data: Any, rows_BP: Any) -> None:
    _, _, K, Z, H = data.shape
    B, P = rows_BP.shape
    tile = _tile_rows(data.dtype)
    if Z % tile:
        raise ValueError(
            f"pages of {Z} tokens do not tile: {data.dtype} needs a multiple of {tile}"
        )
    if H > LANES and H % LANES:
        raise ValueError(f"head size {H} is above {LANES} and no multiple of it")
    if sizes.q_tokens < 16 or sizes.q_tokens & (sizes.q_tokens - 1):
        raise ValueError(f"q_tokens is {sizes.q_tokens}; it must be a power of two, at least 16")
    if sizes.q_parts < 1 or sizes.q_tokens % (16 * sizes.q_parts):
        raise ValueError(
            f"{sizes.q_tokens} queries cannot be cut into {sizes.q_parts} parts of 16s"
        )
    if Z > LANES and Z % LANES:
        raise ValueError(f"pages of {Z} tokens are above {LANES} and no multiple of it")
    if K % sizes.head_split:
        raise ValueError(f"{K} kv heads cannot be split over {sizes.head_split} cores")
    if sizes.decode_buffers < 2:
        raise ValueError(f"{sizes.decode_buffers} decode buffers cannot overlap; use at least 2")
    if B * P * 4 > _SMEM_BYTES:
        raise ValueError(
            f"a page table of {B} x {P} takes {B * P * 4} bytes of scalar memory, "
            f"which has {_SMEM_BYTES}; use larger pages or fewer sequences a call"
        )


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
    decode, end, has_decode, has_mixed = _split(distribution_3, rows_BP.shape[0])
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
            out, data = _decode(q, k, v, data, *tables, decode, sizes, mode)
            out = jnp.pad(out, ((0, T - out.shape[0]), (0, 0), (0, 0)))
        if has_mixed:
            order = jnp.arange(rows_BP.shape[0])
            active = (order >= decode) & (order < end)
            data = _write(k, v, data, *tables, active, sizes, mode)
            mixed = _mixed(q, data, *tables, active, sizes, mode)
            inside = (t >= cu_q_lens_B1[decode]) & (t < cu_q_lens_B1[end])
            out = jnp.where(inside, mixed, out)
    return out[:, :, :H].astype(q_TNH.dtype), data
