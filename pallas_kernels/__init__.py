"""Ragged attention and token logprobs: the operations the time goes into.

This package imports jax and nothing of notepad_jax: it can be lifted out, benchmarked and
replaced. The policy, the engine and the trainer call the names below and nothing else;
`reference` holds the plain-jnp implementations, `schedule` the block lists they walk,
`pages` the layout of the key-value cache.
"""

from pallas_kernels.pages import Pages, PageTables
from pallas_kernels.reference import packed_attention, paged_attention, token_logprob
from pallas_kernels.schedule import packed_schedule

__all__ = [
    "PageTables",
    "Pages",
    "packed_attention",
    "packed_schedule",
    "paged_attention",
    "token_logprob",
]
