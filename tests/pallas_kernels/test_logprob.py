"""The token logprob kernels in TPU interpret mode, against the jnp twin and against float64.

Everything compiled has the same few tiny shapes: an interpreted kernel takes seconds to
compile and milliseconds a grid step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # no public door to its races
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import reference
from pallas_kernels.logprob import Sizes, token_logprob

TOKENS, WIDTH, VOCAB, VALID = 20, 24, 300, 290  # two blocks of 16 x three of 128, both ragged
SIZES = Sizes(16, 128, 16, 128, 16, 128)
TEMPERATURE = 0.7


def draw(seed: int, tokens: int = TOKENS, vocab: int = VOCAB, valid: int = VALID):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, WIDTH)).astype(np.float32)
    w = rng.normal(size=(WIDTH, vocab)).astype(np.float32)
    return x, w, rng.integers(0, valid, tokens).astype(np.int32)


# What float32 leaves of numbers around 1; the jnp twin's entropy is ten times worse.
TIGHT, TWIN = 5e-6, 2e-5


def in_float64(x, w, labels, temperature=TEMPERATURE, valid=VALID):
    """Mathematics: one softmax over every valid logit."""
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64)[:, :valid] / temperature
    peak = logits.max(axis=1)
    lse = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    log_p = logits - lse[:, None]
    p = np.exp(log_p)
    safe = np.where(p > 0, log_p, 0)
    return log_p[np.arange(len(labels)), labels], lse, -(p * safe).sum(axis=1)


def kernel(x, w, labels, **changes):
    settings = dict(
        temperature=TEMPERATURE, valid_vocab=VALID, sizes=SIZES, interpret=True, transposed=False
    )
    return token_logprob(*map(jnp.asarray, (x, w, labels)), **(settings | changes))


@functools.partial(jax.jit, static_argnames=("temperature", "valid_vocab", "transposed"))
def forward(x, w, labels, **static):
    return kernel(x, w, labels, **static)


@functools.partial(jax.jit, static_argnames=("function", "valid_vocab", "transposed"))
def gradients(function, x, w, labels, cotangents_3T, valid_vocab=VALID, transposed=False):
    """dx and dw for each row of cotangents, all through one compiled backward."""
    if transposed:
        call = lambda x, w: function(x, w.T, labels, valid_vocab=valid_vocab, transposed=True)  # noqa: E731
    else:
        call = lambda x, w: function(x, w, labels, valid_vocab=valid_vocab)  # noqa: E731
    return jax.vjp(call, x, w)[1](tuple(cotangents_3T))


def jnp_twin(x, w, labels, **changes):
    return reference.token_logprob(
        *map(jnp.asarray, (x, w, labels)),
        **(dict(temperature=TEMPERATURE, valid_vocab=VALID) | changes),
    )


def assert_close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


# ---------------------------------------------------------------- forward


@pytest.mark.parametrize("transposed", [False, True])
def test_forward_is_the_float64_softmax(transposed):
    x, w, labels = draw(0)
    found = forward(x, w.T if transposed else w, labels, transposed=transposed)
    assert all(r.dtype == jnp.float32 and r.shape == (TOKENS,) for r in found)
    assert_close(found, in_float64(x, w, labels), TIGHT)


@pytest.mark.parametrize("x_dtype, w_dtype", [("bfloat16", "bfloat16"), ("float32", "bfloat16"),
                                              ("bfloat16", "float32")])  # fmt: skip
def test_each_pair_of_dtypes_is_the_jnp_twin(x_dtype, w_dtype):
    x, w, labels = draw(1)
    x, w = jnp.asarray(x, x_dtype), jnp.asarray(w, w_dtype)
    cotangents = np.random.default_rng(1).normal(size=(3, TOKENS)).astype(np.float32)

    @jax.jit
    def both(x, w):
        results, backward = jax.vjp(lambda x, w: kernel(x, w, labels), x, w)
        return results, backward(tuple(cotangents))

    results, found = both(x, w)
    assert_close(results, in_float64(x, w.astype(x_dtype), labels), TIGHT)
    assert [g.dtype for g in found] == [x.dtype, w.dtype]
    assert_close(found, gradients(jnp_twin, x, w, labels, cotangents), 5e-3)


def test_labels_at_the_edges_of_blocks():
    x, w, _ = draw(2)
    labels = np.resize(np.array([0, 127, 128, 255, 256, VALID - 1], np.int32), TOKENS)
    assert_close(forward(x, w, labels), in_float64(x, w, labels), TIGHT)


def test_huge_logits_lose_nothing_but_their_own_rounding():
    """Logits of +-1e4; every weight is a small integer, so the products are exact."""
    rng = np.random.default_rng(3)
    x = np.zeros((TOKENS, WIDTH), np.float32)
    x[:, 0] = rng.choice([-1e4, 1e4], TOKENS)
    x[:, 1] = 1
    w = rng.integers(-3, 4, (WIDTH, VOCAB)).astype(np.float32)
    w[0] = rng.choice([-1, 1], VOCAB)
    labels = rng.integers(0, VALID, TOKENS).astype(np.int32)
    found = forward(x, w, labels)
    logprob, lse, entropy = in_float64(x, w, labels)
    assert np.abs(lse).max() > 1e4
    np.testing.assert_allclose(found[0], logprob, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(found[1], lse, rtol=1e-6)
    np.testing.assert_allclose(found[2], entropy, atol=5e-6)  # the jnp twin loses 1e-3 here
    cotangents = np.ones((3, TOKENS), np.float32)
    assert all(np.isfinite(g).all() for g in gradients(kernel, x, w, labels, cotangents))


def test_a_label_that_is_no_valid_id_has_no_probability():
    x, w, labels = draw(4)
    labels[:3] = VALID, VOCAB - 1, -1
    logprob, lse, entropy = forward(x, w, labels)
    assert (logprob[:3] < -1e29).all() and (logprob[3:] > -100).all()
    valid = np.where((labels >= 0) & (labels < VALID), labels, 0)
    assert_close((lse, entropy), in_float64(x, w, valid)[1:], TIGHT)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    sharpness=st.sampled_from([1e-3, 1.0, 30.0]),
    padding=st.integers(0, TOKENS),
    label=st.integers(0, VALID - 1),
)
def test_fuzz_forward(seed, sharpness, padding, label):
    x, w, labels = draw(seed)
    w *= sharpness
    x[TOKENS - padding :] = 0  # all padding included
    labels[::3] = label
    rounding = TIGHT * max(1.0, np.abs(x @ w).max() / TEMPERATURE)
    assert_close(forward(x, w, labels), in_float64(x, w, labels), rounding)


# ---------------------------------------------------------------- invariances


def test_a_constant_added_to_all_logits_shifts_the_logsumexp_alone():
    x, w, labels = draw(5)
    x[:, -1], w[-1] = 0, 1
    shift = np.linspace(-40, 40, TOKENS).astype(np.float32)
    moved = x.copy()
    moved[:, -1] = shift
    before, after = forward(x, w, labels), forward(moved, w, labels)
    assert_close((after[0], after[2]), (before[0], before[2]), TWIN)  # the rounding of 40
    np.testing.assert_allclose(after[1] - before[1], shift / TEMPERATURE, atol=2e-5)


def test_a_temperature_is_a_scale_of_the_hidden_states():
    x, w, labels = draw(6)
    assert_close(
        forward(x, w, labels, temperature=0.5), forward(2 * TEMPERATURE * x, w, labels), 2e-6
    )


def test_permuting_the_vocabulary_permutes_nothing_but_labels():
    x, w, labels = draw(7)
    order = np.random.default_rng(7).permutation(VALID)
    permuted = w.copy()
    permuted[:, :VALID] = w[:, order]
    found = forward(x, permuted, np.argsort(order)[labels].astype(np.int32))
    assert_close(found, forward(x, w, labels), TIGHT)


def test_ids_past_the_valid_ones_change_nothing_and_get_no_gradient():
    x, w, labels = draw(8)
    other = w.copy()
    other[:, VALID:] = 1e3
    cotangents = np.ones((3, TOKENS), np.float32)
    for a, b in zip(forward(x, w, labels), forward(x, other, labels), strict=True):
        np.testing.assert_array_equal(a, b)
    (dx, dw), (other_dx, other_dw) = (
        gradients(kernel, x, table, labels, cotangents) for table in (w, other)
    )
    np.testing.assert_array_equal(dx, other_dx)
    np.testing.assert_array_equal(dw, other_dw)
    assert not np.asarray(dw[:, VALID:]).any()


# ---------------------------------------------------------------- backward


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_each_result(transposed):
    x, w, labels = draw(9)
    rng = np.random.default_rng(9)
    for result in range(3):
        cotangents = np.zeros((3, TOKENS), np.float32)
        cotangents[result] = rng.normal(size=TOKENS)
        found = gradients(kernel, x, w, labels, cotangents, transposed=transposed)
        assert_close(found, gradients(jnp_twin, x, w, labels, cotangents), TWIN)


@pytest.mark.parametrize("tokens, vocab, valid", [(1, 128, 128), (16, 257, 120), (33, 384, 257)])
def test_shapes_around_a_block(tokens, vocab, valid):
    """One token; a ragged last block that nobody visits; a block that holds one id."""
    x, w, labels = draw(10, tokens, vocab, valid)
    cotangents = np.random.default_rng(10).normal(size=(3, tokens)).astype(np.float32)

    @jax.jit
    def both(x, w):
        results, backward = jax.vjp(lambda x, w: kernel(x, w, labels, valid_vocab=valid), x, w)
        return results, backward(tuple(cotangents))

    results, found = both(x, w)
    assert_close(results, in_float64(x, w, labels, valid=valid), TIGHT)
    expected = gradients(jnp_twin, x, w, labels, cotangents, valid_vocab=valid)
    assert_close(found, expected, TWIN)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), padding=st.integers(0, TOKENS))
def test_fuzz_gradients(seed, padding):
    """A token without a cotangent leaves no trace, whatever it holds."""
    x, w, labels = draw(seed)
    cotangents = np.random.default_rng(seed).normal(size=(3, TOKENS)).astype(np.float32)
    cotangents[:, TOKENS - padding :] = 0
    found = gradients(kernel, x, w, labels, cotangents)
    assert_close(found, gradients(jnp_twin, x, w, labels, cotangents), TWIN)
    assert not np.asarray(found[0][TOKENS - padding :]).any()


def test_no_races_forward_or_backward(capfd):
    x, w, labels = draw(11)
    detect = pltpu.InterpretParams(detect_races=True)

    @jax.jit
    def both(x, w):
        results, backward = jax.vjp(lambda x, w: kernel(x, w, labels, interpret=detect), x, w)
        return results, backward(tuple(jnp.ones((3, TOKENS))))

    results, _ = jax.block_until_ready(both(x, w))
    assert_close(results, in_float64(x, w, labels), TIGHT)
    assert not interpret_pallas_call.races.races_found
    assert "RACE DETECTED" not in capfd.readouterr().out


# ---------------------------------------------------------------- what a grid reads


@pytest.mark.parametrize("transposed", [False, True])
def test_each_weight_block_is_read_once_per_token_block(transposed):
    """Counts how often the index of w's block changes along the grid, forward and dx."""
    x, w, labels = draw(12, tokens=64)
    w = w.T if transposed else w
    both = lambda x, w: jax.vjp(  # noqa: E731
        lambda x, w: kernel(x, w, labels, transposed=transposed), x, w
    )[1](tuple(jnp.ones((3, 64))))
    calls = {
        e.params["name"]: e.params["grid_mapping"]
        for e in _equations(jax.make_jaxpr(both)(x, w).jaxpr)
        if e.primitive.name == "pallas_call"
    }
    token_blocks, vocab_blocks = 4, 3
    fetches = {name: _fetches(mapping, w.shape) for name, mapping in calls.items()}
    assert fetches == {
        "token_logprob_forward": token_blocks * vocab_blocks,
        "token_logprob_dx": token_blocks * vocab_blocks,
        "token_logprob_dw": vocab_blocks,
    }


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                yield from _equations(inner)


def _fetches(mapping, shape):
    """How many blocks of the input of this shape a pipelined grid copies into VMEM."""
    (weights,) = [
        m for m in mapping.block_mappings[: mapping.num_inputs] if m.array_aval.shape == shape
    ]
    index_map, previous, count = weights.index_map_jaxpr, None, 0
    for point in np.ndindex(*mapping.grid):
        arguments = [np.int32(i) for i in point] + [np.zeros(2, np.int32)]
        index = jax.core.eval_jaxpr(index_map.jaxpr, index_map.consts, *arguments)[:2]
        count += tuple(map(int, index)) != previous
        previous = tuple(map(int, index))
    return count
