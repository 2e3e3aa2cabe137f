"""The write kernel: new keys and values of a mixed call go into the cache, before it attends.

Page by page: read, shift, select, write, since DMAs need tiles of 16 rows and new tokens begin
anywhere. An XLA scatter would do the same, but as one small read-modify-write a token, one
after the other; whole pages cost 4 page transfers each, pipelined (an estimate at 8,192 tokens
on v5e: 0.1 ms, where attention among them takes 3 ms). Decoding writes for itself (`decode`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.paged.sizes import PagedSizes, entries
from pallas_kernels.pages import Pages
from pallas_kernels.tiles import each


def _kernel(
    seq_ref: Any,  # [E]: an entry is one page of one sequence
    page_ref: Any,  # [E]: its place in the sequence's table
    rows_ref: Any,  # [B * P]
    kv_lens_ref: Any,  # [B]
    cu_ref: Any,  # [B + 1]
    *refs: Any,
) -> None:
    # Each of four for the data, [2, K, Z, H], and then for its scales, [2, K, 1, Z], if any: new
    # tokens, a block and the next one (a page's tokens begin somewhere in the first), old, out.
    arrays = len(refs) // 4
    groups = [refs[i * arrays : (i + 1) * arrays] for i in range(4)]
    low_refs, high_refs, old_refs, out_refs = groups
    e = pl.program_id(0)
    seq, page = seq_ref[e], page_ref[e]
    _, K, Z, H = out_refs[0].shape
    source, begin, end = _page_window(seq, page, kv_lens_ref, cu_ref, Z)
    shift = lax.rem(source, Z)
    slot = lax.broadcasted_iota(jnp.int32, (Z, H), 0)
    fresh = (slot >= begin) & (slot < end)
    lane = lax.broadcasted_iota(jnp.int32, (1, Z), 1)
    fresh_lanes = (lane >= begin) & (lane < end)

    @each(K)
    def _(k: Any) -> None:
        for kind in (0, 1):
            # Rows rotate only as 32-bit values; narrower ones survive the way there and back.
            window = [ref[0][kind, k].astype(jnp.float32) for ref in (low_refs, high_refs)]
            new = pltpu.roll(jnp.concatenate(window), lax.rem(2 * Z - shift, 2 * Z), 0)[:Z]
            old = old_refs[0][kind, k].astype(jnp.float32)
            out_refs[0][kind, k] = jnp.where(fresh, new, old).astype(out_refs[0].dtype)
            for low, high, old_ref, out_ref in zip(*(r[1:] for r in groups), strict=True):
                window = jnp.concatenate([low[kind, k], high[kind, k]], axis=1)
                window = jnp.broadcast_to(window, (8, 2 * Z))  # a tile: one row does not rotate
                new = pltpu.roll(window, lax.rem(2 * Z - shift, 2 * Z), 1)[:1, :Z]
                out_ref[kind, k] = jnp.where(fresh_lanes, new, old_ref[kind, k])


def _page_window(seq: Any, page: Any, kv_lens_ref: Any, cu_ref: Any, Z: int) -> tuple:
    """Where a page's slots lie among the new tokens.

    Returns the index of slot 0 among the new tokens, which are preceded by Z rows of padding,
    and the range of slots that are new.
    """
    first_new = kv_lens_ref[seq] - (cu_ref[seq + 1] - cu_ref[seq])
    source = cu_ref[seq] + page * Z - first_new + Z
    begin = jnp.maximum(first_new - page * Z, 0)
    return source, begin, jnp.minimum(kv_lens_ref[seq] - page * Z, Z)


def write(
    new: tuple[Array, ...],  # [T, K, 2, H] as `Pages.entries` makes them, perhaps scales [T, K, 2]
    pages: Pages,
    rows_BP: Array,
    kv_lens_B: Array,
    cu_B1: Array,
    active_B: Array,
    sizes: PagedSizes,
    interpret: Any,
) -> Pages:
    """Writes the active sequences' new keys and values into the cache, page by page."""
    R, _, K, Z, H = pages.data.shape
    T, (B, P) = new[0].shape[0], rows_BP.shape
    q_lens_B = cu_B1[1:] - cu_B1[:-1]
    first_B = (kv_lens_B - q_lens_B) // Z
    pages_B = jnp.where(active_B & (kv_lens_B > 0), pl.cdiv(kv_lens_B, Z) - first_B, 0)
    # Q tokens touch at most (Q - 2) // Z + 2 pages.
    seq, index, count = entries(pages_B, T // Z + 2 * min(B, T))
    page = index + first_B[seq]
    # With nothing to write one entry is visited all the same; it finds no new slot. Its place
    # in the table must exist, whatever lies there.
    page = jnp.where(jnp.arange(page.shape[0]) < count, page, P)
    blocks = pl.cdiv(T, Z) + 2

    def in_blocks(x: Array) -> Array:
        """[T, K, 2, ..] -> [blocks, 2, K, Z, ..]"""
        x = jnp.pad(x, [(Z, (blocks - 1) * Z - T)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(blocks, Z, *x.shape[1:]), (3, 2), (1, 2))

    new = in_blocks(new[0]), *(in_blocks(x)[..., None, :] for x in new[1:])

    def source(e: Any, seq: Any, page: Any, rows: Any, kv_lens: Any, cu: Any) -> Any:
        return jnp.clip(_page_window(seq[e], page[e], kv_lens, cu, Z)[0] // Z, 0, blocks - 2)

    def target(e: Any, seq: Any, page: Any, rows: Any, *_: Any) -> Any:
        row = rows[seq[e] * P + jnp.minimum(page[e], P - 1)]
        return jnp.clip(row, 0, R - 1), 0, 0, 0, 0

    def windows(extra: int) -> list[pl.BlockSpec]:
        at = lambda *args: (source(*args) + extra, 0, 0, 0, 0)  # noqa: E731
        return [pl.BlockSpec((None, *x.shape[1:]), at) for x in new]

    pages_of = [pl.BlockSpec((None, *x.shape[1:]), target) for x in pages.arrays]
    first = 5 + 2 * len(new)  # the cache among the inputs
    arrays = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(jnp.maximum(count, 1),),
            in_specs=[*windows(0), *windows(1), *pages_of],
            out_specs=pages_of,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages.arrays],
        input_output_aliases={first + i: i for i in range(len(new))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=sizes.vmem_bytes,
        ),
        interpret=interpret,
        name="paged_write",
    )(seq, page, rows_BP.reshape(-1), kv_lens_B, cu_B1, *new, *new, *pages.arrays)
    return pages.of(*arrays)
