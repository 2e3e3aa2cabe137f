"""Weights arrive: dtypes, shardings and versions are what was asked, and others are refused."""

import gc
import math
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from notepad_jax.checkpoint import (
    abstract_trees,
    checksums,
    handoff,
    manifest,
    restore,
    steps,
    training_state,
)
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


@pytest.fixture(params=["in_process", "through_storage"])
def bridge_to(request, tmp_path):
    """Builds a bridge to an engine that asks for a target."""
    if request.param == "in_process":
        return handoff.InProcess
    return lambda target: handoff.ThroughStorage(tmp_path / "policies", target)


def test_adopting_returns_what_was_published(bridge_to):
    bridge = bridge_to(abstract(small()))
    assert bridge.newest() is None
    with pytest.raises(ValueError, match="publish"):
        bridge.adopt()
    bridge.publish(PolicySnapshot(3, small()))
    adopted = bridge.adopt()
    assert bridge.newest() == adopted.version == 3
    assert checksums.checksum(adopted.params) == checksums.checksum(small())
    bridge.publish(PolicySnapshot(4, small(1)))
    assert bridge.adopt().version == 4


def test_adopting_casts_to_the_engines_dtype(bridge_to):
    bridge = bridge_to(abstract(small(), jnp.bfloat16))
    bridge.publish(PolicySnapshot(0, small()))
    adopted = bridge.adopt().params
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small())
    assert checksums.checksum(adopted) == checksums.checksum(expected)


def test_what_engines_alone_read_is_written_as_they_keep_it_and_arrives_the_same(tmp_path):
    """Half the bytes; what they quantise stays as the masters have it."""
    wanted = abstract(small(), jnp.bfloat16)
    wanted["layers"]["q"] = Quantized(
        jax.ShapeDtypeStruct((2, 8, 8), jnp.int8), jax.ShapeDtypeStruct((2, 1, 8), jnp.float32)
    )
    wide = handoff.ThroughStorage(tmp_path / "wide", wanted)
    narrow = handoff.ThroughStorage(tmp_path / "narrow", wanted, narrow=True)
    assert checksums.checksum(handed_over(narrow, small())) == checksums.checksum(
        handed_over(wide, small())
    )
    kinds = checksums.named_leaves(restore.as_stored(tmp_path / "narrow", 0))
    assert {name: kind.dtype.name for name, kind in kinds.items()} == {
        "embed": "bfloat16", "layers/k": "bfloat16", "layers/q": "float32",
        "final_norm": "bfloat16",
    }  # fmt: skip
    narrow.publish(PolicySnapshot(0, small()))  # again: the same
    with pytest.raises(ValueError, match="saved before"):
        narrow.publish(PolicySnapshot(0, small(1)))


def test_adopting_quantises_what_arrived(bridge_to):
    """A matrix of ones and its double: largest element 127 scales; the rest as asked."""
    matrix = jnp.ones((2, 8, 4)).at[1].multiply(2.0)
    params = {"layers": {"q": matrix, "norm": jnp.full(3, 1.01)}}
    wanted = {
        "layers": {
            "q": Quantized(
                jax.ShapeDtypeStruct((2, 8, 4), jnp.int8),
                jax.ShapeDtypeStruct((2, 1, 4), jnp.float32),
            ),
            "norm": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        }
    }
    bridge = bridge_to(wanted)
    bridge.publish(PolicySnapshot(0, params))
    adopted = bridge.adopt().params["layers"]
    assert (adopted["q"].values == 127).all() and adopted["q"].values.dtype == jnp.int8
    scale = np.broadcast_to(np.float32([1, 2])[:, None, None] / np.float32(127), (2, 1, 4))
    np.testing.assert_array_equal(adopted["q"].scale, scale)
    assert (adopted["norm"] == jnp.bfloat16(1.01)).all()
    wrong = {"layers": wanted["layers"] | {"q": jax.ShapeDtypeStruct((2, 4, 8), jnp.int8)}}
    with pytest.raises(ValueError, match="'layers/q' has shape"):
        handed_over(bridge_to(wrong), params)


def handed_over(bridge, params, version=0):
    bridge.publish(PolicySnapshot(version, params))
    return bridge.adopt().params


def test_what_was_read_is_let_go_leaf_by_leaf(tmp_path, monkeypatch):
    """Four matrices of 1 MB: when the last is quantised, three exist in int8 alone."""
    matrices = {name: jnp.ones((4, 256, 256)) for name in "abcd"}
    target = Quantized(
        jax.ShapeDtypeStruct((4, 256, 256), jnp.int8), jax.ShapeDtypeStruct((4, 1, 256), "float32")
    )
    wanted, held, formed = {"layers": dict.fromkeys("abcd", target)}, [], abstract_trees._formed
    bridge = handoff.ThroughStorage(tmp_path, wanted)
    bridge.publish(PolicySnapshot(0, {"layers": matrices}))
    del matrices

    def counted(leaf, *how):
        held.append(sum(x.shape == leaf.shape and x.dtype == "float32" for x in jax.live_arrays()))
        return formed(leaf, *how)

    before = sum(x.shape == (4, 256, 256) for x in jax.live_arrays())
    monkeypatch.setattr(abstract_trees, "_formed", counted)
    bridge.adopt()
    assert [count - before for count in held] == [4, 3, 2, 1]


@pytest.fixture
def nothing_left_over():
    """What earlier tests left in circles is let go before a count, and not during it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_bytes():
    """What all arrays hold together; those that share a buffer hold it once."""
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_handoff_holds_the_engines_copy_and_one_layer(dtype, monkeypatch, nothing_left_over):
    """Also while the engine still holds the policy before; afterwards, the copy alone."""
    params = {
        name: jnp.ones((rows, 256, 256)) for name, rows in zip("abcd", (4, 8, 2, 4), strict=True)
    }
    engine = {name: jax.ShapeDtypeStruct(x.shape, dtype) for name, x in params.items()}
    if dtype == "int8":
        scales = {n: jax.ShapeDtypeStruct((len(x), 1, 256), "float32") for n, x in params.items()}
        engine = {name: Quantized(engine[name], scales[name]) for name in params}
    copy = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(engine))
    layer, told, laid = params["b"][0].nbytes, [], abstract_trees.place.laid

    def counted(part, sharding):  # it was cast, and has not arrived
        told.append(held_bytes())
        return laid(part, sharding)

    monkeypatch.setattr(abstract_trees.place, "laid", counted)
    monkeypatch.setattr(abstract_trees, "AT_ONCE", layer)
    bridge, adopted, trainer = handoff.InProcess(engine), None, held_bytes()
    for version in range(2):
        before = held_bytes()
        bridge.publish(PolicySnapshot(version, params))
        assert len(told) == 18 * (2 if dtype == "int8" else 1)  # values, and their scales
        assert max(told) <= before + copy + layer, (told, before, copy, layer)
        assert held_bytes() == before + copy
        told.clear()
        adopted = bridge.adopt()  # what was adopted before is let go
        assert held_bytes() == trainer + copy
    assert adopted.version == bridge.newest() == 1
    with pytest.raises(ValueError, match="version 1 was adopted already; publish one again"):
        bridge.adopt()
    del adopted
    assert held_bytes() == trainer  # the bridge keeps none


# ---------------------------------------------------------------- a base, handed over once


def parts_of(seed):
    """(base, trained): matrices that no step changes, and a norm that every step does."""
    whole = small(seed)
    return {"embed": whole["embed"], "layers": whole["layers"]}, {"final_norm": whole["final_norm"]}


def test_in_memory_a_base_that_is_asked_for_as_it_lies_is_the_trainers_own():
    base, trained = parts_of(0)
    wanted = abstract(small()) | {"embed": jax.ShapeDtypeStruct((16, 8), "bfloat16")}
    bridge = handoff.InProcess(wanted, base)
    adopted = []
    for version in range(2):
        bridge.publish(PolicySnapshot(version, jax.tree.map(lambda x, v=version: x + v, trained)))
        adopted.append(bridge.adopt().params)
    for params in adopted:
        assert jax.tree.structure(params) == jax.tree.structure(wanted)
        for name, leaf in base["layers"].items():
            same = params["layers"][name].unsafe_buffer_pointer() == leaf.unsafe_buffer_pointer()
            assert same, name
        np.testing.assert_array_equal(params["embed"], base["embed"].astype("bfloat16"))
    assert adopted[0]["embed"] is adopted[1]["embed"]
    np.testing.assert_array_equal(adopted[1]["final_norm"], np.full(8, 2.0))
    with pytest.raises(ValueError, match="has a leaf 'embed', which the policy does not know"):
        bridge.publish(PolicySnapshot(2, small()))
    with pytest.raises(ValueError, match="the base has a leaf 'more', which the policy does not"):
        handoff.InProcess(wanted, base | {"more": jnp.ones(2)})


def test_through_storage_a_base_is_read_once_and_named_by_every_step(tmp_path, monkeypatch):
    base, trained = parts_of(0)
    checkpoints, reads = training_state.Checkpoints(tmp_path), []
    checkpoints.keep_base(base)
    bridge = handoff.ThroughStorage(tmp_path, abstract(small(), jnp.bfloat16))
    read = restore.load_own
    monkeypatch.setattr(
        restore, "load_own", lambda *told: reads.append(told[0].name) or read(*told)
    )
    for version in range(2):
        moved = jax.tree.map(lambda x, v=version: x + v, trained)
        checkpoints.save(version, moved, {"m": jnp.ones(2)}, {}, {})
        bridge.publish(PolicySnapshot(version, moved))
        wanted = jax.tree.map(lambda x: x.astype("bfloat16"), base | moved)
        jax.tree.map(np.testing.assert_array_equal, bridge.adopt().params, wanted)
    assert reads == ["base"]
    whole, _ = restore.load_params(tmp_path, 1, abstract(small()))
    jax.tree.map(np.testing.assert_array_equal, whole, base | moved)
    assert restore.as_stored(tmp_path, 1) == abstract(small())
    # A run that goes on saves it again where it is gone, and never another one in its place.
    where = abstract(trained), {"m": jax.ShapeDtypeStruct((2,), "float32")}
    again = training_state.Checkpoints(tmp_path)
    saved = again.restore(*where, print)
    jax.tree.map(np.testing.assert_array_equal, saved.params, moved)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match="base is missing, and the steps beside it hold adapters"):
        restore.load_params(tmp_path, 1, abstract(small()))
    with pytest.raises(ValueError, match="belong on the base .* go on with the policy and grpo.l"):
        again.keep_base(parts_of(1)[0])
    again.keep_base(base)
    jax.tree.map(np.testing.assert_array_equal, bridge.adopt().params, wanted)
    shutil.rmtree(tmp_path / "base")
    training_state.Checkpoints(tmp_path).keep_base(parts_of(1)[0])
    with pytest.raises(ValueError, match="base holds .*, and the steps beside it need"):
        restore.load_params(tmp_path, 1, abstract(small()))


def test_another_models_shapes_are_refused(bridge_to):
    with pytest.raises(ValueError, match=r"'embed' has shape \(16, 8\), the policy needs \(17, 8"):
        handed_over(bridge_to(abstract(small() | {"embed": jnp.zeros((17, 8))})), small())
    with pytest.raises(ValueError, match="no leaf 'unembed'"):
        handed_over(bridge_to(abstract(small() | {"unembed": jnp.zeros(2)})), small(), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_policy_survives_donation(dtype):
    """From the moment it is published: the trainer's next update may come before adoption."""
    params = small()
    bridge = handoff.InProcess(abstract(params, dtype))
    expected = checksums.checksum(jax.tree.map(lambda x: x.astype(dtype), params))
    bridge.publish(PolicySnapshot(0, params))
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
    assert checksums.checksum(bridge.adopt().params) == expected


def test_a_layer_that_arrives_changed_is_refused(monkeypatch):
    """The second layer of the second leaf, by the least that a number of its dtype can change."""
    target, travelled, laid = (
        abstract_trees.placed(abstract(small(), "bfloat16")),
        [],
        abstract_trees.place.laid,
    )

    def damaged(part, sharding):
        travelled.append(part.shape)
        there = laid(part, sharding)
        if travelled.count((1, 8, 8)) != 3:
            return there
        return there.at[0, 3, 4].set(jnp.nextafter(there[0, 3, 4], jnp.bfloat16(9)))

    monkeypatch.setattr(abstract_trees, "AT_ONCE", 1)
    monkeypatch.setattr(abstract_trees.place, "laid", damaged)
    with pytest.raises(ValueError, match="version 3: leaf 'layers/q' was published as bfloat16"):
        abstract_trees.carry(small(), target, "policy version 3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_layers_that_travel_apart_arrive_as_the_whole_does(dtype, monkeypatch):
    matrices = jax.random.normal(jax.random.key(0), (6, 8, 4))
    target = {"q": jax.ShapeDtypeStruct((6, 8, 4), dtype)}
    if dtype == "int8":
        target["q"] = Quantized(target["q"], jax.ShapeDtypeStruct((6, 1, 4), "float32"))
    whole = handed_over(handoff.InProcess(target), {"q": matrices})
    for layers, most in ((1, 1), (2, 2 * 128), (2, 2.9 * 128), (3, 5.9 * 128), (6, 6 * 128)):
        monkeypatch.setattr(abstract_trees, "AT_ONCE", int(most))
        assert abstract_trees.at_once(matrices) == layers
        apart = handed_over(handoff.InProcess(target), {"q": matrices})
        assert checksums.checksum(apart) == checksums.checksum(whole)


def test_weights_that_are_not_the_published_ones_are_refused(tmp_path):
    bridge = handoff.ThroughStorage(tmp_path, abstract(small()))
    bridge.publish(PolicySnapshot(0, small()))
    meta = tmp_path / "0" / "meta" / "data.json"
    right = checksums.leaf_checksums(small())["layers/k"]
    wrong = checksums.leaf_checksums(small(1))["layers/k"]
    meta.write_text(meta.read_text().replace(right, wrong))
    with pytest.raises(ValueError, match="step 0 is damaged \\(meta/data.json has other bytes"):
        bridge.adopt()
    manifest.write(
        meta.parents[1], manifest.made(meta.parents[1])
    )  # were the table itself another one
    with pytest.raises(ValueError, match="leaf 'layers/k' was published as"):
        bridge.adopt()


def test_a_training_checkpoint_is_a_publication(tmp_path):
    params, opt = small(), optax.adam(1e-3).init(small())
    bridge = handoff.ThroughStorage(tmp_path, abstract(small()))
    checkpoints = training_state.Checkpoints(tmp_path)
    saved = checkpoints.save(5, params, opt, {}, {"seed": 1})
    written = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    bridge.publish(PolicySnapshot(5, params))
    assert steps.read_meta(tmp_path, 5)["checksum"] == saved
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == written
    with pytest.raises(ValueError, match="saved before"):
        bridge.publish(PolicySnapshot(5, small(1)))
    adopted = bridge.adopt()
    assert (adopted.version, checksums.checksum(adopted.params)) == (5, saved)


def test_a_reader_takes_the_newer_version_when_its_own_vanishes(tmp_path, monkeypatch):
    bridge = handoff.ThroughStorage(tmp_path, abstract(small()))
    bridge.publish(PolicySnapshot(0, small()))
    bridge.publish(PolicySnapshot(1, small(1)))
    answers = iter([7, 1])  # version 7 was there when the reader looked, and is gone
    monkeypatch.setattr(bridge, "newest", lambda: next(answers))
    assert bridge.adopt().version == 1


EIGHT_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from notepad_jax.checkpoint import checksums, handoff, restore
from notepad_jax.types import PolicySnapshot

assert jax.device_count() == 8
params = {"a": jnp.arange(64 * 16, dtype=jnp.float32).reshape(64, 16), "b": jnp.ones(8)}
train = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
serve = Mesh(np.array(jax.devices()[4:]), ("tensor",))
lay = {"a": P("fsdp", "tensor"), "b": P("tensor")}
put = {n: jax.device_put(params[n], NamedSharding(train, lay[n])) for n in params}
assert checksums.checksum(put) == checksums.checksum(params)
target = {
    name: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=NamedSharding(serve, spec))
    for (name, leaf), spec in zip(params.items(), [P(None, "tensor"), P()])
}
for bridge in (handoff.InProcess(target), handoff.ThroughStorage(sys.argv[1], target)):
    bridge.publish(PolicySnapshot(2, put))
    got = bridge.adopt().params
    for name in params:
        assert got[name].sharding == target[name].sharding, (bridge, got[name].sharding)
        assert got[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(got[name], params[name].astype(jnp.bfloat16))
# A copy of the same dtype owns its buffers wherever it lies, for its source will be donated.
def buffers(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}

for asked in (lay["a"], P("fsdp"), P("tensor", "fsdp"), P()):
    for spec in (lay["a"], P()):
        source = jax.device_put(params["a"], NamedSharding(train, spec))
        where = NamedSharding(train, asked)
        bridge = handoff.InProcess({"a": jax.ShapeDtypeStruct((64, 16), "float32", sharding=where)})
        bridge.publish(PolicySnapshot(0, {"a": source}))
        got = bridge.adopt().params["a"]
        assert got.sharding == where and not buffers(source) & buffers(got), (asked, spec)
        np.testing.assert_array_equal(got, params["a"])
print("resharded")
"""


@pytest.mark.slow
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
