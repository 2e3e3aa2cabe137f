"""TPU chips: what one core of each is said to do, as plans and estimates divide by it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TensorCore's specification. Peaks are Google's published ones, divided by a chip's cores.

    What follows `cores` is of a device, as jax counts them: one core, on v5p two.
    """

    name: str
    peak_flops: float  # bf16 FLOP/s
    hbm_bytes: float  # byte/s
    mxus: int  # matrix units
    mxu_size: int  # rows and columns of one
    rows_per_cycle: int  # rows of the left operand that a matrix unit takes in a cycle
    cores: int  # TensorCores of a device
    hbm_size: int  # bytes that the compiler lets a program use
    ici_bytes: float  # byte/s that a device sends, over all its links to other chips

    @property
    def flops_per_cycle(self) -> int:
        return 2 * self.mxus * self.mxu_size**2 * self.rows_per_cycle

    @property
    def clock_hz(self) -> float:
        """The clock at which the published peak is reached."""
        return self.peak_flops / self.flops_per_cycle

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bytes / self.clock_hz


# cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}: bf16 peak and HBM bandwidth of a chip; the
# number of matrix units is also what the compiler's tables of capacity say (4, 4, 2, 2).
# Two rows a cycle on v6e and tpu7x is what their peak and two 256 x 256 units imply at a
# clock near v5p's. Links: half of the published bidirectional bandwidth of a chip (400, 1,200, 800
# and 1,200 GB/s). Usable HBM is what libtpu 0.0.42 says when a program exceeds it.
GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 819e9, 4, 128, 1, cores=1, hbm_size=int(15.75 * GIB), ici_bytes=200e9),
        Chip("v5p", 459e12 / 2, 2765e9 / 2, 4, 128, 1, 2, int(95.74 * GIB), 600e9),
        Chip("v6e", 918e12, 1640e9, 2, 256, 2, 1, int(31.25 * GIB), 400e9),
        Chip("tpu7x", 2307e12 / 2, 7380e9 / 2, 2, 256, 2, 1, int(94.75 * GIB), 300e9),
    )
}
