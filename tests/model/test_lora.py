"""Adapters change nothing at first, add what they should, and merge to the same policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from notepad_jax.model import attention, lora, lora_merge, policy
from notepad_jax.model.matrices import Adapted, apply
from notepad_jax.model.parameters import join, shardings
from notepad_jax.parallel import mesh as meshes

ALL = lora.Lora(rank=3, alpha=6.0, targets=tuple(lora.TARGETS))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 16)), jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(16), (2, 16))


@jax.jit
def hidden(params):
    attend = attention.packed(tiny.CONFIG, jnp.full((2, 16), 16, jnp.int32))
    return policy.forward(tiny.CONFIG, params, TOKENS, POSITIONS, attend)[0]


def split(base):
    """(frozen, trained) with all matrices adapted, alpha / rank = 2."""
    return lora.partition(tiny.CONFIG, base, ALL, jax.random.key(1))


def drawn():
    """Adapters after some training: B is no longer zero."""
    adapters = split(tiny.params())[1]
    keys = iter(jax.random.split(jax.random.key(2), 99))
    return jax.tree.map(lambda a: a + 0.05 * jax.random.normal(next(keys), a.shape), adapters)


def test_fresh_adapters_change_nothing():
    base = tiny.params()
    whole = join(*split(base))
    # Beside W the zero product changes the order of sums that XLA chooses, and nothing else.
    np.testing.assert_allclose(hidden(whole), hidden(base), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, lora_merge.merged(whole), base)
    assert lora_merge.merged(base) is base
    assert jax.tree.structure(lora.plain(whole)) == jax.tree.structure(base)


def test_the_merged_policy_is_the_adapted_one():
    base, adapters = tiny.params(), drawn()
    merged = lora_merge.merged(join(split(base)[0], adapters))
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    adapted = hidden(join(split(base)[0], adapters))
    np.testing.assert_allclose(adapted, hidden(merged), atol=1e-5)
    assert np.abs(adapted - hidden(base)).max() > 0.1


def test_a_matrix_by_hand():
    base, adapters = tiny.params(), drawn()
    merged = lora_merge.merged(join(split(base)[0], adapters))["layers"]
    into, out = (np.asarray(adapters["layers"][f"o_lora_{way}"])[1] for way in ("in", "out"))
    want = np.asarray(base["layers"]["o"])[1] + 2.0 * np.einsum("nhr,rd->nhd", into, out)
    np.testing.assert_allclose(merged["o"][1], want, atol=1e-5)


@pytest.mark.slow
def test_the_gradient_of_adapters_is_the_chain_rule_through_the_merged_weights():
    base, adapters = tiny.params(), drawn()
    loss = lambda params: jnp.sum(jnp.sin(hidden(params)))  # noqa: E731
    got = jax.grad(lambda a: loss(join(split(base)[0], a)))(adapters)
    want = jax.grad(lambda a: loss(lora_merge.merged(join(split(base)[0], a))))(adapters)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3, rtol=1e-3), got, want)


@pytest.mark.parametrize("inputs", [1, 2])
def test_beside_a_bfloat16_matrix_the_gradient_is_made_of_bfloat16_products(inputs):
    """Of the same numbers in float32 it is off by bfloat16's rounding."""
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)  # noqa: E731
    into, out = (4, 5)[:inputs], (6, 7)[inputs - 1 :]
    x, w, d = draw(0, 3, 8, *into), draw(1, *into, *out), draw(4, 3, 8, *out)
    a, b = draw(2, *into, 2), draw(3, 2, *out)

    def loss(x, w, a, b):
        return jnp.sum(d * apply(x, Adapted(w, a, b, jnp.float32(0.5)), inputs))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    low = x.astype("bfloat16"), w.astype("bfloat16"), a, b
    products = [line for line in gradient.lower(*low).as_text().splitlines() if "dot_gen" in line]
    assert len(products) >= 7
    for line in products:
        assert line.split(" : (")[1].split(") -> ")[0].count("bf16") == 2, line
    exact = gradient(*(x.astype("float32") for x in low))
    for name, got, want in zip("xwab", gradient(*low), exact, strict=True):
        gap = jnp.linalg.norm(got.astype("float32") - want) / jnp.linalg.norm(want)
        assert gap < 1e-2, f"{name}: {gap:.1e}"


def test_wrong_settings_are_refused_by_name():
    with pytest.raises(ValueError, match="rank is 0"):
        lora.Lora(0, 1.0, ("q",))
    with pytest.raises(ValueError, match="has 'embed'; there are q, k"):
        lora.Lora(1, 1.0, ("embed",))
    with pytest.raises(ValueError, match="targets is empty"):
        lora.Lora(1, 1.0, ())


def test_factors_are_cut_as_their_matrices_are():
    """Width over "fsdp" where a trainer cuts it; heads and feed-forward over "tensor"."""
    mesh = jax.sharding.AbstractMesh((4, 2), meshes.AXES)
    fresh = jax.eval_shape(lambda: lora.init(tiny.CONFIG, ALL, jax.random.key(0)))
    for table, width in ((meshes.TRAINING, "fsdp"), (meshes.SERVING, None)):
        where = shardings(tiny.CONFIG, mesh, table)
        found = lora.shardings(fresh, where)["layers"]
        inwards, outwards = (None, width), (None, None, "tensor")
        over_heads, over_width = (None, "tensor"), (None, None, width)
        cut = {
            "q": (inwards, outwards), "o": (over_heads, over_width),
            "gate": (inwards, outwards), "down": (over_heads, over_width),
        }  # fmt: skip
        cut |= {"k": cut["q"], "v": cut["q"], "up": cut["gate"]}
        whole = lambda spec: () if spec[-1] is None else spec  # noqa: E731
        for name, (into, out) in cut.items():
            assert tuple(found[f"{name}_lora_in"].spec) == whole(into), name
            assert tuple(found[f"{name}_lora_out"].spec) == whole(out), name
        assert lora.shardings(lora.plain(fresh), where) == where
