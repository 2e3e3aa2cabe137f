"""Arrays are committed when they are made, so that no program is compiled for both kinds."""

import concurrent.futures
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from notepad_jax.grpo import state
from notepad_jax.model import lora, parameters
from notepad_jax.parallel import mesh as meshes
from notepad_jax.parallel import place


def all_committed(tree) -> bool:
    return all(leaf.committed for leaf in jax.tree.leaves(tree))


def test_leaves_of_numpy_and_of_jax_are_committed_to_the_first_device():
    tree = {"host": np.arange(3, dtype=np.float32), "loose": jnp.ones(2), "scalar": np.int32(7)}
    placed = place.commit(tree)
    assert not tree["loose"].committed and all_committed(placed)
    for name, leaf in placed.items():
        assert leaf.sharding == place.first_device()
        np.testing.assert_array_equal(leaf, tree[name])
        assert leaf.dtype == tree[name].dtype


def test_what_lies_there_already_is_not_copied():
    loose = jnp.ones((4, 4))
    placed = place.commit(loose)
    assert placed.unsafe_buffer_pointer() == loose.unsafe_buffer_pointer()
    again = place.commit(placed)
    assert again.unsafe_buffer_pointer() == loose.unsafe_buffer_pointer()


def test_a_tree_of_shardings_says_where_each_leaf_lives():
    layout = parameters.shardings(tiny.CONFIG, meshes.make(), meshes.TRAINING)
    placed = place.commit(jax.tree.map(np.asarray, tiny.params()), layout)
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == layout


def test_parameters_adapters_and_the_cache_are_committed():
    base = parameters.init_params(tiny.CONFIG, jax.random.key(0))
    adapted = lora.partition(tiny.CONFIG, base, lora.Lora(2, 4.0, ("q", "v")), jax.random.key(0))
    assert all_committed(base) and all_committed(adapted)
    assert all_committed(tiny.executor().device.pages)


def test_a_train_state_is_committed_also_where_it_is_nothing_but_zeros():
    """jax drops what a program does not use of its arguments, and with it the device."""
    masters = {"layers": {"q": place.commit(np.ones((2, 3, 4), np.float32))}}
    assert all_committed(state.start(masters, optax.adamw(1e-3)))


def test_one_device_is_a_mesh_and_what_lies_there_lies_on_it():
    for tree in (place.commit(np.ones(3)), tiny.params(), tiny.executor().device.pages):
        assert meshes.of(tree) == meshes.one() and dict(meshes.one().shape) == dict.fromkeys(
            meshes.AXES, 1
        )
    assert meshes.of({"loose": jnp.ones(3)}) == meshes.one()


def test_moments_lie_beside_their_parameters_and_counters_everywhere():
    there = meshes.make()
    masters = parameters.map_specs(
        lambda s: jax.ShapeDtypeStruct(
            s.shape, "float32", sharding=meshes.sharding(there, s.axes, s.shape, meshes.TRAINING)
        ),
        tiny.CONFIG,
    )
    made = state.abstract(masters, optax.adamw(1e-3))
    for moments in (made.opt_state[0].mu, made.opt_state[0].nu):
        assert jax.tree.map(lambda x: x.sharding, moments) == jax.tree.map(
            lambda x: x.sharding, masters
        )
    assert made.opt_state[0].count.sharding == place.replicated(there) == made.step.sharding


def test_engines_threads_may_look_at_one_row_at_once():
    """jaxlib lists shards when they are asked for; two threads at once made two of one."""
    mesh, leaf = meshes.one(), place.commit(np.ones(8, np.float32))
    rows = [place.row(leaf, mesh, 0) for _ in range(3000)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            found = [threads.submit(lambda: [address(row) for row in rows]) for _ in range(2)]
            assert {*found[0].result(), *found[1].result()} == {address(leaf)}
    finally:
        sys.setswitchinterval(usual)


# ---------------------------------------------------------------- entries


def address(leaf):
    return leaf.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_entries_lie_in_the_leafs_memory(dtype):
    leaf = place.commit(jnp.arange(3 * 64, dtype=dtype).reshape(3, 64))
    for number, entry in enumerate(place.entries(leaf)):
        assert address(entry) == address(leaf) + number * 64 * leaf.dtype.itemsize
        assert entry.sharding == place.first_device()
        np.testing.assert_array_equal(entry, leaf[number])


def test_entries_that_begin_anywhere_are_copies():
    leaf = place.commit(jnp.arange(21.0).reshape(3, 7))
    np.testing.assert_array_equal(np.stack(place.entries(leaf)), leaf)


def test_a_leaf_whose_entries_live_is_not_written_over():
    leaf = place.commit(jnp.ones((2, 64)))
    kept = place.entries(leaf)
    moved = jax.jit(lambda x: x + 1, donate_argnums=0)(leaf)
    assert float(moved.sum()) == 256
    assert [float(entry.sum()) for entry in kept] == [64, 64]


def test_entries_outlive_their_leaf():
    kept = place.entries(place.commit(jnp.full((2, 64), 3.0)))
    assert [float(entry.sum()) for entry in kept] == [192, 192]


def test_entries_of_a_description():
    leaf = jax.ShapeDtypeStruct((2, 4, 8), "float32", sharding=place.first_device())
    assert [entry.shape for entry in place.entries(leaf)] == [(4, 8), (4, 8)]
    assert place.entries(leaf)[1].sharding == place.first_device()
