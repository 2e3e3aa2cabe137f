"""What this machine can do at the shapes in use: matrix products and memory, one core.

    taskset -c 0 python -m benchmarks.floor [--json]

GFLOP/s of a float32 product of `rows` x width by width x feed-forward, by XLA, for the starter
(128 x 256), a 135M (576 x 1,536) and a 0.5B (896 x 4,864): one row is a decode step of one reading,
8 and 32 of so many, 512 a prefilled chunk. GB/s of reading an array of 256 MB once (a sum), which
is what a decode step of one row is bound by. By CPU seconds, the best of several times: a floor is
what is possible, and other work can only hide it. A phase's CPU seconds over its
FLOPs at these rates is the multiple that docs/performance.md names (`real_model` measures its own,
layer by layer).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = {"starter": (128, 256), "135M": (576, 1536), "0.5B": (896, 4864)}
ROWS = (1, 8, 32, 512)
BYTES = 256 * 2**20
SECONDS = 0.2  # of each, several times over
TIMES = 5


def rate(work: Callable[[], object]) -> float:
    """Times a CPU second that `work` can be done: the best of TIMES tries of some calls each."""
    work()
    calls, took = 1, 0.0
    while took < SECONDS / TIMES:
        calls, took = calls * 2, _seconds(work, calls * 2)
    return calls / min(took, *(_seconds(work, calls) for _ in range(TIMES - 1)))


def _seconds(work: Callable[[], object], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        work()
    return time.process_time() - began


def measure(shapes: dict[str, tuple[int, int]], rows: Sequence[int], size: int) -> dict[str, float]:
    """GFLOP/s by shape and rows, and GB/s of memory."""
    found, rng = {}, np.random.default_rng(0)
    product = jax.jit(jnp.matmul)
    for name, (width, out) in shapes.items():
        b = jnp.asarray(rng.standard_normal((width, out), np.float32))
        for n in rows:
            a = jnp.asarray(rng.standard_normal((n, width), np.float32))
            made = rate(lambda a=a, b=b: product(a, b).block_until_ready())
            found[f"{name}, {n} rows, GFLOP/s"] = 2e-9 * n * width * out * made
    array = np.ones(size // 4, np.float32)
    found["memory, GB/s"] = 1e-9 * size * rate(array.sum)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    said = parser.parse_args(argv)
    found = measure(SHAPES, ROWS, BYTES)
    if said.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:36}{value:10.1f}")


if __name__ == "__main__":
    main()
