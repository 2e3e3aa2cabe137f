"""What importing and exporting a billion parameters costs: seconds and host memory.

    python -m benchmarks.import_hf [--layers 16] [--devices 8] [--folder DIR] [--json]

Writes a random bfloat16 Llama of 1.1 billion parameters (2.2 GB) tensor by tensor, reads it
in a new process onto a mesh of 8 CPU devices, imports it as a checkpoint of ours, exports that
in another new process, and deletes everything (7 GB of disk).

Import: there the devices' memory is the host's, so what the import itself holds is the peak
less what the process held before and less what the devices hold at the end. It must stay below
1.3 times one device's share plus the largest tensor: 323 MB were held where 628 are allowed,
in 4.4 CPU seconds (7 wall seconds on a busy 2-core AMD EPYC). With accelerators the host has
one share's buffers and the requests in flight (64 MB) instead.

Export: 502 MB beyond what the process held before, in 18 CPU seconds (26 wall seconds on two
cores shared with five other jobs), checksums of all leaves included; the largest tensor is the
embedding of 268 MB, which is in memory beside its compressed form. With a vocabulary of 4,096
the largest tensor is one of a layer, 34 MB, and the export held 269 MB, most of it what the
allocator keeps of blocks that were let go; it hardly grows with the number of layers. When
a leaf's layers were one chunk, the two were 1,243 MB and 1,162 MB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.writing import PlannedTensor, write
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh
from notepad_jax.programs import convert, export
from notepad_jax.telemetry.screen import SilentScreen

CONFIG = PolicyConfig(
    vocab_size=65536, width=2048, layers=16, heads=32, kv_heads=8, head_size=64,
    feed_forward=8192, rope_theta=5e5, rms_eps=1e-5, qk_norm=False, attention_bias=False,
    tied_embeddings=True, valid_vocab=65536, dtype="bfloat16",
)  # fmt: skip


def make(config: PolicyConfig, folder: Path, part_bytes: int) -> None:
    """Writes a random checkpoint; one tensor is in memory at a time."""
    rng = np.random.default_rng(0)
    plan = [
        PlannedTensor(name, np.dtype(ml_dtypes.bfloat16), layout.published)
        for layout in huggingface.layouts(config).values()
        for name in layout.names
    ]
    shapes = {tensor.name: tensor.shape for tensor in plan}

    def value(name: str) -> np.ndarray:
        bits = rng.integers(0, 1 << 16, shapes[name], np.uint16)
        bits &= 0x83FF  # sign, mantissa and the low exponent bits:
        bits |= 0x3C00  # magnitudes from 2**-7 to 2
        return bits.view(ml_dtypes.bfloat16)

    text = json.dumps(huggingface.write_config(config, "bfloat16")).encode()
    write(folder, plan, value, {huggingface.CONFIG: text}, part_bytes)


def peak_bytes() -> int:
    """Returns the most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes() -> int:
    """Returns the memory that this process holds now (where there is no /proc: its peak)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(folder: str) -> dict[str, Any]:
    """Imports `folder` onto all devices; runs in a process of its own."""
    config, store = huggingface.open_policy(folder)
    layout = parameters.shardings(config, mesh.make(), mesh.TRAINING)
    jax.block_until_ready([jax.device_put(np.zeros(8), d) for d in jax.devices()])  # backend is up
    before, wall, cpu = held_bytes(), time.perf_counter(), time.process_time()
    params = jax.block_until_ready(huggingface.import_params(config, store, layout, "bfloat16"))
    wall, cpu, peak = time.perf_counter() - wall, time.process_time() - cpu, peak_bytes()
    held = sum(s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards)
    share = huggingface.largest_share(config, layout, "bfloat16")
    largest = max(t.stop - t.start for t in store.tensors.values())
    last = config.layers - 1
    checked = store.read(f"model.layers.{last}.mlp.down_proj.weight")
    same = np.array_equal(np.asarray(params["layers"]["down"][last]).T, checked)
    return {
        "parameters": parameters.count(config),
        "devices": jax.device_count(),
        "bytes": sum(math.prod(t.shape) * t.dtype.itemsize for t in store.tensors.values()),
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "before_bytes": before,
        "peak_bytes": peak,
        "devices_bytes": held,
        "import_bytes": peak - before - held,
        "share_bytes": share,
        "largest_tensor_bytes": largest,
        "limit_bytes": int(1.3 * share) + largest,
        "one_tensor_equal": bool(same),
    }


def save(folder: str) -> dict[str, Any]:
    """Imports `folder` as a step of ours beside it; the step is what `measure_export` reads."""
    began = time.perf_counter()
    convert.import_hf(folder, Path(folder).parent / "mine", SilentScreen())
    return {"save_wall_seconds": time.perf_counter() - began}


def measure_export(folder: str) -> dict[str, Any]:
    """Exports the step beside `folder`; runs in a process of its own."""
    source, target = Path(folder).parent / "mine", Path(folder).parent / "back"
    before, wall, cpu = held_bytes(), time.perf_counter(), time.process_time()
    export.export_hf(source, str(target), SilentScreen(), "bfloat16")
    wall, cpu, peak = time.perf_counter() - wall, time.process_time() - cpu, peak_bytes()
    read, written = Safetensors.open(folder), huggingface.open_policy(target)[1]
    return {
        "export_wall_seconds": wall,
        "export_cpu_seconds": cpu,
        "export_before_bytes": before,
        "export_peak_bytes": peak,
        "export_bytes": peak - before,
        "export_tensors_equal": all(
            np.array_equal(read.read(name), written.read(name)) for name in read.tensors
        ),
    }


STAGES = {"import": measure, "save": save, "export": measure_export}


def run(config: PolicyConfig, devices: int, parent: str | None, part_bytes: int) -> dict[str, Any]:
    """Makes a checkpoint in a temporary folder; every stage is a new process; deletes it."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=parent, prefix="import_hf-") as temporary:
        folder = Path(temporary) / "policy"
        make(config, folder, part_bytes)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        for stage in STAGES:
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.import_hf", "--stage", stage, str(folder)],
                env=environment, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            found |= json.loads(ran.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=CONFIG.layers)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--folder", help="where 7 GB are free (default: the temporary folder)")
    parser.add_argument("--part-bytes", type=int, default=10**9)
    parser.add_argument("--stage", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.stage:
        stage, folder = options.stage
        print(json.dumps(STAGES[stage](folder)))
        return
    config = dataclasses.replace(CONFIG, layers=options.layers)
    found = run(config, options.devices, options.folder, options.part_bytes)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        short, unit = name.removesuffix("_bytes").removesuffix("_seconds"), ""
        if name.endswith("bytes"):
            value, unit = value / 1e6, " MB"
        elif name.endswith("seconds"):
            unit = " s"
        print(f"{short:>20}  {value:,.1f}{unit}" if unit else f"{short:>20}  {value:,}")


if __name__ == "__main__":
    main()
