"""Safetensors by byte range: what is read, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_files import BF16, counted, tensors, write

from notepad_jax.checkpoint.hf import headers, storage
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.storage import StoreProblem


def test_files_of_the_reference_implementation_are_read(tmp_path):
    named = tensors() | {"scalar": np.array(2.5, np.float32), "none": np.zeros((0, 3), BF16)}
    safetensors.numpy.save_file(named, tmp_path / storage.WEIGHTS)
    found = Safetensors.open(tmp_path)
    for name, value in named.items():
        assert found.read(name).tobytes() == value.tobytes()
        assert found.read(name).shape == value.shape


def test_links_and_odd_names_are_followed(tmp_path):
    blob = tmp_path / "blobs" / "0123abcd"  # as huggingface_hub's cache lays it out
    blob.parent.mkdir()
    safetensors.numpy.save_file(tensors(), blob)
    folder = tmp_path / "100% odd #é?"
    folder.mkdir()
    (folder / storage.WEIGHTS).symlink_to(blob)
    np.testing.assert_array_equal(Safetensors.open(folder).read("a"), tensors()["a"])


def test_opening_reads_headers_only(tmp_path):
    named = {"big": np.zeros((1000, 100), np.float32)}
    write(tmp_path / "out", named)
    header = int.from_bytes((tmp_path / "out" / storage.WEIGHTS).read_bytes()[:8], "little")
    _, counting = counted(tmp_path / "out")
    assert counting.take() == 8 + header + 2  # and is the last byte there, and none after it


def test_a_slice_reads_its_rows_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(headers, "BLOCK_BYTES", 400)
    monkeypatch.setattr(headers, "IN_FLIGHT_BYTES", 800)
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
    monkeypatch.setattr(headers, "BLOCK_BYTES", 100)
    monkeypatch.setattr(headers, "IN_FLIGHT_BYTES", 350)
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


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    write(tmp_path / "out", tensors())
    found = Safetensors.open(tmp_path / "out")
    path = tmp_path / "out" / storage.WEIGHTS
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreProblem, match="cannot be read"):
        found.read("d")
    path.unlink()
    with pytest.raises(StoreProblem, match="changed while it was read"):
        found.read("d")


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
    (tmp_path / storage.WEIGHTS).write_bytes(content)
    with pytest.raises(StoreProblem, match=BAD_FILES[content]) as raised:
        Safetensors.open(tmp_path)
    assert str(tmp_path / storage.WEIGHTS) in str(raised.value)
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
    kvstore.write(storage.WEIGHTS, content).result()
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


@pytest.mark.parametrize("parts", [True, False])
def test_one_file_wins_over_the_index_of_older_parts(tmp_path, parts):
    """A model that is saved in one file where it lay in parts; transformers reads the one, too."""
    write(tmp_path / "out", tensors(), 200)
    if not parts:
        for part in (tmp_path / "out").glob("model-*.safetensors"):
            part.unlink()
    newer = {name: value[::-1].copy() for name, value in tensors().items()}
    safetensors.numpy.save_file(newer, tmp_path / "out" / storage.WEIGHTS)
    np.testing.assert_array_equal(Safetensors.open(tmp_path / "out").read("a"), newer["a"])


def test_index_and_parts_must_agree(tmp_path):
    folder = tmp_path / "out"
    write(folder, tensors(), 200)
    index = folder / storage.INDEX
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
    kvstore = storage.open_kvstore(tmp_path)
    for content, says in (
        (None, "config.json is missing"),
        (b"{", "not JSON"),
        (b"3", "not a JSON"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(StoreProblem, match=says):
            storage.read_json(str(tmp_path), kvstore, "config.json")
    (tmp_path / "config.json").write_bytes(b'{"a": 1}')
    assert storage.read_json(str(tmp_path), kvstore, "config.json") == {"a": 1}
