"""Parameters read out of published tensors: folded, stacked, each device its own slices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tensor_files import BF16, linear, tensors, whole, write

from notepad_jax.checkpoint.hf import sharded_loading
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.sharded_loading import Layout
from notepad_jax.checkpoint.hf.storage import StoreProblem

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stacked(tmp_path):
    rng = np.random.default_rng(1)
    named = {f"w{i}": rng.normal(size=(24, 16)).astype(BF16) for i in range(3)}
    named |= {"e": rng.normal(size=(32, 8)).astype(np.float32)}
    write(tmp_path / "out", named, 800)
    return tmp_path / "out", named


def test_long_blocks_are_transposed_in_strips(tmp_path):
    value = np.arange(150 * 6, dtype=np.float32).reshape(150, 6)  # more rows than two strips
    write(tmp_path / "out", {"w": value})
    layout = Layout(("w",), (), (150, 6), (150, 6), (1, 0))
    np.testing.assert_array_equal(whole(Safetensors.open(tmp_path / "out"), layout), value.T)
    flat = Layout(("w",), (), (150, 6), (75, 12), (0, 1))
    found = whole(Safetensors.open(tmp_path / "out"), flat)
    np.testing.assert_array_equal(found, value.reshape(75, 12))


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_a_parameter_is_its_tensors_split_transposed_and_stacked(stacked, dtype):
    folder, named = stacked
    layout = linear((24, 16), (4, 6))
    expected = np.stack([named[f"w{i}"].T.reshape(16, 4, 6) for i in range(3)])
    found = whole(Safetensors.open(folder), layout, dtype)
    assert found.dtype == (dtype or BF16) and found.shape == layout.shape == (3, 16, 4, 6)
    np.testing.assert_array_equal(found, expected.astype(found.dtype))
    for layer in range(3):
        np.testing.assert_array_equal(layout.fold(found[layer]), named[f"w{layer}"])


def test_experts_are_a_second_axis_of_the_stack(tmp_path):
    named = {
        f"{i}.{j}": np.full((3, 2), 10 * i + j, np.float32) for i in range(2) for j in range(4)
    }
    write(tmp_path / "out", named)
    layout = Layout(tuple(named), (2, 4), (3, 2), (3, 2), (1, 0))
    found = whole(Safetensors.open(tmp_path / "out"), layout)
    assert found.shape == (2, 4, 2, 3)
    np.testing.assert_array_equal(found[:, :, 0, 0], [[0, 1, 2, 3], [10, 11, 12, 13]])


SHARDED = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from notepad_jax.checkpoint.hf import sharded_loading
sys.path[:0] = ["tests"]
import tensor_files as t

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
layout = t.linear((24, 16), (4, 6))
found, counting = t.counted(sys.argv[1])
whole = t.whole(found, layout)
counting.take()
told = []
for spec in (P(), P(None, "fsdp"), P(None, "fsdp", "tensor"), P(None, None, "fsdp"),
             P(None, ("fsdp", "tensor"))):
    for budget in (1, 3 * 24 * 16 * 2 // 2, 10**9):
        array = sharded_loading.place(found, layout, NamedSharding(mesh, spec), budget=budget)
        assert array.shape == layout.shape and array.sharding.spec == spec
        np.testing.assert_array_equal(np.asarray(array), whole)
        told.append(counting.take())
print(json.dumps(told))
"""


def test_devices_read_their_own_slices(stacked):
    folder, _ = stacked
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", SHARDED, str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = np.array(json.loads(ran.stdout)).reshape(5, 3)
    whole = 3 * 24 * 16 * 2
    # Whatever the sharding, one pass where the buffers may be as large as the parameter.
    assert told[:, 2].tolist() == [whole] * 5
    # Column slices need every row: a pass per device's slice, or two of half the parameter.
    assert told[:, 0].tolist() == [whole, 4 * whole, 4 * whole, whole, 8 * whole]
    assert told[1, 1] == 2 * whole


def test_placing_needs_no_mesh_and_commits(tmp_path):
    write(tmp_path / "out", tensors())
    layout = Layout(("a",), (), (12, 5), (12, 5), (0, 1))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = sharded_loading.place(Safetensors.open(tmp_path / "out"), layout, sharding, "bfloat16")
    np.testing.assert_array_equal(np.asarray(placed), tensors()["a"].astype(BF16))
    assert placed.committed


def test_a_parameter_must_have_its_shape_and_be_weights(tmp_path):
    write(tmp_path / "out", {"w0": np.zeros((24, 15), BF16), "q": np.zeros((24, 16), np.int8)})
    found = Safetensors.open(tmp_path / "out")
    for names, says in (
        (("w0",), r"'w0' in .*model.safetensors has shape \(24, 15\), its config.json asks for"),
        (("absent",), "has no tensor 'absent'; its config.json asks for it"),
        (("q",), "'q' in .* is I8; weights are read as F32, BF16, F16, so take an unquantised"),
    ):
        with pytest.raises(StoreProblem, match=says) as raised:
            whole(found, linear((24, 16), (4, 6), names))
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="2 names for a stack of"):
        Layout(("a", "b"), (3,), (2,), (2,), (0,))
    with pytest.raises(ValueError, match="cannot be split"):
        Layout(("a",), (), (4, 2), (3, 2), (0, 1))
    with pytest.raises(ValueError, match="no order of the axes"):
        Layout(("a",), (), (4, 2), (4, 2), (0, 0))
