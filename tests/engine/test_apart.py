"""Matrices of layers that lie apart: when, of what, and what they cost."""

import dataclasses
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from notepad_jax.checkpoint import handoff
from notepad_jax.checkpoint.abstract_trees import abstract
from notepad_jax.engine import apart
from notepad_jax.engine.apart import Apart
from notepad_jax.model import lora, parameters
from notepad_jax.model.matrices import Unstacked
from notepad_jax.parallel import mesh
from notepad_jax.types import PolicySnapshot

SIZE = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny.params()))


def on(platform: str, memory: int = 0, size: int = 1):
    """A mesh of devices that are not here."""

    def stats():
        if memory < 0:
            raise NotImplementedError
        return {"bytes_limit": memory} if memory else None

    device = types.SimpleNamespace(platform=platform, memory_stats=stats)
    return types.SimpleNamespace(size=size, devices=np.array([device] * size))


@pytest.mark.parametrize(
    "there, told",
    [
        (on("cpu"), True),
        (on("cpu", size=2), False),
        (on("tpu", 10**12), False),
        (on("gpu", 5 * SIZE), True),
        (on("gpu", 5 * SIZE - 1), False),
        (on("gpu", 10**12, size=2), False),
        (on("gpu"), False),
        (on("gpu", -1), False),  # that is only compiled for
    ],
)
def test_matrices_lie_apart_on_one_cpu_and_where_a_gpu_has_room(there, told):
    assert apart.wanted(tiny.params(), there) == told


def test_on_a_gpu_decoding_alone_has_them_and_a_copy_is_counted(monkeypatch):
    params, there = tiny.params(), on("gpu", 10**12)
    placed = Apart(tiny.CONFIG, there).of(params)
    assert placed.prefill is params
    made = {n for n, leaf in placed.decode["layers"].items() if isinstance(leaf, Unstacked)}
    assert made == {"q", "k", "v", "o", "gate", "up", "down"}
    copied = sum(params["layers"][name].nbytes for name in made)
    assert apart.copied_bytes(tiny.CONFIG, params, there) == copied
    assert apart.copied_bytes(tiny.CONFIG, params, on("gpu", SIZE)) == 0
    assert apart.copied_bytes(tiny.CONFIG, params, mesh.one()) == 0  # a CPU's share the stacks


def test_what_two_policies_share_is_taken_apart_once():
    """Adapters are published; the matrices beside them are the same memory, in other arrays."""
    engine, params = Apart(tiny.CONFIG, mesh.one()), tiny.params()
    first = engine.of(params).decode["layers"]
    gate = params["layers"]["gate"]
    shards = [shard.data for shard in gate.addressable_shards]
    again = jax.make_array_from_single_device_arrays(gate.shape, gate.sharding, shards)
    assert again is not gate
    other = {**params["layers"], "gate": again, "up": params["layers"]["up"] + jnp.float32(1)}
    second = engine.of({**params, "layers": other}).decode["layers"]
    assert second["gate"] is first["gate"]
    assert second["up"] is not first["up"]
    np.testing.assert_array_equal(second["up"].layers[2], other["up"][2])


@pytest.mark.slow
def test_what_an_engine_gives_back_is_free():
    engine, params = Apart(tiny.CONFIG, mesh.one()), tiny.params()
    placed = engine.of(params)
    stack, own = (weakref.ref(x["layers"]["gate"]) for x in (params, placed.decode))
    del params, placed
    gc.collect()
    assert stack() is None and own() is None
    assert isinstance(engine.of(tiny.params()).decode["layers"]["gate"], Unstacked)


def test_a_stack_that_was_deleted_is_nobodys_memory():
    engine, params = Apart(tiny.CONFIG, mesh.one()), tiny.params()
    held = engine.of(params).decode["layers"]["gate"]
    params["layers"]["gate"].delete()
    assert engine.of(tiny.params()).decode["layers"]["gate"] is not held


def adapted(base=None, seed=1):
    """A policy with adapters that learnt something."""
    frozen, fresh = lora.partition(
        tiny.CONFIG, base or tiny.params(), lora.Lora(2, 4.0, ("q", "down")), jax.random.key(seed)
    )
    return parameters.join(frozen, jax.tree.map(lambda x: x + jnp.float32(0.1), fresh))


def test_a_cpu_adds_float32_adapters_in():
    """So training and what is measured afterwards run the same programs."""
    engine, params = Apart(tiny.CONFIG, mesh.one()), adapted()
    placed, plain = engine.of(params), engine.of(tiny.params())
    assert jax.tree.structure(placed) == jax.tree.structure(plain)
    by_hand = params["layers"]
    for i in range(tiny.CONFIG.layers):
        delta = by_hand["down_lora_in"][i] @ by_hand["down_lora_out"][i] * 4 / 2
        found = placed.decode["layers"]["down"].layers[i]
        np.testing.assert_allclose(found, by_hand["down"][i] + delta, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(placed.decode["layers"]["up"].layers[i], by_hand["up"][i])
    # Abstract ones, that `plan` lowers, are of the same shapes.
    told = Apart(tiny.CONFIG, mesh.one()).of(abstract(params))
    assert jax.tree.structure(told) == jax.tree.structure(plain)
    two = params["layers"]["q"].nbytes + params["layers"]["down"].nbytes
    assert apart.copied_bytes(tiny.CONFIG, params, mesh.one()) == two


def test_engines_of_a_row_add_the_same_adapters_in_once():
    engine, params = Apart(tiny.CONFIG, mesh.one()), adapted()
    first = engine.of(params).decode["layers"]
    again = engine.of(dict(params)).decode["layers"]
    assert again["q"] is first["q"] and again["up"] is first["up"]
    learnt = jax.tree.map(lambda x: x + jnp.float32(0.1), lora.factors(params))
    later = engine.of({**params, "layers": params["layers"] | learnt["layers"]})
    assert later.decode["layers"]["up"] is first["up"]
    assert (later.decode["layers"]["q"].layers[0] != first["q"].layers[0]).all()


@pytest.mark.parametrize("what", ["bfloat16 activations", "bfloat16", "int8", "several", "gpu"])
def test_adapters_stay_beside_what_would_round_them_away_or_is_anothers(what):
    config, params, there = tiny.CONFIG, adapted(), mesh.one()
    if what == "bfloat16 activations":
        config = dataclasses.replace(config, dtype="bfloat16")
    elif what == "several":
        params = lora.several(tiny.params(), [params, adapted(seed=2)])
    elif what == "gpu":
        there = on("gpu", 10**12)
    else:
        target = parameters.rollout_target(config, tiny.params(), what)
        bridge = handoff.InProcess(target)
        bridge.publish(PolicySnapshot(0, tiny.params()))
        params = parameters.join(bridge.adopt().params, lora.factors(params)) | {}
        params["layers"]["lora_scale"] = adapted()["layers"]["lora_scale"]
    beside = {name for name in params["layers"] if "lora_" in name}
    layers = Apart(config, there).of(params).decode["layers"]
    assert beside and {name for name in layers if "lora_" in name} == beside
