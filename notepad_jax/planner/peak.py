"""Peak FLOP/s of a run's devices, the denominator of model FLOPs utilization (MFU).

Of an accelerator it is the published peak of dense bfloat16 products, whatever it computes in. A
CPU publishes none, and one core's clock depends on what the others do, so there it is measured,
once and for some 50 ms, with numpy's float32 product: that is as near to the machine's peak as
libraries come, needs no compiling, and is what the process could use at that moment. On a machine
that others use, a CPU's MFU is as vague as that, and may pass 1. A device of other kinds has none.
Above: train; below: `chips`, which has the TPUs' peaks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from notepad_jax.planner.chips import CHIPS

# What jax calls a device -> the chip. A device of v4 and later is a whole chip, but on tpu7x.
TPUS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7x": "tpu7x",
}
# FLOP/s of dense bfloat16 products, out of NVIDIA's data sheets (half of what is said of sparse).
GPUS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
SIDE = 512  # of the matrices that a CPU multiplies: 1 to 2 ms each
LEAST, SECONDS = 3, 0.05  # products, and what they take, of which the fastest counts


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of all devices that compute together."""

    flops: float  # FLOP/s
    name: str  # "4 x TPU v5p, bfloat16, published"

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.2f} TFLOP/s ({self.name})"


def of(devices: Sequence[Any]) -> Peak | None:
    """Returns the peak of `devices`, all of one kind; None where it is not known.

    The devices of one host's CPU are threads of the same cores: its peak is the host's.
    """
    kind, count = devices[0].device_kind, len(devices)
    if devices[0].platform == "cpu":
        hosts = len({device.process_index for device in devices})
        return Peak(hosts * measured(), f"{hosts} x CPU, float32, measured")
    published = GPUS.get(kind)
    if kind in TPUS:
        chip = CHIPS[TPUS[kind]]
        published = chip.peak_flops * chip.cores
    if published is None:
        return None
    return Peak(count * published, f"{count} x {kind}, bfloat16, published")


def measured() -> float:
    """Returns FLOP/s of numpy's product of two float32 matrices, the fastest of some."""
    one = np.ones((SIDE, SIDE), np.float32)
    out, found = np.empty_like(one), []
    while len(found) < LEAST or sum(found) < SECONDS:
        began = time.perf_counter()
        np.matmul(one, one, out=out)
        found.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(found)
