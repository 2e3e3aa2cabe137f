"""The decoder: numbers done by hand, and that packing and caching change nothing."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.extend.core import jaxprs_in_params

import pallas_kernels
from notepad_jax.checkpoint import abstract_trees
from notepad_jax.model import attention, layers, parameters, policy
from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.model.matrices import Unstacked


def test_rms_norm_by_hand():
    x = jnp.array([3.0, 4.0])  # mean square 12.5
    got = layers.rms_norm(x, jnp.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(got, [3 / 12.5**0.5, 8 / 12.5**0.5], rtol=1e-6)
    half = layers.rms_norm(x.astype(jnp.bfloat16), jnp.ones(2), 0.0)
    assert half.dtype == jnp.bfloat16  # computed in float32, handed back as it came


def test_rotation_by_hand():
    """Head size 4, theta 100: pairs (0, 2) turn by p, pairs (1, 3) by p / 10."""
    positions = jnp.array([[0, 2]])
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    x_BTNH = jnp.broadcast_to(x, (1, 2, 1, 4))
    got = np.asarray(layers.rotate(x_BTNH, layers.rope_angles(positions, 4, 100.0)))[0, :, 0]
    np.testing.assert_allclose(got[0], x)
    c, s, c10, s10 = np.cos(2), np.sin(2), np.cos(0.2), np.sin(0.2)
    want = [1 * c - 3 * s, 2 * c10 - 4 * s10, 3 * c + 1 * s, 4 * c10 + 2 * s10]
    np.testing.assert_allclose(got[1], want, rtol=1e-6)


def test_a_policy_of_one_layer_by_hand():
    """Width 2, one head of 2, no rotation at position 0: every number fits on a card."""
    config = PolicyConfig(
        vocab_size=2, width=2, layers=1, heads=1, kv_heads=1, head_size=2, feed_forward=1,
        rope_theta=1e4, rms_eps=0.0, qk_norm=False, attention_bias=False, tied_embeddings=True,
        valid_vocab=2,
    )  # fmt: skip
    one = jnp.eye(2)[None]
    params = {
        "embed": jnp.array([[3.0, 4.0], [5.0, 12.0]]),
        "layers": {
            "attn_norm": jnp.ones((1, 2)), "mlp_norm": jnp.ones((1, 2)),
            "q": one[:, :, None], "k": one[:, :, None], "v": one[:, :, None],
            "o": one[:, None],
            "gate": jnp.array([[[1.0], [0.0]]]), "up": jnp.array([[[0.0], [1.0]]]),
            "down": jnp.array([[[2.0, -2.0]]]),
        },
        "final_norm": jnp.ones(2),
    }  # fmt: skip
    kv_end = jnp.ones((1, 1), jnp.int32)
    hidden, *_ = policy.forward(
        config, params, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32),
        attention.packed(config, kv_end),
    )  # fmt: skip
    norm = lambda x: x / np.sqrt(np.mean(x * x))  # noqa: E731
    h = np.array([3.0, 4.0])
    h = h + norm(h)  # one key, so attention hands its value on
    gate, up = norm(h)
    h = h + gate / (1 + np.exp(-gate)) * up * np.array([2.0, -2.0])
    np.testing.assert_allclose(hidden[0, 0], norm(h), rtol=1e-5)


def contexts():
    """Three contexts: the first two share their first 9 tokens."""
    rng = np.random.default_rng(0)
    shared, tails = rng.integers(0, 60, 9), [rng.integers(0, 60, n) for n in (5, 8)]
    return shared, tails, rng.integers(0, 60, 12)


LENGTH = 36  # of every row, so that one program serves all


WINDOWED = dataclasses.replace(tiny.CONFIG, windows=(4, 0, 4))


@functools.partial(jax.jit, static_argnames="config")
def hidden_states(params, tokens, positions, kv_end, config=tiny.CONFIG):
    attend = attention.packed(config, kv_end[None], positions[None])
    return policy.forward(config, params, tokens[None], positions[None], attend)[0][0]


def row(*parts):
    """Joins the parts to one row of `LENGTH` int32, zero padded."""
    joined = np.concatenate(parts)
    return np.pad(joined, (0, LENGTH - len(joined))).astype(np.int32)


def one_context(params, tokens, config=tiny.CONFIG):
    n = len(tokens)
    kv_end = row([n] * n, np.arange(n, LENGTH) + 1)
    return np.asarray(hidden_states(params, row(tokens), row(np.arange(n)), kv_end, config))[:n]


@pytest.mark.parametrize("config", [tiny.CONFIG, WINDOWED], ids=["full", "windows"])
def test_a_packed_row_is_its_contexts_one_by_one(config):
    params, (shared, tails, other) = tiny.params(), contexts()
    tokens = row(shared, *tails, other)
    positions = row(np.arange(9), 9 + np.arange(5), 9 + np.arange(8), np.arange(12))
    kv_end = row([22] * 9, [14] * 5, [22] * 8, [34] * 12, [35, 36])
    packed = np.asarray(hidden_states(params, tokens, positions, kv_end, config))
    for tail, here in zip(tails, (slice(9, 14), slice(14, 22)), strict=True):
        want = one_context(params, np.concatenate([shared, tail]), config)
        np.testing.assert_allclose(packed[:9], want[:9], atol=1e-5)
        np.testing.assert_allclose(packed[here], want[9:], atol=1e-5)
    np.testing.assert_allclose(packed[22:34], one_context(params, other, config), atol=1e-5)


def test_a_token_out_of_all_windows_changes_nothing():
    """Three windows of 4 reach 9 back in all; one full layer among them reaches everything."""
    params, tokens = tiny.params(), np.arange(30) % 50
    other = np.where(np.arange(30) == 10, 55, tokens)
    for windows, reached in (((4, 4, 4), np.arange(10, 20)), ((4, 0, 4), np.arange(10, 30))):
        config = dataclasses.replace(tiny.CONFIG, windows=windows)
        before, after = (one_context(params, text, config) for text in (tokens, other))
        changed = np.flatnonzero(np.abs(before - after).max(axis=1) > 1e-6)
        np.testing.assert_array_equal(changed, reached)


@pytest.mark.parametrize(
    "windows, says",
    [
        ((4, 0), "windows has 2 numbers for 3 layers"),
        ((4, 0, -1), r"windows is \(4, 0, -1\); all windows of a policy have one size, above 0"),
        ((4, 0, 8), r"windows is \(4, 0, 8\); all windows of a policy have one size"),
    ],
)
def test_windows_that_no_policy_has(windows, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(tiny.CONFIG, windows=windows)


def test_no_window_anywhere_is_no_windows():
    """Two policies that compute the same are equal, and compile once."""
    assert dataclasses.replace(tiny.CONFIG, windows=(0, 0, 0)) == tiny.CONFIG


def test_cache_entries_are_the_keys_and_values_of_the_forward_pass():
    params = tiny.params()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 60, (2, 16)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    attend = attention.packed(tiny.CONFIG, jnp.full((2, 16), 16, jnp.int32))

    def with_keys(layer, q, k, v, carry):
        out, carry, _ = attend(layer, q, k, v, carry)
        return out, carry, (k, v)

    want = jax.jit(
        lambda params: policy.forward(tiny.CONFIG, params, tokens, positions, with_keys)[2]
    )(params)
    got = jax.jit(
        lambda params: policy.Policy(tiny.CONFIG, params).cache_entries(tokens, positions, attend)
    )(params)
    assert got[0].shape == (3, 2, 16, 2, 8)  # [L, B, T, K, H]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


MOE = dataclasses.replace(tiny.CONFIG, experts=Experts(4, 2, 24, True))


@pytest.mark.parametrize("backend", ["reference", "xla"])  # a loop over layers; none, on GPUs
@pytest.mark.parametrize("config", [tiny.CONFIG, WINDOWED, MOE], ids=["full", "windows", "experts"])
def test_matrices_that_lie_apart_give_the_same_numbers(config, backend):
    params = tiny.params(config=config)
    apart = parameters.unstacked(config, params)
    names = {name for name, leaf in apart["layers"].items() if isinstance(leaf, Unstacked)}
    dense = set() if config.experts else {"gate", "up", "down"}
    assert names == {"q", "k", "v", "o"} | dense
    tokens = contexts()[2]
    with pallas_kernels.using(backend):
        want = one_context(params, tokens, config)
        found = one_context(apart, tokens, config)
    if backend == "reference":
        np.testing.assert_array_equal(found, want)
    np.testing.assert_allclose(found, want, atol=1e-6)


def test_on_gpus_the_layers_of_matrices_apart_are_no_loop():
    """A loop is a launch of everything in it anew, by the host."""
    apart = parameters.unstacked(tiny.CONFIG, tiny.params())

    def loops(params, backend):
        tokens, at = jnp.zeros((1, 8), jnp.int32), jnp.arange(8)[None]

        def run(tokens):
            attend = attention.packed(tiny.CONFIG, jnp.full((1, 8), 8))
            return policy.forward(tiny.CONFIG, params, tokens, at, attend)[0]

        with pallas_kernels.using(backend):
            return str(jax.make_jaxpr(run)(tokens)).count("scan[")

    assert loops(apart, "xla") == loops(tiny.params(), "xla") - 1
    assert loops(apart, "reference") == loops(tiny.params(), "reference")


def test_matrices_that_lie_apart_take_no_memory():
    params = tiny.params()
    gate = params["layers"]["gate"]  # 32 x 48 float32 a layer: 96 times 64 bytes
    apart = parameters.unstacked(tiny.CONFIG, params)["layers"]["gate"]
    addresses = [leaf.unsafe_buffer_pointer() for leaf in apart.layers]
    first, size = gate.unsafe_buffer_pointer(), gate[0].nbytes
    assert addresses == [first, first + size, first + 2 * size]


def test_a_stack_that_is_cast_or_int8_stays_one():
    """What is written anew for every product gains nothing by lying apart."""
    params = tiny.params()
    for dtype in ("int8", "bfloat16"):
        kept = abstract_trees.cast(params, parameters.rollout_target(tiny.CONFIG, params, dtype))
        layers = parameters.unstacked(tiny.CONFIG, kept)["layers"]
        assert not any(isinstance(leaf, Unstacked) for leaf in layers.values())


def products(jaxpr) -> collections.Counter:
    """Kernels by name, and matrix products outside of kernels."""
    found = collections.Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found[equation.params["name"]] += 1
            continue
        found["product"] += equation.primitive.name == "dot_general"
        for inner in jaxprs_in_params(equation.params):
            found += products(inner)
    return found


@pytest.mark.parametrize("backend", ["pallas", "xla", "reference"])
def test_a_backward_that_rematerialises_does_not_run_attention_forward_again(backend):
    """A layer is one scan: made again are q, k, v, o, gate and up, and nothing of attention."""
    params, tokens = tiny.params(), jnp.zeros((1, 256), jnp.int32)
    kv_end = jnp.full((1, 256), 256, jnp.int32)

    def loss(params, remat):
        attend = attention.packed(tiny.CONFIG, kv_end)
        positions = jnp.arange(256)[None]
        return policy.forward(tiny.CONFIG, params, tokens, positions, attend, remat=remat)[0].sum()

    gradient = jax.make_jaxpr(jax.grad(loss), static_argnums=1)
    with pallas_kernels.using(backend):
        kept, made_again = (products(gradient(params, remat).jaxpr) for remat in (False, True))
    if backend == "pallas":
        assert kept["packed_attention_forward"] == 1
    assert made_again - kept == {"product": 6} and not kept - made_again
