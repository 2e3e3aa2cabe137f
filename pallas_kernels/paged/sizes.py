"""Block sizes of the paged kernels, what must hold of them, and their work lists.

Used by the three kernels beside this file; `tuning` has the figures by chip.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import tuning
from pallas_kernels.tiles import LANES

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


def check_sizes(sizes: PagedSizes, data: Any, entries: int) -> None:
    """Raises ValueError if these blocks do not fit the cache, or page tables of so many entries."""
    _, _, K, Z, H = data.shape
    tile = tile_rows(data.dtype)
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
    if entries * 4 > _SMEM_BYTES:
        raise ValueError(
            f"page tables of {entries} entries take {entries * 4} bytes of scalar memory, "
            f"which has {_SMEM_BYTES}; use larger pages or fewer sequences a call"
        )


def page_count(tokens: int, page_size: int) -> int:
    """Page count for about `tokens` tokens: at most one lane tile or a multiple of it, else 1."""
    unit = math.lcm(page_size, LANES)
    if tokens >= unit:
        return tokens // unit * unit // page_size
    return max(1, min(tokens, LANES) // page_size)


def tile_rows(dtype: Any) -> int:
    """The rows of a tile: what a DMA into the middle of a page must be a multiple of."""
    return 32 // jnp.dtype(dtype).itemsize


def entries(counts_B: Array, bound: int) -> tuple[Array, Array, Array]:
    """A flat work list of `counts_B[b]` entries for each b.

    Returns ([E] b, [E] index within b, [] entries); E = bound. Unused entries repeat the last b.
    """
    ends_B = jnp.cumsum(counts_B, dtype=jnp.int32)
    e = jnp.arange(bound, dtype=jnp.int32)
    b = jnp.sum(ends_B[None, :] <= e[:, None], axis=1, dtype=jnp.int32)
    b = jnp.minimum(b, counts_B.shape[0] - 1)
    return b, e - (ends_B - counts_B)[b], ends_B[-1]
