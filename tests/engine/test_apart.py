"""Matrices of layers that lie apart: when, of what, and what they cost."""

import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from notepad_jax.engine import apart
from notepad_jax.engine.apart import Apart
from notepad_jax.model.matrices import Unstacked
from notepad_jax.parallel import mesh

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
