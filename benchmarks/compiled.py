"""What the hot programs need of a GPU that is not here: memory and traffic, as XLA compiles them.

    pip install --no-deps --target cuda-plugin jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2
    python -m benchmarks.compiled --plugin cuda-plugin [--programs update decode-8] [--json]

The programs of `benchmarks.accelerator` (Qwen2.5-7B, bfloat16) are compiled for an H200 with
nothing but those two wheels (130 MB; of your jax's version): no driver, no GPU, nothing runs.
That they compile is the first result. Then, per program: bytes of device memory (arguments,
and what it needs beside them) and, by part, bytes moved and FLOPs of matrix products
(`notepad_jax.planner.hlo`), beside what the mathematics needs (`benchmarks.needs`). The update is
one micro-batch of one row, decoding is one step of all slots.

What it cannot say: times. Kernels are not tuned (that needs the device), so the choice of
libraries and splits differs from a real run; caches, launches and waiting are not in it. A
floor in milliseconds is given for comparing two programs, never for a promise: every kernel at
the copy bandwidth and the matrix rate once measured on such a machine with other code
(4.3 TB/s, 790 TFLOP/s; half of that for products of float32, which go through tf32).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies

import pallas_kernels
from benchmarks import accelerator, needs
from benchmarks.sharing import UPDATE
from notepad_jax.engine import launches
from notepad_jax.grpo import update
from notepad_jax.model import lora, parameters
from notepad_jax.parallel import mesh, place
from notepad_jax.planner import hlo
from pallas_kernels import Pages

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.3e12, 790e12
# NVIDIA's compute capability 8.9 (Ada: GeForce 40, L4) in what a kernel must fit.
ADA = {
    "major: 9 feature_extension: ACCELERATED_FEATURES": "major: 8 minor: 9",
    "shared_memory_per_core: 233472": "shared_memory_per_core: 102400",
    "shared_memory_per_block_optin: 232448": "shared_memory_per_block_optin: 101376",
}
PARTS = ("attention", "feed_forward", "token_logprob")  # named scopes; the rest is "other"
WEIGHT_COPIES = "copies of weights"

# What the compiler asks of a device, for NVIDIA's H200.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 memory_bandwidth: 4800000000000 device_memory_size: 151397597184
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile, and the least that its mathematics needs."""

    lowered: Callable[..., jax.stages.Lowered]
    arguments: tuple[Any, ...]  # abstract
    flops: float
    moved: float  # bytes; 0 where they are not what counts


def update_program(shape: accelerator.Shape, remat: bool) -> Program:
    """Loss and gradient of adapters over one row, added to the total: a micro-batch of `learn`."""
    config = shape.config
    batch = accelerator.make_batch(config, dataclasses.replace(shape.sizes, rows=1))
    adapted = lora.Lora(shape.sizes.rank, float(shape.sizes.rank), lora.TARGETS)
    settings = dataclasses.replace(UPDATE, micro_batch_rows=1, remat=remat)
    frozen, masters = jax.eval_shape(
        lambda base, key: lora.partition(config, base, adapted, key),
        parameters.abstract_params(config, "bfloat16"),
        jax.random.key(0),
    )

    def lowered(masters: Any, frozen: Any) -> jax.stages.Lowered:
        most = int((batch.weights > 0).sum())
        row = batch.tokens.shape[1]
        return update.lowered(config, optax.sgd(0), settings, masters, frozen, row, most)[
            "accumulate"
        ]

    return Program(lowered, (masters, frozen), needs.update_flops(config, batch, True), 0)


def decode_program(shape: accelerator.Shape, batch: int, sharers: int) -> Program:
    config, sizes = shape.config, shape.sizes
    count, tables, slots = accelerator.decode_layout(config, sizes, batch, sharers)

    def run(params: Any, pages: Any, tables: Any, slots: Any) -> Any:
        return launches.generate(config, params, pages, tables, slots, 1)

    moved = needs.decode_bytes(config, batch // sharers * sizes.context)
    params = parameters.unstacked(config, parameters.abstract_params(config, "bfloat16"))
    arguments = params, _pages(shape, count), tables, slots
    return Program(_jitted(run, donated=1), arguments, 0, moved)


def prefill_program(shape: accelerator.Shape) -> Program:
    config, sizes = shape.config, shape.sizes
    count = sizes.chunk // sizes.page
    ids, table = np.zeros((1, sizes.chunk), np.int32), np.zeros((1, count), np.int32)

    def run(params: Any, pages: Any, ids: Any, table: Any) -> Any:
        return accelerator.prefill(config, params, pages, ids, table)

    arguments = parameters.abstract_params(config, "bfloat16"), _pages(shape, count), ids, table
    flops = needs.prefill_flops(config, sizes.chunk)
    return Program(_jitted(run, donated=1), arguments, flops, 0)


def _jitted(function: Callable[..., Any], donated: int) -> Callable[..., jax.stages.Lowered]:
    traced = jax.jit(function, donate_argnums=donated).trace
    return lambda *arguments: traced(*arguments).lower(lowering_platforms=("cuda",))


def _pages(shape: accelerator.Shape, count: int) -> Pages:
    c = shape.config
    size = pallas_kernels.cache_head_size(c.head_size)
    data = c.layers * count, 2, c.kv_heads, shape.sizes.page, size
    return Pages(jax.ShapeDtypeStruct(data, jnp.bfloat16), count)


PROGRAMS: dict[str, Callable[[accelerator.Shape], Program]] = {
    "update": lambda shape: update_program(shape, False),
    "update-remat": lambda shape: update_program(shape, True),
    "decode-8": lambda shape: decode_program(shape, 8, 1),
    "decode-32": lambda shape: decode_program(shape, 32, 1),
    "decode-32-shared": lambda shape: decode_program(shape, 32, 16),
    "prefill": prefill_program,
}


def describe(name: str, program: Program, device: Any) -> dict[str, Any]:
    """Compiles one program for `device` and reads its cost out of it."""
    sharding = place.replicated(mesh.make(devices=[device]))
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), program.arguments
    )
    compiled = program.lowered(*placed).compile(compiler_options={"xla_gpu_autotune_level": 0})
    memory = compiled.memory_analysis()
    parts: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.Counter())
    for cost in hlo.instructions(compiled.as_text()):
        seconds = max(cost.moved / BYTES_PER_SECOND, (cost.flops + cost.wide) / FLOPS_PER_SECOND)
        found = dict(moved=cost.moved, flops=cost.flops, wide=cost.wide, floor=seconds)
        parts[part(cost)].update(found)
    return {
        "program": name,
        "argument_bytes": memory.argument_size_in_bytes,
        "further_bytes": memory.temp_size_in_bytes,
        "needed_flops": program.flops,
        "needed_bytes": program.moved,
        "parts": {key: dict(value) for key, value in parts.items()},
    }


def part(cost: hlo.Cost) -> str:
    """Which part of the program an instruction belongs to; a scan's slices are their own."""
    for name in PARTS:
        if name in cost.scope:
            return name
    sliced = cost.scope.endswith(("jit(dynamic_index_in_dim)/dynamic_slice", "squeeze"))
    return WEIGHT_COPIES if sliced else "other"


def lines(row: dict[str, Any]) -> list[str]:
    total = collections.Counter()
    for found in row["parts"].values():
        total.update(found)
    told = [
        f"{row['program']}: {row['argument_bytes'] / 1e9:.1f} GB of arguments, "
        f"{row['further_bytes'] / 1e9:.1f} GB beside; needs at least "
        + (f"{row['needed_flops'] / 1e12:.1f} TFLOP" if row["needed_flops"] else "")
        + (f"{row['needed_bytes'] / 1e9:.1f} GB moved" if row["needed_bytes"] else "")
    ]
    order = sorted(row["parts"].items(), key=lambda item: -item[1]["floor"])
    for name, found in [*order, ("in all", total)]:
        told.append(
            f"    {name:18}{found['moved'] / 1e9:9.1f} GB {found['flops'] / 1e12:8.1f} TFLOP "
            f"({found['wide'] / 1e12:5.1f} float32){1e3 * found['floor']:10.1f} ms at least"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plugin", required=True, metavar="DIR", help="where the wheels were put")
    parser.add_argument("--shape", choices=accelerator.SHAPES, default="7b")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument(
        "--ada", action="store_true", help="for a GPU with 99 KiB of shared memory: does all fit?"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not os.path.isdir(os.path.join(options.plugin, "jax_plugins", "xla_cuda13")):
        parser.error(f"{options.plugin} has no jax_plugins/xla_cuda13; see the first command above")
    sys.path.insert(0, options.plugin)  # jax looks for plugins when it first needs a backend
    jax.config.update("jax_platforms", "cpu")  # or jax looks for the GPU's libraries
    pallas_kernels.use("triton")  # what "auto" takes on a GPU
    target = H200
    for large, small in ADA.items() if options.ada else ():
        target = target.replace(large, small)
    (device,) = topologies.get_topology_desc(
        "h200", "cuda", target_config=target, topology="1x1x1"
    ).devices
    shape, rows = accelerator.SHAPES[options.shape], []
    for name in options.programs:
        rows.append(describe(name, PROGRAMS[name](shape), device))
        if not options.json:
            print("\n".join(lines(rows[-1])), flush=True)
    if options.json:
        print(json.dumps({"jax": jax.__version__, "device": device.device_kind, "rows": rows}))


if __name__ == "__main__":
    main()
