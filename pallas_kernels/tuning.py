"""Block sizes by TPU generation, head size and dtype, each with the estimate that chose it.

The figures are *estimates* of `python -m benchmarks.kernels` (percent of the chip's bf16
peak, full blocks, in-block), never measurements: no TPU was at hand. To add a chip or settle
a doubt: run it for a few sizes, put the best into the table with its figure and date, and
prefer smaller key blocks where two are close (they fit a mask more tightly).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike


def chip() -> str:
    """The TPU generation that is being compiled for: "v5e", "v5p", "v6e", "tpu7x", ...

    Interpret mode on a CPU counts as the first of them.
    """
    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except ValueError:  # no TPU in force: interpret mode
        return "v5e"
    return "tpu7x" if version == "7x" else version


# Packed attention: (queries, keys) a block, bfloat16, head sizes up to 128. Estimates of
# 2026-11-22, percent of peak in full blocks: forward, backward at this size (and the other).
_PACKED = {
    "v5e": (512, 1024),  # 93, 99 (1024 x 1024: 91, 99)
    "v5p": (512, 1024),  # as v5e: the same matrix units
    "v6e": (1024, 1024),  # 37, 48 (512 x 1024: 33, 47)
    "tpu7x": (1024, 1024),  # as v6e
}
_PACKED_WIDE = (512, 512)  # float32 or head size 256: blocks of twice the bytes


def packed_blocks(head_size: int, dtype: DTypeLike) -> tuple[int, int]:
    """Returns (queries, keys) per block of packed attention."""
    if head_size > 128 or jnp.dtype(dtype).itemsize > 2:
        return _PACKED_WIDE
    return _PACKED.get(chip(), _PACKED["v6e"])


# Ragged paged attention, see `paged.PagedSizes`. Estimates of 2026-11-20 at 28/4 heads of 128 in
# bfloat16, mixed, percent of peak in full and masked blocks; decode is limited by DMA on all.
_PAGED = {
    "v5e": (128, 2, 512, 4, 4096, 3, 1, 100),  # 93, 90
    "v5p": (128, 2, 512, 2, 2048, 3, 2, 56),  # 93, 91; two cores, each with half of the heads
    "v6e": (128, 1, 512, 4, 4096, 3, 1, 100),  # 36, 30 (1,024 keys: 36, 32, but looser; 256: 24)
    "tpu7x": (128, 1, 512, 4, 4096, 3, 1, 56),  # 34, 29
}


def paged_blocks() -> dict[str, int]:
    """Returns the fields of `paged.PagedSizes` for 28/4 heads of 128; it fits them to others."""
    q, parts, kv, mib, rows, buffers, split, vmem_mib = _PAGED.get(chip(), _PAGED["v6e"])
    return dict(
        q_tokens=q,
        q_parts=parts,
        kv_tokens=kv,
        decode_block_bytes=mib * 2**20,
        decode_chunk_rows=rows,
        decode_buffers=buffers,
        head_split=split,
        vmem_bytes=vmem_mib * 2**20,
    )


def logprob_blocks(dtype: DTypeLike) -> tuple[int, ...]:
    """Returns the fields of `logprob.Sizes`: (tokens, ids) of forward, dx and dw.

    Estimates of 2026-11-20 at T 8,192, D 3,584, V 152,064 in bfloat16, percent of peak in a
    step: 100, 100, 100 on v5e and v5p; 89, 93, 92 on v6e (2,048 tokens: 91 in the forward, twice
    the code); 99, 99, 99 on tpu7x. In float32, 10 to 29: a product is six passes.
    """
    if jnp.dtype(dtype).itemsize == 2:
        return (1024, 512, 512, 512, 512, 512)
    return (256,) * 6
