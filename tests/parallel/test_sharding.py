"""Laid out over eight devices, the same numbers come out: `eight` says what is compared.

One process has one set of devices, so every case is a process. The kernels in interpret mode
hold a thread of jax's CPU client at every callback, and devices that wait for one another need
one each: PJRT_NPROC gives the client more threads than this machine has cores.
"""

import os
import subprocess
import sys
from pathlib import Path

import eight
import jax
import numpy as np
import pytest

from notepad_jax.grpo import micro_batches
from notepad_jax.parallel import mesh

DEVICES, MOST_SECONDS = 8, 500  # it takes a tenth of that


def agreed(*arguments: object) -> None:
    tests = Path(__file__).parents[1]
    # Left free, XLA omits rounding to bfloat16 within what it fuses, and shards fuse otherwise.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
    env = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={DEVICES}",
        "PJRT_NPROC": str(2 * DEVICES),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}",
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "eight.py", *map(str, arguments)],
        env=env, capture_output=True, text=True, timeout=MOST_SECONDS,
    )  # fmt: skip
    assert done.stdout.strip().endswith("agreed"), done.stderr[-3000:]


@pytest.mark.slow
def test_rows_over_four_and_heads_over_two_are_one_device():
    agreed("reference", "update", "dense", 4, 2)


@pytest.mark.slow
def test_in_bfloat16_gradients_are_summed_over_devices_in_float32():
    agreed("reference", "sums", "untied", 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "what", "case", "fsdp", "tensor"),
    [
        ("interpret", "update", "lora", 8, 1),
        ("interpret", "update", "untied", 4, 2),
        ("interpret", "update", "experts", 2, 4),
        ("interpret", "update", "windows", 4, 2),
        ("reference", "sums", "untied", 4, 2),
        ("reference", "sums", "untied", 2, 4),
        ("reference", "sums", "lora", 4, 2),
        ("reference", "sums", "experts", 4, 2),
        ("interpret", "sums", "dense", 4, 2),
        ("interpret", "engine", "dense", 2, 4),
        ("interpret", "engine", "windows", 4, 2),
        ("triton-interpret", "update", "lora", 8, 1),
        ("triton-interpret", "update", "windows", 4, 2),
        ("triton-interpret", "engine", "windows", 4, 2),
        ("reference", "engine", "experts", 2, 4),
        ("reference", "engine", "lora", 2, 4),
        ("reference", "text", "dense", 4, 2),
    ],
)
def test_the_kernels_over_a_mesh_are_one_device(kernels, what, case, fsdp, tensor):
    agreed(kernels, what, case, fsdp, tensor)


# ---------------------------------------------------------------- what cannot be split


def test_devices_that_cannot_be_split():
    with pytest.raises(ValueError, match="cannot be split into tensor groups of 3"):
        mesh.make(tensor=3)


def test_a_dimension_that_does_not_divide_is_named_with_both_numbers():
    four = jax.sharding.AbstractMesh((1, 4), mesh.AXES)
    with pytest.raises(ValueError, match="6 heads cannot be split over tensor=4"):
        mesh.sharding(four, ("heads",), (6,), mesh.TRAINING)
    with pytest.raises(ValueError, match="'head' has no rule"):
        mesh.sharding(four, ("head",), (8,), mesh.TRAINING)


def test_rows_that_devices_cannot_share_are_refused():
    with pytest.raises(ValueError, match="micro_batch_rows is 4, which 3 devices cannot share"):
        micro_batches.check_parts(4, 3)


def test_layouts_that_are_the_same_compare_equal():
    """Axes of one device and whole dimensions at the end are not named."""
    row = jax.sharding.AbstractMesh((1, 4), mesh.AXES)
    spec = mesh.sharding(row, ("embed", "heads", None), (8, 8, 3), mesh.TRAINING).spec
    assert tuple(spec) == (None, "tensor")
    assert tuple(mesh.sharding(mesh.one(), ("heads",), (8,), mesh.TRAINING).spec) == ()


# ---------------------------------------------------------------- rows in parts


def test_places_count_within_a_part_and_come_back():
    """Two rows a part: the second part's places begin again, and padding is each part's own."""
    batch = eight.batch(rows=8, width=64)
    micros = micro_batches.split(batch, rows=4, parts=2)
    size = len(micros[0].before) // 2
    trained = batch.weights > 0
    for number, micro in enumerate(micros):
        for part in range(2):
            here = slice(number * 4 + part * 2, number * 4 + part * 2 + 2)
            count = np.count_nonzero(trained[here])
            own = slice(part * size, part * size + count)
            hidden = batch.tokens[here].reshape(-1)[micro.before[own] + 1]
            np.testing.assert_array_equal(hidden, micro.labels[own])
            assert not micro.weights[part * size + count : (part + 1) * size].any()
    found = [micro.weights for micro in micros]
    np.testing.assert_array_equal(micro_batches.put_back(batch, 4, 2, found), batch.weights)
