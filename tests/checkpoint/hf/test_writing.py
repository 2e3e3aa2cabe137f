"""What is written is read byte for byte, by others too; what does not fit is not written."""

import dataclasses
import json
import os

import numpy as np
import pytest
import safetensors.numpy
import tensorstore as ts
from tensor_files import tensors, write

from notepad_jax.checkpoint.hf import storage, writing
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.storage import StoreProblem
from notepad_jax.checkpoint.hf.writing import PlannedTensor


@pytest.mark.parametrize("part_bytes", [10**9, 200, 1])
def test_what_is_written_is_read_byte_for_byte(tmp_path, part_bytes):
    named = tensors()
    done = write(tmp_path / "out", named, part_bytes)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(done.files)
    assert (storage.INDEX in done.files) == (part_bytes < 10**9)
    found = Safetensors.open(tmp_path / "out")
    assert set(found.tensors) == set(named)
    for name, value in named.items():
        back = found.read(name)
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert back.tobytes() == value.tobytes()
    # The reference implementation reads the same, which proves the format.
    reference = {}
    for file in done.files:
        if file.endswith(".safetensors"):
            reference |= safetensors.numpy.load_file(tmp_path / "out" / file)
    assert {n: v.tobytes() for n, v in reference.items()} == {
        n: v.tobytes() for n, v in named.items()
    }
    write(tmp_path / "again", named, part_bytes)
    for file in done.files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    sizes = [(tmp_path / "out" / f).stat().st_size for f in done.files if "model-" in f]
    if part_bytes == 200:  # a: 240 bytes, alone; b + c: 62; d would make it 170
        index = json.loads((tmp_path / "out" / storage.INDEX).read_text())
        assert len(sizes) == 2 and index["metadata"]["total_size"] == done.bytes == 410
        assert index["weight_map"]["a"] == "model-00001-of-00002.safetensors"


def test_a_bucket_is_read_and_written_the_same_way(monkeypatch):
    kvstore = ts.KvStore.open("memory://bucket/policy/").result()  # as gs://, without a network
    monkeypatch.setattr(storage, "open_kvstore", lambda source: kvstore)
    order = []
    real = Safetensors.of
    write("gs://bucket/policy", tensors(), 100, wrote=lambda t: order.append(t.name))
    found = real("gs://bucket/policy", kvstore)
    for name, value in tensors().items():
        assert found.read(name).tobytes() == value.tobytes()
    assert order == list(tensors())
    with pytest.raises(StoreProblem, match="gs://bucket/policy is not empty; choose another"):
        write("gs://bucket/policy", tensors())
    with pytest.raises(StoreProblem, match="cannot be overwritten"):
        write("gs://bucket/policy", tensors(), overwrite=True)
    kvstore.delete_range(ts.KvStore.KeyRange()).result()
    with pytest.raises(ZeroDivisionError):
        write("gs://bucket/policy", tensors(), 1, wrote=lambda t: 1 // (t.name != "c"))
    assert kvstore.list().result() == []


def test_what_does_not_match_its_plan_is_not_written(tmp_path):
    plan = [PlannedTensor("x", np.dtype(np.float32), (2, 2))]
    for value in (np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float64)):
        with pytest.raises(StoreProblem, match=r"planned was float32\[2, 2\]"):
            writing.write(tmp_path / "out", plan, lambda name, value=value: value, {})
    with pytest.raises(ValueError, match="two tensors have one name"):
        writing.write(tmp_path / "out", plan * 2, lambda name: np.zeros((2, 2), np.float32), {})
    with pytest.raises(ValueError, match="no name for a file"):
        writing.write(tmp_path / "out", plan, lambda name: None, {"../x": b""})
    with pytest.raises(ValueError, match="complex64, which safetensors do not have"):
        complex_plan = [dataclasses.replace(plan[0], dtype=np.dtype(np.complex64))]
        writing.write(tmp_path / "out", complex_plan, lambda name: None, {})
    assert os.listdir(tmp_path) == []
