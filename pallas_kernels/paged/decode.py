"""The decode kernel: one new token a slot, a row's shared prefix read once; memory-bound.

A row's work is a list of *runs*: the pages of its shared prefix, which meet the queries of all
members at once, then each member's private pages, which meet that member's. The online softmax
simply goes on from one to the other, so nothing has to be merged. All pages of all runs form one
flat list that is cut into blocks of a few MB: a DMA block is always full, however short the runs
are, and `buffers` blocks are in flight, across runs. A slot's last page passes through VMEM
anyway: the new key and value are patched into it there, and only the touched tile goes back.

Of an int8 cache the integers are multiplied as they are, which bfloat16 holds exactly; a key's
scale multiplies its scores, a value's scale its weights.
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

from pallas_kernels.paged.runs import Runs
from pallas_kernels.paged.sizes import PagedSizes, page_count, tile_rows
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
    # prefetched scalars: `runs.Runs`
    starts_ref: Any,
    table_at_ref: Any,
    tokens_ref: Any,
    who_ref: Any,
    member_ref: Any,
    table_ref: Any,
    # inputs
    row_q_ref: Any,  # [R, k, M * G, H] in VMEM: the queries of a row's members, one after another
    q_ref: Any,  # [T, k, G, H] in VMEM
    *refs: Any,  # new entries, the cache; outputs; scratch
    arrays: int,  # of the cache: 2 with scales
    shared: bool,  # whether any row has a prefix
    pages: int,  # a DMA block
    chunk: int,  # pages multiplied together
    tails: tuple[int, ...],  # the sizes in which a run's last pages may be: up to chunk
    unroll: int,  # heads handled together, to hide the latency of one behind another
) -> None:
    new_refs, refs = refs[:arrays], refs[2 * arrays :]  # [T, k, 2, H] and scales [T, k, 2, Z]
    out_ref, *refs = refs  # [T, k, G, H] in VMEM
    cache_refs, refs = refs[:arrays], refs[arrays:]  # [rows, 2, K, Z, H] and [rows, 2, K, 1, Z]
    buffer_refs, refs = refs[:arrays], refs[arrays:]  # [buffers, pages + chunk - 1, 2, k, Z, H] ..
    m_ref, l_ref, acc_ref = refs[:3]  # [k, M * G, 128], the same, [k, M * G, H]
    read_sems, write_sems = refs[3 : 3 + arrays], refs[3 + arrays :]  # [buffers] for each array
    buffers, _, _, k_heads, Z, H = buffer_refs[0].shape
    G = q_ref.shape[2]
    tile = tile_rows(cache_refs[0].dtype)
    heads = pl.ds(pl.program_id(0) * k_heads, k_heads)
    runs = who_ref.shape[0]
    total = starts_ref[runs]
    blocks = pl.cdiv(total, pages)

    def reads(row: Any, slot: Any, at: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(cache.at[row, :, heads], buffer.at[slot, at], sem.at[slot])
            for cache, buffer, sem in zip(cache_refs, buffer_refs, read_sems, strict=True)
        ]

    def tiles(row: Any, slot: Any, at: Any, offset: Any = 0) -> list[Any]:
        """The tile of a page that holds a new token, back to memory, and all of its scales."""
        touched = (pl.ds(offset, tile), slice(None))[:arrays]
        return [
            pltpu.make_async_copy(
                buffer.at[slot, at, :, :, part], cache.at[row, :, heads, part], sem.at[slot]
            )
            for cache, buffer, part, sem in zip(
                cache_refs, buffer_refs, touched, write_sems, strict=True
            )
        ]

    def walk(block: Any, first: Any, visit: Any, state: Any) -> Any:
        """visit(run, begin, end, state) for each run with pages in a block of the list."""
        low, high = block * pages, jnp.minimum((block + 1) * pages, total)

        def body(carry: Any) -> Any:
            run, state = carry
            begin = jnp.maximum(starts_ref[run], low)
            end = jnp.minimum(starts_ref[run + 1], high)
            return run + 1, visit(run, begin, end, state)

        run, state = lax.while_loop(lambda c: starts_ref[c[0]] < high, body, (first, state))
        # A run cut by the block's end is the first of the next block.
        return jnp.where(starts_ref[run] > high, run - 1, run), state

    def fetch(block: Any, first: Any) -> Any:
        """Starts the copies of a block's pages; returns the next block's first run."""
        slot = lax.rem(block, buffers)

        def visit(run: Any, begin: Any, end: Any, state: Any) -> Any:
            entry = table_at_ref[run] - starts_ref[run]

            @each(begin, end)
            def _(i: Any) -> None:
                for copy in reads(table_ref[entry + i], slot, i - block * pages):
                    copy.start()

            return state

        return walk(block, first, visit, 0)[0]

    def patch(run: Any, slot: Any, at: Any) -> None:
        """Puts a member's new token into its last page, in VMEM, and sends the tile."""
        position, token = tokens_ref[run] - 1, who_ref[run]
        in_page = lax.rem(position, Z)
        offset = pl.multiple_of(in_page // tile * tile, tile)
        here = lax.broadcasted_iota(jnp.int32, (tile, H), 0) == in_page - offset
        lane = lax.broadcasted_iota(jnp.int32, (1, Z), 1) == in_page

        @each(k_heads)
        def _(k: Any) -> None:
            for kind in (0, 1):
                at_tile = (slot, at, kind, k, pl.ds(offset, tile))
                # float32: selects of packed types need packed masks, which v5e lacks.
                old = buffer_refs[0][at_tile].astype(jnp.float32)
                row = new_refs[0][token, k][kind : kind + 1].astype(jnp.float32)
                new = jnp.where(here, jnp.broadcast_to(row, old.shape), old)
                buffer_refs[0][at_tile] = new.astype(buffer_refs[0].dtype)
                for scales, fresh in zip(buffer_refs[1:], new_refs[1:], strict=True):
                    row = fresh[token, k][kind : kind + 1]
                    scales[slot, at, kind, k] = jnp.where(lane, row, scales[slot, at, kind, k])

        row = table_ref[table_at_ref[run] + position // Z]
        for copy in tiles(row, slot, at, offset):
            copy.start()

    def attend(
        query: Any, state: Any, slot: Any, at: Any, valid: Any, count: int, mask: bool
    ) -> None:
        """`count` pages from page `at` of the buffer, of which the first `valid` tokens count.

        `query(k)` are the queries that they meet, `state` the rows of these in m, l and acc.
        """
        size, some = count * Z, pl.ds(at, count)

        @each(k_heads // unroll)
        def _(i: Any) -> None:
            for k in [i * unroll + j for j in range(unroll)]:
                q = query(k)
                keys, values = (
                    buffer_refs[0][slot, some, kind, k].reshape(size, H) for kind in (0, 1)
                )
                k_scale, v_scale = (
                    scales_of([buffer[slot, some, kind, k] for buffer in buffer_refs[1:]])
                    for kind in (0, 1)
                )
                s = dot(q, as_queries(keys, q.dtype), 1, 1)
                s = s if k_scale is None else s * k_scale
                if mask:
                    s = jnp.where(lax.broadcasted_iota(jnp.int32, s.shape, 1) < valid, s, HIDDEN)
                    if v_scale is None:
                        values = first_rows(values, valid)
                    else:
                        v_scale = finite_scales(v_scale, valid)
                accumulate(
                    s, as_queries(values, q.dtype), m_ref, l_ref, acc_ref, (k, state), v_scale
                )

    def compute(block: Any, first: Any) -> Any:
        """Returns the next block's first run and the number of tiles sent to memory."""
        slot, low = lax.rem(block, buffers), block * pages

        def visit(run: Any, begin: Any, end: Any, sent: Any) -> Any:
            member, who = member_ref[run], who_ref[run]
            own = member >= 0
            done = own & (end == starts_ref[run + 1]) & (end > begin)
            state = pl.ds(pl.multiple_of(jnp.maximum(member, 0) * G, 8), G)

            @pl.when(~own & (begin == starts_ref[run]))
            def _() -> None:
                reset(m_ref, l_ref, acc_ref)

            @pl.when(done)
            def _() -> None:
                patch(run, slot, end - 1 - low)

            # Tokens of this run from page `begin` to page `end`.
            position = (begin - starts_ref[run]) * Z
            tokens = jnp.minimum(tokens_ref[run] - position, (end - begin) * Z)

            def in_chunks(query: Any, state: Any, tails: tuple[int, ...]) -> None:
                @each(pl.cdiv(end - begin, chunk))
                def _(c: Any) -> None:
                    at, valid = begin - low + c * chunk, tokens - c * chunk * Z
                    part = functools.partial(attend, query, state, slot, at, valid)
                    full = valid >= chunk * Z
                    pl.when(full)(functools.partial(part, chunk, mask=False))
                    below = 0
                    for count in tails:  # the smallest that holds what is left
                        fits = ~full & (valid > below) & ((valid <= count * Z) | (count == chunk))
                        pl.when(fits)(functools.partial(part, count, mask=True))
                        below = count * Z

            if shared:

                @pl.when(~own)
                def _() -> None:
                    in_chunks(lambda k: row_q_ref[who, k], slice(None), tails[-1:])

            @pl.when(own)
            def _() -> None:
                in_chunks(lambda k: q_ref[who, k], state, tails)

            @pl.when(done)
            def _() -> None:
                @each(k_heads)
                def _(k: Any) -> None:
                    out = normalised(l_ref, acc_ref, (k, state))
                    out_ref[who, k] = out.astype(out_ref.dtype)

            return sent + done.astype(jnp.int32)

        return walk(block, first, visit, 0)

    def wait(copies: Any, slot: Any, count: Any) -> None:
        """Waits for `count` pages or tiles: a semaphore counts bytes, so for many at once."""

        def some(size: int) -> None:
            for copy in copies(pl.ds(0, size), slot, pl.ds(0, size)):
                copy.wait()

        for size in powers_of_two(pages):
            pl.when(count & size != 0)(functools.partial(some, size))

    def start(block: Any, run: Any) -> Any:
        return lax.cond(block < blocks, lambda: fetch(block, run), lambda: run)

    def step(block: Any, carry: Any) -> Any:
        ahead, here, sent = carry
        # The block before this one is computed: its buffer is free once its tiles are out.
        wait(tiles, lax.rem(block + buffers - 1, buffers), sent)
        ahead = start(block + buffers - 1, ahead)
        wait(reads, lax.rem(block, buffers), jnp.minimum(pages, total - block * pages))
        here, sent = compute(block, here)
        return ahead, here, sent

    ahead = lax.fori_loop(0, buffers - 1, start, jnp.int32(0))
    out_ref[...] = jnp.zeros_like(out_ref)  # rows of idle slots and padding
    _, _, sent = lax.fori_loop(0, blocks, step, (ahead, jnp.int32(0), jnp.int32(0)))
    wait(tiles, lax.rem(blocks + buffers - 1, buffers), sent)


def powers_of_two(most: int) -> list[int]:
    return [1 << bit for bit in reversed(range(most.bit_length()))]


def attend(
    q_TNH: Array,
    new: tuple[Array, ...],  # [T, K, 2, H] as `Pages.entries` makes them, perhaps scales [T, K, 2]
    pages: Pages,
    runs: Runs,
    token_RM: Array,
    shared: bool,
    sizes: PagedSizes,
    interpret: Any,
) -> tuple[Array, Pages]:
    """Decode attention with one query a slot, T in all; `token_RM` are those of a row's members.

    `shared` is false where no row has a prefix, which then is not compiled for.
    """
    _, _, K, Z, H = pages.data.shape
    (T, N, _), (R, M) = q_TNH.shape, token_RM.shape
    G = N // K
    rows = pl.cdiv(G, 8) * 8
    q = q_TNH.reshape(T, K, G, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    row_q = q[token_RM].transpose(0, 2, 1, 3, 4).reshape(R, K, M * rows, H)
    # Integers pass through VMEM in the queries' dtype; a scale in every lane of a page.
    new = new[0].astype(q.dtype), *(jnp.repeat(x[..., None], Z, -1) for x in new[1:])
    k_heads = K // sizes.head_split
    page_bytes = 2 * k_heads * Z * H * pages.data.dtype.itemsize
    block = min(max(1, sizes.decode_block_bytes // page_bytes), pages.data.shape[0])
    chunk = min(block, page_count(sizes.decode_chunk_rows // k_heads, Z))
    parts = (page_count(max(1, chunk * Z // n), Z) for n in (4, 2, 1))
    body = functools.partial(
        _kernel,
        arrays=len(pages.arrays),
        shared=shared,
        pages=block,
        chunk=chunk,
        tails=tuple(sorted({part for part in parts if part < chunk} | {chunk})),
        unroll=next(u for u in (4, 2, 1) if k_heads % u == 0),
    )

    def by_head(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((x.shape[0], k_heads, *x.shape[2:]), lambda c, *_: (0, c, 0, 0))

    here = [pl.BlockSpec(memory_space=pl.ANY) for _ in pages.arrays]
    held = sizes.decode_buffers, block + chunk - 1, 2, k_heads
    state = [(k_heads, M * rows, width) for width in (LANES, LANES, H)]
    first = len(runs) + 2 + len(new)  # the cache among the inputs
    out, *arrays = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            grid=(sizes.head_split,),
            in_specs=[*map(by_head, (row_q, q, *new)), *here],
            out_specs=[by_head(q), *here],
            scratch_shapes=[
                *(pltpu.VMEM((*held, *x.shape[3:]), x.dtype) for x in pages.arrays),
                *(pltpu.VMEM(shape, jnp.float32) for shape in state),
                *(pltpu.SemaphoreType.DMA((sizes.decode_buffers,)) for _ in here * 2),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pages.arrays)],
        input_output_aliases={first + i: 1 + i for i in range(len(here))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            vmem_limit_bytes=sizes.vmem_bytes,
        ),
        interpret=interpret,
        name="paged_decode",
    )(*runs, row_q, q, *new, *pages.arrays)
    return out[:, :, :G].reshape(T, N, H), pages.of(*arrays)
