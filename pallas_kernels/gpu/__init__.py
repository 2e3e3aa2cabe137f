"""Kernels for GPUs, lowered through Triton: packed and paged attention."""

from pallas_kernels.gpu.packed import blocks, packed_attention
from pallas_kernels.gpu.paged import attend_to_pages
from pallas_kernels.gpu.tiles import power_of_two

__all__ = ["attend_to_pages", "blocks", "packed_attention", "power_of_two"]
