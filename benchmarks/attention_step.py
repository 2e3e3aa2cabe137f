"""What attention of one layer costs in a training step, in milliseconds: an ESTIMATE.

    python -m benchmarks.attention_step --tpu v5p v6e
    python -m benchmarks.attention_step --tpu v5e --prefix 5000 --tails 16 --tail 1024

The kernels of packed attention are compiled for chips that are not here, at the shapes of
Qwen2.5-7B, and their cycles per block are counted as `benchmarks.kernels` counts them; the
block list of a row says how many blocks, masked and full, they walk. Forward and backward, with
`remat` as without: a layer that is rematerialised keeps what attention's backward needs.
docs/performance.md says what such figures are worth: compare two of one chip.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.children import Failure, compile_on
from benchmarks.kernels.ours import row_of_a_group
from benchmarks.kernels.programs import MODELS
from benchmarks.kernels.rows import Row
from notepad_jax.planner import chips
from pallas_kernels import aot, packed, schedule, tuning

MODEL = "qwen2.5-7b"
CORES = {"v5p": 2}  # of a chip, if not one: each takes half of the kv heads


def blocks_of(kv_end: np.ndarray, size_q: int, size_k: int) -> dict[str, int]:
    """How many blocks a row's list has, by what a kernel does in them."""
    listed = schedule.packed_schedule(jnp.asarray(kv_end)[None], len(kv_end), size_q, size_k)
    count = int(listed.count)
    masked = int(((np.asarray(listed.flags)[:count] & schedule.PARTIAL) != 0).sum())
    return {"masked": masked, "full": count - masked}


def milliseconds(chip: str, rows: Sequence[Row], blocks: dict[str, int]) -> dict[str, float]:
    """Estimated time of each kernel (by family) over these blocks, on one chip."""
    model = MODELS[MODEL]
    heads, steps = packed.heads_per_step(model.N, model.K)
    per_core = -(-model.K // CORES.get(chip, 1)) * steps
    times: dict[str, float] = {}
    for row in rows:
        seconds = max(row.step_cycles, row.dma_cycles) / chips.CHIPS[chip].clock_hz
        times.setdefault(row.family, 0.0)
        times[row.family] += 1e3 * seconds * per_core * blocks[row.variant]
    return times


def compiled_rows(chip: str) -> list[Row]:
    """The kernels of packed attention, compiled for a chip; raises RuntimeError if they are not."""
    outcomes: Iterator = compile_on(
        chip, [(MODEL, "packed")], None, lambda what: print(what, file=sys.stderr, flush=True)
    )
    rows: list[Row] = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{outcome.program} for {outcome.chip}: {outcome.reason}")
        rows += outcome.rows
    return rows


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0, or 2 if misused."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_step",
        description="What attention of one layer of Qwen2.5-7B costs in a training step: an "
        "estimate out of compiled instructions; nothing runs. 20 s a chip.",
    )
    parser.add_argument("--tpu", nargs="+", metavar="NAME", default=["v5p", "v6e"])
    parser.add_argument("--prefix", type=int, default=5120, help="tokens that all tails share")
    parser.add_argument("--tails", type=int, default=16)
    parser.add_argument("--tail", type=int, default=2048, help="tokens of a tail")
    options = parser.parse_args(arguments)
    unknown = [chip for chip in options.tpu if chip not in chips.CHIPS]
    complaint = aot.missing_compiler()
    if unknown:
        complaint = f"--tpu: {unknown[0]!r} is not one of {', '.join(chips.CHIPS)}"
    if complaint:
        print(complaint, file=sys.stderr)
        return 2
    kv_end = row_of_a_group(options.prefix, [options.tail] * options.tails)
    print(
        f"ESTIMATE: a row of {len(kv_end):,} tokens (prefix {options.prefix:,}, {options.tails} "
        f"tails of {options.tail:,}), one layer of {MODEL}, one chip"
    )
    model = MODELS[MODEL]
    for chip in options.tpu:
        with aot.targeting(chip):
            sizes = tuning.packed_blocks(model.H, model.dtype)
        blocks = blocks_of(kv_end, *sizes)
        times = milliseconds(chip, compiled_rows(chip), blocks)
        parts = ", ".join(f"{name.split()[-1]} {ms:.1f}" for name, ms in times.items())
        print(
            f"{chip}: {sum(times.values()):.1f} ms ({parts}); blocks of {sizes[0]} x {sizes[1]}: "
            f"{blocks['full']} full, {blocks['masked']} masked"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
