"""Arrays are committed when they are made, so that no program is compiled for both kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from notepad_jax.model import lora, parameters
from notepad_jax.parallel import mesh as meshes
from notepad_jax.parallel import place, rules


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
    layout = parameters.shardings(tiny.CONFIG, meshes.make(), rules.TRAINING)
    placed = place.commit(jax.tree.map(np.asarray, tiny.params()), layout)
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == layout


def test_parameters_adapters_and_the_cache_are_committed():
    adapters = lora.init(tiny.CONFIG, lora.Lora(2, 4.0, ("q", "v")), jax.random.key(0))
    assert all_committed(parameters.init_params(tiny.CONFIG, jax.random.key(0)))
    assert all_committed(adapters)
    assert all_committed(tiny.engine().init_decode_state().pages)


def test_a_cache_on_a_mesh_holds_the_heads_of_each_device():
    mesh = meshes.make()
    data = tiny.engine(mesh=mesh).init_decode_state().pages.data
    assert data.committed
    assert data.sharding.spec == jax.sharding.PartitionSpec(None, None, "tensor", None, None)
