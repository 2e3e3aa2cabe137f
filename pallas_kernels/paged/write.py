"""Writing the new keys and values of a mixed call into the cache, before it attends.

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
from pallas_kernels.tiles import each


def _kernel(
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

    @each(K)
    def _(k: Any) -> None:
        for kind in (0, 1):
            # Rows rotate only as 32-bit values; bf16 survives the way there and back.
            window = jnp.concatenate([low_ref[kind, k], high_ref[kind, k]]).astype(jnp.float32)
            new = pltpu.roll(window, lax.rem(2 * Z - shift, 2 * Z), 0)[:Z]
            old = old_ref[kind, k].astype(jnp.float32)
            out_ref[kind, k] = jnp.where(fresh, new, old).astype(out_ref.dtype)


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
    pages_B = jnp.where(active_B & (kv_lens_B > 0), pl.cdiv(kv_lens_B, Z) - first_B, 0)
    # Q tokens touch at most (Q - 2) // Z + 2 pages.
    seq, index, count = entries(pages_B, T // Z + 2 * min(B, T))
    page = index + first_B[seq]
    # With nothing to write one entry is visited all the same; it finds no new slot. Its place
    # in the table must exist, whatever lies there.
    page = jnp.where(jnp.arange(page.shape[0]) < count, page, P)
    blocks = pl.cdiv(T, Z) + 2
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
        _kernel,
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
