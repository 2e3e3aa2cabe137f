"""A mixture of experts: routing, sums, gradients, load, and experts spread over devices."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_policies import EXPERTS, MOE

import pallas_kernels
from configs.models import MODELS
from notepad_jax.model import attention, logprobs, moe, parameters, policy
from notepad_jax.model.config import Experts
from pallas_kernels import aot
from tests import tpu_compiler


def moe_params():
    rng = np.random.default_rng(0)

    def draw(spec):
        norm = spec.scale == 0
        drawn = rng.normal(size=spec.shape) * (0.2 if norm else 2 * spec.scale) + norm
        return jnp.asarray(drawn, "float32")

    return parameters.map_specs(draw, MOE)


def test_routing_by_hand():
    """Two tokens of width 1, three experts, the best two."""
    two = Experts(count=3, per_token=2, feed_forward=1, normalize=False)
    router = jnp.log(jnp.array([[1.0, 5.0, 2.0]]))  # softmax: 1/8, 5/8, 2/8; and their inverses
    chosen, weights = moe.route(jnp.array([[1.0], [-1.0]]), router, two)
    np.testing.assert_array_equal(chosen, [[1, 2], [0, 2]])
    np.testing.assert_allclose(weights[0], [5 / 8, 2 / 8], rtol=1e-6)
    even = dataclasses.replace(two, normalize=True)
    _, weights = moe.route(jnp.array([[1.0], [-1.0]]), router, even)
    np.testing.assert_allclose(weights, [[5 / 7, 2 / 7], [2 / 3, 1 / 3]], rtol=1e-6)


def test_experts_are_a_weighted_sum_of_small_networks():
    params = {name: leaf[0] for name, leaf in moe_params()["layers"].items()}
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    found, routes = jax.jit(lambda x: moe.RoutedSwiGLU(EXPERTS, params)(x))(x)
    flat = x.reshape(-1, 8)
    chosen, weights = moe.route(flat, params["router"], EXPERTS)
    want = np.zeros_like(flat)
    gates, ups, downs = (np.asarray(params[f"expert_{n}"]) for n in ("gate", "up", "down"))
    for i, row in enumerate(np.asarray(flat)):
        for expert, weight in zip(np.asarray(chosen[i]), np.asarray(weights[i]), strict=True):
            gate = row @ gates[expert]
            inside = gate / (1 + np.exp(-gate)) * (row @ ups[expert])
            want[i] += weight * (inside @ downs[expert])
    np.testing.assert_allclose(found.reshape(-1, 8), want, atol=1e-5)
    np.testing.assert_array_equal(routes.reshape(-1, 2), chosen)


@pytest.mark.slow
def test_megablox_and_ragged_dot_agree_in_value_and_gradient():
    """The TPU kernel in interpret mode, with empty experts and rows that fill no tile."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (150, 16)), jax.random.normal(keys[1], (5, 16, 24))
    sizes = jnp.array([70, 0, 3, 77, 0], jnp.int32)
    weight = jax.random.normal(keys[2], (150, 24))

    def value(x, w):
        return jnp.sum(moe.grouped_matmul(x, w, sizes) * weight)

    want = jax.value_and_grad(value, (0, 1))(x, w)
    with pallas_kernels.using("interpret"):
        got = jax.value_and_grad(value, (0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_load_counts_the_tokens_that_count():
    params = moe_params()
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 21, (2, 16)), jnp.int32)
    counted = np.arange(16) < np.array([[16], [5]])
    attend = attention.packed(MOE, jnp.full((2, 16), 16, jnp.int32))
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))

    @jax.jit
    def run(params):
        hidden, _, _, routes = policy.forward(MOE, params, ids, positions, attend)
        return hidden, routes, moe.load(routes, jnp.asarray(counted), EXPERTS.count)

    hidden, routes, load = run(params)
    assert routes.shape == (3, 2, 16, 2)  # [L, B, T, A]
    plain = jax.jit(lambda p: policy.forward(MOE, p, ids, positions, attend)[0])(params)
    np.testing.assert_allclose(hidden, plain, atol=1e-6)
    for layer in range(3):
        want = np.bincount(np.asarray(routes[layer])[counted].reshape(-1), minlength=4)
        np.testing.assert_array_equal(load[layer], want)
    assert float(load.sum()) == 3 * 2 * 21  # layers, experts a token, tokens
    metrics = moe.load_metrics(jnp.array([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]))
    assert float(metrics["moe_load_max"]) == pytest.approx((2 + 1) / 2)
    assert float(metrics["moe_load_idle"]) == pytest.approx(1 / 8)


@pytest.mark.slow
def test_every_expert_that_is_used_gets_gradient_and_remat_changes_nothing():
    params, ids = moe_params(), jnp.arange(20, dtype=jnp.int32)[None]
    attend = attention.packed(MOE, jnp.full((1, 20), 20, jnp.int32))

    def loss(params, remat):
        args = (MOE, params, ids, jnp.arange(20)[None], attend)
        hidden, _, _, routes = policy.forward(*args, remat=remat)
        logp, _, _ = logprobs.token_logprobs(MOE, params, hidden, jnp.arange(20), ids[0], 1.0)
        return -logp.sum(), routes

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    plain, routes = grad(params, False)
    again, _ = grad(params, True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), again, plain)
    size = np.abs(np.asarray(plain["layers"]["expert_down"])).max(axis=(2, 3))  # [L, E]
    for layer in range(3):
        used = np.isin(np.arange(4), np.asarray(routes[layer]))
        assert (size[layer][used] > 0).all() and (size[layer][~used] == 0).all()
    assert float(jnp.abs(plain["layers"]["router"]).max()) > 1e-6


def test_experts_have_a_logical_axis_of_their_own():
    specs = parameters.specs(MOE)["layers"]
    axes = {name: spec.axes for name, spec in specs.items() if "expert" in spec.axes}
    assert set(axes) == {"expert_gate", "expert_up", "expert_down"}
    for name, places in axes.items():
        assert specs[name].shape[places.index("expert")] == EXPERTS.count


SPREAD = """
import numpy as np, jax, jax.numpy as jnp
from notepad_jax.model import attention, parameters, policy
from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.parallel import mesh as meshes, place

config = PolicyConfig(
    vocab_size=24, width=8, layers=2, heads=4, kv_heads=2, head_size=6, feed_forward=12,
    rope_theta=1e6, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
    valid_vocab=24, experts=Experts(count=4, per_token=2, feed_forward=6, normalize=True),
)
rng = np.random.default_rng(0)
draw = lambda s: jnp.asarray(rng.normal(size=s.shape) * s.scale * 2 + (s.scale == 0), "float32")
params = parameters.map_specs(draw, config)
mesh = meshes.make(tensor=2)
table = dict(meshes.TRAINING) | {"expert": "tensor"}
spread = place.commit(params, parameters.shardings(config, mesh, table))
assert spread["layers"]["expert_gate"].addressable_shards[0].data.shape == (2, 2, 4, 6)

@jax.jit
def run(params):
    tokens = jnp.arange(64).reshape(4, 16) % 24
    positions = jnp.broadcast_to(jnp.arange(16), (4, 16))
    attend = attention.packed(config, jnp.full((4, 16), 16, jnp.int32))
    return policy.forward(config, params, tokens, positions, attend)

one, many = run(params), run(spread)
np.testing.assert_allclose(many[0], one[0], atol=2e-5)
np.testing.assert_array_equal(many[3], one[3])
"""


@pytest.mark.slow
def test_experts_spread_over_devices_compute_the_same():
    """Expert parallelism is one line in the table of rules: the logical axis "expert"."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SPREAD], cwd=root, env=os.environ | flags, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@tpu_compiler.needed
@pytest.mark.parametrize("rows", [64, 16384])  # decoding and training, Qwen3-30B-A3B
def test_megablox_compiles_for_the_smallest_tpu(rows):
    experts = MODELS["Qwen3-30B-A3B"].experts
    shapes = (rows, 2048), (experts.count, 2048, experts.feed_forward)
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    sizes = jax.ShapeDtypeStruct((experts.count,), "int32")

    def both(x, w, sizes):
        out, back = jax.vjp(lambda x, w: moe.grouped_matmul(x, w, sizes), x, w)
        return out, back(out)

    with pallas_kernels.using("pallas"):
        compiled = aot.compile_for("v5e", both, x, w, sizes)
    assert compiled.as_text().count('"tpu_custom_call"') == 3  # forward, dx, dw
