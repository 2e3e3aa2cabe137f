"""Checksums notice every change, whatever the sharding, and add up over parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.checkpoint import checksums


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


def flip_bit(params, element, bit):
    embed = np.array(params["embed"])
    embed.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
    return params | {"embed": jnp.asarray(embed)}


def test_the_checksum_is_a_function_of_the_values():
    assert checksums.checksum(small()) == checksums.checksum(small())
    assert checksums.checksum(small()) != checksums.checksum(small(1))
    numpy_tree = jax.tree.map(np.asarray, small())
    assert checksums.checksum(numpy_tree) == checksums.checksum(small())


@pytest.mark.parametrize(("element", "bit"), [(0, 0), (0, 31), (127, 0), (64, 17)])
def test_one_changed_bit_changes_the_checksum(element, bit):
    params = small()
    changed = flip_bit(params, element, bit)
    assert checksums.checksum(changed) != checksums.checksum(params)
    before, after = checksums.leaf_checksums(params), checksums.leaf_checksums(changed)
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
    sums = {checksums.checksum(tree) for tree in [params, *others]}
    assert len(sums) == len(others) + 1


def test_the_checksum_knows_the_dtype():
    ones = {"a": jnp.zeros(4)}
    narrow = {"a": jnp.zeros(4, jnp.bfloat16)}
    assert checksums.checksum(ones) != checksums.checksum(narrow)
    with pytest.raises(ValueError, match="a is float64"):
        checksums.checksum({"a": np.zeros(4)})


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
        checksums.part_sum(leaf.reshape(-1)[a:b], a)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    whole = checksums.leaf_checksums({"a": jnp.asarray(leaf)})["a"]
    assert checksums.described(leaf, sum(reversed(parts)) % 2**32) == whole


def test_positions_of_parts_count_modulo_2_to_the_32():
    """A leaf of more elements than 32 bits count, such as the experts of a large policy."""
    part = np.arange(10, dtype=np.float32)
    early, late = checksums.part_sum(part, 2**32 - 5), checksums.part_sum(part, 2**33 - 5)
    assert early == late != checksums.part_sum(part, 0)
    halves = checksums.part_sum(part[:5], 2**32 - 5) + checksums.part_sum(part[5:], 0)
    assert halves % 2**32 == early
