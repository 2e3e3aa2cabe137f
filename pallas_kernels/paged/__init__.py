"""Ragged paged attention on TPU: decode, prefill over cached pages, and both in one call.

The engine hands over the tokens of B sequences laid end to end, and a cache cut into pages
(`pages`). Three Pallas kernels do the work (`decode`, `write`, `mixed`) behind one call;
`reference.paged` has their plain-jnp twin.

Every head of a page is a plain tile, so nothing here needs `ref.reshape` or `ref.bitcast`,
and all of it runs under `pltpu.InterpretParams`, race detection included.
"""

from pallas_kernels.paged.call import check_arguments, paged_attention, ragged_paged_attention
from pallas_kernels.paged.sizes import PagedSizes, check_sizes, default_sizes

__all__ = [
    "PagedSizes",
    "check_arguments",
    "check_sizes",
    "default_sizes",
    "paged_attention",
    "ragged_paged_attention",
]
