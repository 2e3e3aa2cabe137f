"""Packed attention on TPU: two Pallas kernels that walk one block list.

The mask is "query i sees key j iff j <= i < kv_end[j]" (docs/kernels.md draws it). The list
(`schedule`) names the blocks with anything to compute, so a batch of packed tails behind
shared prefixes costs what its mask needs; full blocks do no mask work. Both kernels walk it
by query block. The backward makes dq, dk and dv in that one walk: the gradients of a shared
prefix gather all of its tails and all query heads of the kv head in float32 sums in memory.

The online softmax is Milakov & Gimelshein's, blocked as in FlashAttention (Dao et al.,
2022), in base 2: scores are scaled by log2(e) / sqrt(H), in float32, so a weight is one
exp2. (Scaling the queries beforehand would save a multiplication a score and round them
twice; the estimates do not miss it.) Inside the kernels heads lead and the rows of the batch
lie behind each other: q [N, B * T, H], k and v [K, B * S, H], T and S padded to whole blocks.
"""

from pallas_kernels.packed.call import packed_attention
from pallas_kernels.packed.walk import heads_per_step

__all__ = ["heads_per_step", "packed_attention"]
