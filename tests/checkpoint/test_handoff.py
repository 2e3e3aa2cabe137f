"""Weights arrive: checksums notice every change, dtypes and shardings are what was asked."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.checkpoint import handoff, manager
from notepad_jax.model.matrices import Quantized
from notepad_jax.types import PolicySnapshot


def small(seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "embed": jax.random.normal(keys[0], (16, 8)),
        "layers": {
            "q": jax.random.normal(keys[1], (2, 8, 8)),
            "k": jax.random.normal(keys[2], (2, 8, 8)),
        },
        "final_norm": jnp.ones(8),
    }


def abstract(params, dtype=jnp.float32):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)


def flip_bit(params, element, bit):
    embed = np.array(params["embed"])
    embed.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
    return params | {"embed": jnp.asarray(embed)}


def test_the_checksum_is_a_function_of_the_values():
    assert handoff.checksum(small()) == handoff.checksum(small())
    assert handoff.checksum(small()) != handoff.checksum(small(1))
    numpy_tree = jax.tree.map(np.asarray, small())
    assert handoff.checksum(numpy_tree) == handoff.checksum(small())


@pytest.mark.parametrize(("element", "bit"), [(0, 0), (0, 31), (127, 0), (64, 17)])
def test_one_changed_bit_changes_the_checksum(element, bit):
    params = small()
    changed = flip_bit(params, element, bit)
    assert handoff.checksum(changed) != handoff.checksum(params)
    before, after = handoff.leaf_checksums(params), handoff.leaf_checksums(changed)
    assert [name for name in before if before[name] != after[name]] == ["embed"]


def test_swapped_transposed_and_renamed_leaves_change_the_checksum():
    params = small()
    q, k = params["layers"]["q"], params["layers"]["k"]
    others = [
        params | {"layers": {"q": k, "k": q}},
        params | {"layers": {"q": q.transpose(0, 2, 1), "k": k}},
        params | {"layers": {"q": q[::-1], "k": k}},
        params | {"embed": params["embed"].reshape(8, 16)},
        params | {"layers": {"q": q, "v": k}},
    ]
    sums = {handoff.checksum(tree) for tree in [params, *others]}
    assert len(sums) == len(others) + 1


def test_the_checksum_knows_the_dtype():
    ones = {"a": jnp.zeros(4)}
    narrow = {"a": jnp.zeros(4, jnp.bfloat16)}
    assert handoff.checksum(ones) != handoff.checksum(narrow)
    with pytest.raises(ValueError, match="a is float64"):
        handoff.checksum({"a": np.zeros(4)})


@given(
    st.sampled_from(["float32", "bfloat16", "float16", "int8"]),
    st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3 * 70_000), max_size=3),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_a_leafs_checksum_is_the_sum_of_its_parts(dtype, seed, cuts):
    """Wherever it is cut, in any order; parts longer than a block of 65,536 included."""
    bits = np.random.default_rng(seed).integers(0, 256, (3, 70_000, np.dtype(dtype).itemsize))
    leaf = bits.astype(np.uint8).view(dtype).reshape(3, 70_000)
    edges = [0, *sorted(cuts), leaf.size]
    parts = [
        handoff.part_sum(leaf.reshape(-1)[a:b], a)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    whole = handoff.leaf_checksums({"a": jnp.asarray(leaf)})["a"]
    assert handoff.described(leaf, sum(reversed(parts)) % 2**32) == whole


def test_positions_of_parts_count_modulo_2_to_the_32():
    """A leaf of more elements than 32 bits count, such as the experts of a large policy."""
    part = np.arange(10, dtype=np.float32)
    early, late = handoff.part_sum(part, 2**32 - 5), handoff.part_sum(part, 2**33 - 5)
    assert early == late != handoff.part_sum(part, 0)
    halves = handoff.part_sum(part[:5], 2**32 - 5) + handoff.part_sum(part[5:], 0)
    assert halves % 2**32 == early


@pytest.fixture(params=["in_process", "through_storage"])
def bridge(request, tmp_path):
    if request.param == "in_process":
        return handoff.InProcess()
    return handoff.ThroughStorage(tmp_path / "policies")


def test_adopting_returns_what_was_published(bridge):
    assert bridge.newest() is None
    with pytest.raises(ValueError, match="publish"):
        bridge.adopt(abstract(small()))
    published = bridge.publish(PolicySnapshot(3, small()))
    adopted = bridge.adopt(abstract(small()))
    assert bridge.newest() == adopted.version == 3
    assert handoff.checksum(adopted.params) == published == handoff.checksum(small())
    bridge.publish(PolicySnapshot(4, small(1)))
    assert bridge.adopt(abstract(small())).version == 4


def test_adopting_casts_to_the_engines_dtype(bridge):
    bridge.publish(PolicySnapshot(0, small()))
    adopted = bridge.adopt(abstract(small(), jnp.bfloat16)).params
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small())
    assert handoff.checksum(adopted) == handoff.checksum(expected)


def test_adopting_quantises_what_arrived(bridge):
    """A matrix of ones and its double: largest element 127 scales; the rest as asked."""
    matrix = jnp.ones((2, 8, 4)).at[1].multiply(2.0)
    params = {"layers": {"q": matrix, "norm": jnp.full(3, 1.01)}}
    bridge.publish(PolicySnapshot(0, params))
    wanted = {
        "layers": {
            "q": Quantized(
                jax.ShapeDtypeStruct((2, 8, 4), jnp.int8),
                jax.ShapeDtypeStruct((2, 1, 4), jnp.float32),
            ),
            "norm": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        }
    }
    adopted = bridge.adopt(wanted).params["layers"]
    assert (adopted["q"].values == 127).all() and adopted["q"].values.dtype == jnp.int8
    scale = np.broadcast_to(np.float32([1, 2])[:, None, None] / np.float32(127), (2, 1, 4))
    np.testing.assert_array_equal(adopted["q"].scale, scale)
    assert (adopted["norm"] == jnp.bfloat16(1.01)).all()
    wrong = {"layers": wanted["layers"] | {"q": jax.ShapeDtypeStruct((2, 4, 8), jnp.int8)}}
    with pytest.raises(ValueError, match="'layers/q' has shape"):
        bridge.adopt(wrong)


def test_the_published_copy_is_let_go_leaf_by_leaf(tmp_path, monkeypatch):
    """Four matrices of 1 MB: when the last is quantised, three exist in int8 alone."""
    matrices = {name: jnp.ones((4, 256, 256)) for name in "abcd"}
    bridge = handoff.ThroughStorage(tmp_path)
    bridge.publish(PolicySnapshot(0, {"layers": matrices}))
    target = Quantized(
        jax.ShapeDtypeStruct((4, 256, 256), jnp.int8), jax.ShapeDtypeStruct((4, 1, 256), "float32")
    )
    wanted, held, quantize = {"layers": dict.fromkeys("abcd", target)}, [], handoff._quantize
    del matrices

    def counted(leaf, inputs):
        held.append(sum(x.shape == leaf.shape and x.dtype == "float32" for x in jax.live_arrays()))
        return quantize(leaf, inputs)

    before = sum(x.shape == (4, 256, 256) for x in jax.live_arrays())
    monkeypatch.setattr(handoff, "_quantize", counted)
    bridge.adopt(wanted)
    assert [count - before for count in held] == [4, 3, 2, 1]


def test_another_models_shapes_are_refused(bridge):
    bridge.publish(PolicySnapshot(0, small()))
    with pytest.raises(ValueError, match=r"'embed' has shape \(16, 8\), the policy needs \(17, 8"):
        bridge.adopt(abstract(small() | {"embed": jnp.zeros((17, 8))}))
    with pytest.raises(ValueError, match="no leaf 'unembed'"):
        bridge.adopt(abstract(small() | {"unembed": jnp.zeros(2)}))


def test_a_published_policy_survives_donation():
    bridge, params = handoff.InProcess(), small()
    expected = bridge.publish(PolicySnapshot(0, params))
    adopted = bridge.adopt(abstract(params)).params
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
    assert handoff.checksum(adopted) == expected


def test_weights_that_are_not_the_published_ones_are_refused(tmp_path):
    bridge = handoff.ThroughStorage(tmp_path)
    bridge.publish(PolicySnapshot(0, small()))
    meta = tmp_path / "0" / "meta" / "data.json"
    right = handoff.leaf_checksums(small())["layers/k"]
    wrong = handoff.leaf_checksums(small(1))["layers/k"]
    meta.write_text(meta.read_text().replace(right, wrong))
    with pytest.raises(ValueError, match="leaf 'layers/k' was published as"):
        bridge.adopt(abstract(small()))


def test_a_training_checkpoint_is_a_publication(tmp_path):
    params, opt = small(), optax.adam(1e-3).init(small())
    bridge = handoff.ThroughStorage(tmp_path)
    with manager.Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.save(5, params, opt, {}, {"seed": 1})
        written = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
        assert bridge.publish(PolicySnapshot(5, params)) == saved
        assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == written
        with pytest.raises(ValueError, match="saved before"):
            bridge.publish(PolicySnapshot(5, small(1)))
        adopted = bridge.adopt(abstract(params))
    assert (adopted.version, handoff.checksum(adopted.params)) == (5, saved)


def test_a_reader_takes_the_newer_version_when_its_own_vanishes(tmp_path, monkeypatch):
    bridge = handoff.ThroughStorage(tmp_path)
    bridge.publish(PolicySnapshot(0, small()))
    bridge.publish(PolicySnapshot(1, small(1)))
    answers = iter([7, 1])  # version 7 was there when the reader looked, and is gone
    monkeypatch.setattr(bridge, "newest", lambda: next(answers))
    assert bridge.adopt(abstract(small())).version == 1


EIGHT_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from notepad_jax.checkpoint import handoff
from notepad_jax.types import PolicySnapshot

assert jax.device_count() == 8
params = {"a": jnp.arange(64 * 16, dtype=jnp.float32).reshape(64, 16), "b": jnp.ones(8)}
train = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
serve = Mesh(np.array(jax.devices()[4:]), ("tensor",))
lay = {"a": P("fsdp", "tensor"), "b": P("tensor")}
put = {n: jax.device_put(params[n], NamedSharding(train, lay[n])) for n in params}
assert handoff.checksum(put) == handoff.checksum(params)
target = {
    name: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=NamedSharding(serve, spec))
    for (name, leaf), spec in zip(params.items(), [P(None, "tensor"), P()])
}
for bridge in (handoff.InProcess(), handoff.ThroughStorage(sys.argv[1])):
    bridge.publish(PolicySnapshot(2, put))
    got = bridge.adopt(target).params
    for name in params:
        assert got[name].sharding == target[name].sharding, (bridge, got[name].sharding)
        assert got[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(got[name], params[name].astype(jnp.bfloat16))
print("resharded")
"""


def test_weights_move_from_a_training_mesh_to_a_serving_mesh(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, str(tmp_path / "policies")],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "resharded", done.stderr
