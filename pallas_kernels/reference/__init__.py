"""Reference implementations in plain jnp, a file each: the kernels' twins, and the path of CPUs.

`slices` is packed attention of older GPUs.
"""

from pallas_kernels.reference.logprob import token_logprob
from pallas_kernels.reference.packed import packed_attention
from pallas_kernels.reference.paged import (
    Attends,
    in_blocks,
    paged_attention,
    ragged_paged_attention,
)
from pallas_kernels.reference.slices import sliced_packed_attention

__all__ = [
    "Attends",
    "in_blocks",
    "packed_attention",
    "paged_attention",
    "ragged_paged_attention",
    "sliced_packed_attention",
    "token_logprob",
]
