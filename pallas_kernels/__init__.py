"""Packed and paged attention and token logprobs: Pallas kernels on TPUs and GPUs, else plain jnp.

This package imports jax and nothing of notepad_jax: it can be lifted out, benchmarked and
replaced. The policy, the engine and the trainer call the names below and nothing else;
`dispatch` chooses the implementation, docs/kernels.md explains the mask and the schedule.
"""

from pallas_kernels.dispatch import (
    BACKENDS,
    backend,
    cache_head_size,
    import_lowering,
    on_gpu,
    packed_attention,
    packed_schedule,
    paged_attention,
    token_logprob,
    use,
    using,
)
from pallas_kernels.pages import CACHE_DTYPES, Pages, PageTables
from pallas_kernels.tiles import SAVE_ATTENTION

__all__ = [
    "BACKENDS",
    "CACHE_DTYPES",
    "SAVE_ATTENTION",
    "PageTables",
    "Pages",
    "backend",
    "cache_head_size",
    "import_lowering",
    "on_gpu",
    "packed_attention",
    "packed_schedule",
    "paged_attention",
    "token_logprob",
    "use",
    "using",
]
