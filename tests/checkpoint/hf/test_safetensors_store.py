"""Safetensors by byte range: what is read, what is refused, and that nothing half is left."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.checkpoint.hf import safetensors_store as store
from notepad_jax.checkpoint.hf.safetensors_store import Layout, Planned, Safetensors, StoreProblem

ROOT = Path(__file__).parents[3]
BF16 = np.dtype(ml_dtypes.bfloat16)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)  # noqa: E731
    return {
        "a": draw(12, 5).astype(np.float32),
        "b": draw(7).astype(BF16),
        "c": draw(2, 3, 4).astype(np.float16),
        "d": draw(9, 6).astype(BF16),
    }


def write(folder, named, part_bytes=store.PART_BYTES, **options):
    plan = [Planned(name, value.dtype, value.shape) for name, value in named.items()]
    return store.write(
        folder,
        plan,
        named.__getitem__,
        {"config.json": b'{"model_type": "x"}\n'},
        part_bytes,
        **options,
    )


class Counting:
    """A key-value store that counts the bytes asked for."""

    def __init__(self, kvstore):
        self.kvstore, self.ranges = kvstore, []

    def read(self, key, byte_range=None):
        if byte_range is not None:
            self.ranges.append((key, byte_range.start, byte_range.stop))
        return self.kvstore.read(key, byte_range=byte_range)

    def list(self):
        return self.kvstore.list()

    def take(self):
        ranges, self.ranges = self.ranges, []
        return sum(stop - start for _, start, stop in ranges)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("part_bytes", [10**9, 200, 1])
def test_what_is_written_is_read_byte_for_byte(tmp_path, part_bytes):
    named = tensors()
    done = write(tmp_path / "out", named, part_bytes)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(done.files)
    assert (store.INDEX in done.files) == (part_bytes < 10**9)
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
        index = json.loads((tmp_path / "out" / store.INDEX).read_text())
        assert len(sizes) == 2 and index["metadata"]["total_size"] == done.bytes == 410
        assert index["weight_map"]["a"] == "model-00001-of-00002.safetensors"


def test_files_of_the_reference_implementation_are_read(tmp_path):
    named = tensors() | {"scalar": np.array(2.5, np.float32), "none": np.zeros((0, 3), BF16)}
    safetensors.numpy.save_file(named, tmp_path / store.WEIGHTS)
    found = Safetensors.open(tmp_path)
    for name, value in named.items():
        assert found.read(name).tobytes() == value.tobytes()
        assert found.read(name).shape == value.shape


def test_a_bucket_is_read_and_written_the_same_way(monkeypatch):
    kvstore = ts.KvStore.open("memory://bucket/policy/").result()  # as gs://, without a network
    monkeypatch.setattr(store, "open_kvstore", lambda source: kvstore)
    order = []
    real = store.Safetensors.of
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


def test_links_and_odd_names_are_followed(tmp_path):
    blob = tmp_path / "blobs" / "0123abcd"  # as huggingface_hub's cache lays it out
    blob.parent.mkdir()
    safetensors.numpy.save_file(tensors(), blob)
    folder = tmp_path / "100% odd #é?"
    folder.mkdir()
    (folder / store.WEIGHTS).symlink_to(blob)
    np.testing.assert_array_equal(Safetensors.open(folder).read("a"), tensors()["a"])


# ---------------------------------------------------------------- bytes asked for


def counted(folder):
    counting = Counting(store.open_kvstore(folder))
    found = Safetensors.of(str(folder), counting)
    return found, counting


def test_opening_reads_headers_only(tmp_path):
    named = {"big": np.zeros((1000, 100), np.float32)}
    write(tmp_path / "out", named)
    header = int.from_bytes((tmp_path / "out" / store.WEIGHTS).read_bytes()[:8], "little")
    _, counting = counted(tmp_path / "out")
    assert counting.take() == 8 + header + 2  # and is the last byte there, and none after it


def test_a_slice_reads_its_rows_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK_BYTES", 400)
    monkeypatch.setattr(store, "IN_FLIGHT_BYTES", 800)
    value = np.arange(64 * 25, dtype=np.float32).reshape(64, 25)
    write(tmp_path / "out", {"x": value})
    found, counting = counted(tmp_path / "out")
    counting.take()
    np.testing.assert_array_equal(found.read("x", [slice(8, 16)]), value[8:16])
    assert max(stop - start for _, start, stop in counting.ranges) == 400
    assert counting.take() == 8 * 25 * 4
    np.testing.assert_array_equal(found.read("x", [slice(3, 9), slice(20, None)]), value[3:9, 20:])
    assert counting.take() == 6 * 25 * 4
    np.testing.assert_array_equal(found.read("x", [slice(-2, None)]), value[-2:])
    assert found.read("x", [slice(5, 5)]).shape == (0, 25)
    with pytest.raises(ValueError, match="step 2"):
        found.read("x", [slice(0, 8, 2)])
    with pytest.raises(ValueError, match="3 slices for the 2 axes"):
        found.read("x", [slice(None)] * 3)


def test_few_bytes_are_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK_BYTES", 100)
    monkeypatch.setattr(store, "IN_FLIGHT_BYTES", 350)
    value = np.arange(1000, dtype=np.float32).reshape(100, 10)
    write(tmp_path / "out", {"x": value})
    found, counting = counted(tmp_path / "out")
    flying, peak = 0, 0

    def ask(key, byte_range=None):
        nonlocal flying, peak
        flying += byte_range.stop - byte_range.start
        peak = max(peak, flying)
        asked = kvstore.read(key, byte_range=byte_range)

        def result():
            nonlocal flying
            flying -= byte_range.stop - byte_range.start
            return asked.result()

        return SimpleNamespace(result=result)

    kvstore, counting.read = counting.kvstore, ask
    np.testing.assert_array_equal(found.read("x"), value)
    assert 240 <= peak <= 350  # runs ahead, and not far


# ---------------------------------------------------------------- parameters


def linear(published, out_axes, names=("w0", "w1", "w2")):
    """A stack of published [out, in] matrices, out split into `out_axes`."""
    unfolded = (*out_axes, published[1])
    n = len(out_axes)
    return Layout(names, (len(names),), published, unfolded, (n, *range(n)))


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
    np.testing.assert_array_equal(store.read(Safetensors.open(tmp_path / "out"), layout), value.T)
    flat = Layout(("w",), (), (150, 6), (75, 12), (0, 1))
    found = store.read(Safetensors.open(tmp_path / "out"), flat)
    np.testing.assert_array_equal(found, value.reshape(75, 12))


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_a_parameter_is_its_tensors_split_transposed_and_stacked(stacked, dtype):
    folder, named = stacked
    layout = linear((24, 16), (4, 6))
    expected = np.stack([named[f"w{i}"].T.reshape(16, 4, 6) for i in range(3)])
    found = store.read(Safetensors.open(folder), layout, dtype)
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
    found = store.read(Safetensors.open(tmp_path / "out"), layout)
    assert found.shape == (2, 4, 2, 3)
    np.testing.assert_array_equal(found[:, :, 0, 0], [[0, 1, 2, 3], [10, 11, 12, 13]])


SHARDED = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from notepad_jax.checkpoint.hf import safetensors_store as store
sys.path[:0] = ["tests/checkpoint"]
import test_safetensors_store as t

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
layout = t.linear((24, 16), (4, 6))
found, counting = t.counted(sys.argv[1])
whole = store.read(found, layout)
counting.take()
told = []
for spec in (P(), P(None, "fsdp"), P(None, "fsdp", "tensor"), P(None, None, "fsdp"),
             P(None, ("fsdp", "tensor"))):
    for budget in (1, 3 * 24 * 16 * 2 // 2, 10**9):
        array = store.place(found, layout, NamedSharding(mesh, spec), budget=budget)
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


def test_a_parameter_must_have_its_shape_and_be_weights(tmp_path):
    write(tmp_path / "out", {"w0": np.zeros((24, 15), BF16), "q": np.zeros((24, 16), np.int8)})
    found = Safetensors.open(tmp_path / "out")
    for names, says in (
        (("w0",), r"'w0' in .*model.safetensors has shape \(24, 15\), its config.json asks for"),
        (("absent",), "has no tensor 'absent'; its config.json asks for it"),
        (("q",), "'q' in .* is I8; weights are read as F32, BF16, F16, so take an unquantised"),
    ):
        with pytest.raises(StoreProblem, match=says) as raised:
            store.read(found, linear((24, 16), (4, 6), names))
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="2 names for a stack of"):
        Layout(("a", "b"), (3,), (2,), (2,), (0,))
    with pytest.raises(ValueError, match="cannot be split"):
        Layout(("a",), (), (4, 2), (3, 2), (0, 1))
    with pytest.raises(ValueError, match="no order of the axes"):
        Layout(("a",), (), (4, 2), (4, 2), (0, 0))


# ---------------------------------------------------------------- bad input


def safetensors_file(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape=(2, 3), offsets=(0, 24), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD_FILES = {
    b"": "is cut short: it has no header",
    b"1234": "is cut short: it has no header",
    b"PK\x03\x04 this is a zip file": "announces a header of .* another kind of file",
    (500).to_bytes(8, "little") + b"{}": "is cut short inside its header of 500 bytes",
    safetensors_file(b"no json"): "is not JSON",
    safetensors_file(b"\xff\xfe{}"): "is not JSON",
    safetensors_file(b"[" * 100_000): "is not JSON",
    safetensors_file(b"[1]"): "is not a JSON object",
    safetensors_file(b'{"x":{},"x":{}}'): "names 'x' twice",
    safetensors_file({"x": 1}): "entry for 'x' is broken",
    safetensors_file({"x": entry(shape=(2, -3))}, bytes(24)): "entry for 'x' is broken",
    safetensors_file({"x": entry(shape=(2.0, 3))}, bytes(24)): "entry for 'x' is broken",
    safetensors_file({"x": entry(shape=(True, 6))}, bytes(24)): "entry for 'x' is broken",
    safetensors_file({"x": entry(offsets=(0, 24, 48))}, bytes(24)): "entry for 'x' is broken",
    safetensors_file({"x": entry(offsets=(-24, 0))}, bytes(24)): "entry for 'x' is broken",
    safetensors_file({"x": entry(dtype="Q4")}, bytes(24)): "'x' has the unknown dtype 'Q4'",
    safetensors_file({"x": entry(offsets=(0, 20))}, bytes(20)): "is F32.2, 3., 24 bytes, and its",
    safetensors_file({"x": entry(offsets=(24, 0))}, bytes(24)): "its offsets span -24",
    safetensors_file({"x": entry()}, bytes(23)): "is cut short: its tensors end at byte",
    safetensors_file({"x": entry()}, bytes(25)): "goes on after its last tensor",
    safetensors_file({"x": entry(offsets=(8, 32))}, bytes(32)): "'x' follows a hole",
    safetensors_file(
        {"x": entry(), "y": entry(offsets=(20, 44))}, bytes(44)
    ): "'y' overlaps the tensor before it",
    safetensors_file(
        {"x": entry(shape=(2**40, 2**40), offsets=(0, 2**61))}, bytes(24)
    ): "the header lies",
}


@pytest.mark.parametrize("content", BAD_FILES, ids=list(BAD_FILES.values()))
def test_a_file_that_lies_is_named(tmp_path, content):
    (tmp_path / store.WEIGHTS).write_bytes(content)
    with pytest.raises(StoreProblem, match=BAD_FILES[content]) as raised:
        Safetensors.open(tmp_path)
    assert str(tmp_path / store.WEIGHTS) in str(raised.value)
    assert "\n" not in str(raised.value)


GOOD = safetensors_file(
    {"x": entry(), "y": entry((3,), (24, 30), "BF16"), "z": entry((0,), (30, 30), "I8")},
    bytes(range(30)),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["F32", "BF16", "dtype", "shape", "data_offsets"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def opened(content: bytes):
    kvstore = ts.KvStore.open("memory://fuzz/").result()
    kvstore.write(store.WEIGHTS, content).result()
    return Safetensors.of("fuzz", kvstore)


def outcome(content: bytes):
    """Opens; what opens can be read whole, and anything else is one line."""
    try:
        found = opened(content)
    except StoreProblem as problem:
        assert str(problem).startswith("fuzz/") and "\n" not in str(problem)
        return None
    bytes_read = sum(found.read(name).nbytes for name in found.tensors)
    header = int.from_bytes(content[:8], "little")
    assert bytes_read == len(content) - 8 - header  # every byte belongs to one tensor
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), st.binary(max_size=40))
def test_no_header_gets_past_the_checks(header, data):
    outcome(safetensors_file(header, data))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=3),
    st.integers(0, len(GOOD)),
)
def test_no_damage_gets_past_the_checks(changes, length):
    assert outcome(GOOD) is not None
    damaged = bytearray(GOOD)
    for position, byte in changes:
        damaged[position] = byte
    outcome(bytes(damaged))
    if length < len(GOOD):
        assert outcome(GOOD[:length]) is None


def test_index_and_parts_must_agree(tmp_path):
    folder = tmp_path / "out"
    write(folder, tensors(), 200)
    index = folder / store.INDEX
    good = index.read_text()
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def refused(says, text=None):
        if text is not None:
            index.write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(StoreProblem, match=says) as raised:
            Safetensors.open(folder)
        assert "\n" not in str(raised.value)
        index.write_text(good)

    named = json.loads(good)["weight_map"]
    refused(
        "'ghost' is in model-00001.* which does not hold it", {"weight_map": named | {"ghost": one}}
    )
    refused("'a' is in model-00002", {"weight_map": named | {"a": two}})
    refused("has no weight_map", {"metadata": {}})
    refused("has no weight_map", {"weight_map": {}})
    refused("index.json is not JSON", "{")
    refused("is not a JSON object", "[]")
    refused("only safetensors are read", {"weight_map": {"a": "pytorch_model-1.bin"}})
    refused("which is no file name", {"weight_map": {"a": "../../etc/model.safetensors"}})
    refused("which is no file name", {"weight_map": {"a": 3}})
    whole = (folder / two).read_bytes()
    (folder / two).write_bytes(whole[:-1])
    refused(f"{two} is cut short")
    (folder / two).unlink()
    refused(f"{two} is missing; download it, too")
    (folder / two).write_bytes((folder / one).read_bytes())
    refused("holds 'a', and so does model-00001")
    index.unlink()
    with pytest.raises(StoreProblem, match="model-00001-of-00002.safetensors has no model.safet"):
        Safetensors.open(folder)


def test_pickles_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(StoreProblem, match="model.safetensors is missing; download the weights as"):
        Safetensors.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(StoreProblem, match="pytorch_model.bin is a pickle, which is not read"):
        Safetensors.open(tmp_path)
    with pytest.raises(StoreProblem, match="nowhere is not a folder; give a Hugging Face folder"):
        Safetensors.open(tmp_path / "nowhere")
    with pytest.raises(StoreProblem, match="cannot be opened"):
        Safetensors.open("nonsense://bucket/policy")


def test_config_json_must_be_there_and_json(tmp_path):
    kvstore = store.open_kvstore(tmp_path)
    for content, says in (
        (None, "config.json is missing"),
        (b"{", "not JSON"),
        (b"3", "not a JSON"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(StoreProblem, match=says):
            store.read_json(str(tmp_path), kvstore, "config.json")
    (tmp_path / "config.json").write_bytes(b'{"a": 1}')
    assert store.read_json(str(tmp_path), kvstore, "config.json") == {"a": 1}


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    write(tmp_path / "out", tensors())
    found = Safetensors.open(tmp_path / "out")
    path = tmp_path / "out" / store.WEIGHTS
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreProblem, match="cannot be read"):
        found.read("d")
    path.unlink()
    with pytest.raises(StoreProblem, match="changed while it was read"):
        found.read("d")


# ---------------------------------------------------------------- all or nothing


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_overwriting_is_asked_for_and_complete(tmp_path):
    write(tmp_path / "out", tensors(0), 100)
    before = contents(tmp_path / "out")
    with pytest.raises(StoreProblem, match="is not empty; choose another folder, or --overwrite"):
        write(tmp_path / "out", tensors(1))
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "out", tensors(1), overwrite=True, wrote=lambda t: 1 // (t.name != "c"))
    assert contents(tmp_path / "out") == before and os.listdir(tmp_path) == ["out"]
    write(tmp_path / "out", tensors(1), overwrite=True)
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_swapping_works_without_the_exchanging_rename(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_exchange", lambda one, other: False)
    write(tmp_path / "out", tensors(0), 100)
    write(tmp_path / "out", tensors(1), overwrite=True)
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_is_filled_and_others_are_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", tensors())
    Safetensors.open(tmp_path / "empty")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"policy": "data/starter"}')
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(StoreProblem, match="choose another folder"):
            write(tmp_path / "thesis", tensors(), overwrite=overwrite)
        with pytest.raises(StoreProblem, match="choose another folder"):
            write(tmp_path / "run", tensors(), overwrite=overwrite)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreProblem, match="exists and is no folder"):
        write(tmp_path / "file", tensors())
    with pytest.raises(StoreProblem, match="cannot be written"):
        write(tmp_path / "file" / "below", tensors())
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "run", "thesis"]


def test_a_full_disk_is_found_out_before_or_during(tmp_path, monkeypatch):
    usage = store.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=300))
        with pytest.raises(StoreProblem, match="the disk is full: it needs .* are free; nothing"):
            write(tmp_path / "out", tensors())
    assert os.listdir(tmp_path) == []

    def fills(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_to_disk", fills)
    with pytest.raises(StoreProblem, match="the disk is full"):
        write(tmp_path / "out", tensors())
    assert os.listdir(tmp_path) == []


def test_what_does_not_match_its_plan_is_not_written(tmp_path):
    plan = [Planned("x", np.dtype(np.float32), (2, 2))]
    for value in (np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float64)):
        with pytest.raises(StoreProblem, match=r"planned was float32\[2, 2\]"):
            store.write(tmp_path / "out", plan, lambda name, value=value: value, {})
    with pytest.raises(ValueError, match="two tensors have one name"):
        store.write(tmp_path / "out", plan * 2, lambda name: np.zeros((2, 2), np.float32), {})
    with pytest.raises(ValueError, match="no name for a file"):
        store.write(tmp_path / "out", plan, lambda name: None, {"../x": b""})
    with pytest.raises(ValueError, match="complex64, which safetensors do not have"):
        complex_plan = [dataclasses.replace(plan[0], dtype=np.dtype(np.complex64))]
        store.write(tmp_path / "out", complex_plan, lambda name: None, {})
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
sys.path[:0] = ["tests/checkpoint"]
import test_safetensors_store as t

def die(tensor):
    if tensor.name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

t.write(sys.argv[1], t.tensors(1), 100, overwrite=True, wrote=die)
"""


@pytest.mark.parametrize("tensor", ["b", "d"])  # after the first part, and after the last
def test_a_killed_export_leaves_the_old_folder(tmp_path, tensor):
    write(tmp_path / "out", tensors(0), 100)
    before = contents(tmp_path / "out")
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "out"), tensor],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=120,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL
    assert contents(tmp_path / "out") == before
    (left,) = set(os.listdir(tmp_path)) - {"out"}
    assert left.startswith(".out.")  # hidden, and gone with the next export
    write(tmp_path / "out", tensors(1), overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    np.testing.assert_array_equal(Safetensors.open(tmp_path / "out").read("a"), tensors(1)["a"])


def test_an_export_that_still_runs_is_not_swept_away(tmp_path):
    with store.new_folder(tmp_path / "out") as running:
        write(tmp_path / "out", tensors())
        assert running.is_dir()
        with pytest.raises(StoreProblem, match="not empty"):
            # The slower of two does not replace the faster one's export.
            store._refuse_target(tmp_path / "out", overwrite=False)
        (tmp_path / "out" / "config.json").unlink()
        (tmp_path / "out" / "model.safetensors").unlink()
    assert os.listdir(tmp_path) == ["out"]


def test_placing_needs_no_mesh(tmp_path):
    write(tmp_path / "out", tensors())
    layout = Layout(("a",), (), (12, 5), (12, 5), (0, 1))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = store.place(Safetensors.open(tmp_path / "out"), layout, sharding, "bfloat16")
    np.testing.assert_array_equal(np.asarray(placed), tensors()["a"].astype(BF16))
