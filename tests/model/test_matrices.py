"""int8 matrices: how far rounding goes, where it goes nowhere, and that products know of it."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from configs.models import MODELS
from notepad_jax.checkpoint import abstract_trees
from notepad_jax.model import attention, moe, parameters, policy
from notepad_jax.model.config import Experts
from notepad_jax.model.matrices import Quantized, apply, quantize
from notepad_jax.parallel import mesh

MOE = dataclasses.replace(tiny.CONFIG, experts=Experts(4, 2, 24, True))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 16)), jnp.int32)


def int8(config, params):
    """`params` as an engine with int8 weights keeps them."""
    return abstract_trees.cast(
        params, abstract_trees.placed(parameters.rollout_target(config, params, "int8"))
    )


# ---------------------------------------------------------------- rounding


def test_a_matrix_by_hand():
    """Two output channels, largest 254 and 1: scales 2 and 1/127."""
    matrix = jnp.array([[254.0, 0.5], [-3.1, -1.0], [0.9, 0.0]])
    made = quantize(matrix, (0,))
    np.testing.assert_allclose(made.scale, [[2.0, 1 / 127]], rtol=1e-7)
    np.testing.assert_array_equal(made.values, [[127, 64], [-2, -127], [0, 0]])  # 63.5 to even
    np.testing.assert_allclose(
        tiny.multiplied_out(made), [[254, 64 / 127], [-4, -1], [0, 0]], rtol=1e-6
    )
    assert (made.values.dtype, made.scale.dtype) == (jnp.int8, jnp.float32)


SHAPES = [((7, 3), (0,)), ((3, 5, 2, 4), (1,)), ((2, 4, 3, 5), (1, 2)), ((1, 1), (0,))]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(SHAPES),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)  # fmt: skip
def test_every_element_is_off_by_at_most_half_a_scale(seed, shape_and_inputs, dtype):
    """Channels differ in size by up to 10 powers of ten; some are zero."""
    shape, inputs = shape_and_inputs
    rng = np.random.default_rng(seed)
    sizes = [1 if axis in inputs else n for axis, n in enumerate(shape)]
    loud = 10.0 ** rng.uniform(-6, 4, sizes) * (rng.random(sizes) < 0.9)
    matrix = jnp.asarray(rng.normal(size=shape) * loud, dtype)
    made = quantize(matrix, inputs)
    assert made.values.shape == tuple(shape) and list(made.scale.shape) == sizes
    exact, scale = np.asarray(matrix, np.float64), np.asarray(made.scale, np.float64)
    off = np.abs(np.asarray(made.values, np.float64) * scale - exact)
    # the quotient was rounded to 24 bits before it was rounded to a whole number
    assert (off <= scale / 2 * (1 + 1e-5)).all()
    # no channel wastes its range: its largest element is 127
    peak = np.abs(np.asarray(made.values, int)).max(axis=inputs, keepdims=True)
    zero = np.abs(exact).max(axis=inputs, keepdims=True) == 0
    assert (peak == np.where(zero, 0, 127)).all()
    again = quantize(tiny.multiplied_out(made), inputs)
    np.testing.assert_array_equal(again.values, made.values)


def on_the_grid(rng, shape, inputs, powers=False):
    """Whole numbers to 127 times a scale of 8 bits (or a power of two): 127 * scale is exact."""
    values = rng.integers(-127, 128, shape)
    first = tuple(0 if axis in inputs else slice(None) for axis in range(len(shape)))
    values[first] = 127
    sizes = [1 if axis in inputs else n for axis, n in enumerate(shape)]
    scale = 2.0 ** rng.integers(-12, -8, sizes)
    if not powers:
        scale = scale * (1 + rng.integers(0, 128, sizes) / 128)
    return jnp.asarray(values * scale, "float32")


@pytest.mark.parametrize("inputs", [(0,), (1,), (0, 1), (1, 2)])
def test_a_matrix_on_the_grid_comes_back_exactly(inputs):
    matrix = on_the_grid(np.random.default_rng(0), (5, 6, 7), inputs)
    np.testing.assert_array_equal(tiny.multiplied_out(quantize(matrix, inputs)), matrix)


def test_weights_that_are_not_numbers_stay_so():
    matrix = jnp.ones((3, 3)).at[1, 1].set(jnp.nan).at[2, 2].set(jnp.inf)
    back = np.asarray(tiny.multiplied_out(quantize(matrix, (0,))))
    assert np.isfinite(back[:, 0]).all() and np.isnan(back[1, 1]) and np.isnan(back[2, 2])


# ---------------------------------------------------------------- products


@pytest.mark.parametrize(("x_axes", "shape", "inputs"), [
    ((12,), (12, 20), 1),  # feed-forward
    ((12,), (12, 4, 5), 1),  # to heads
    ((4, 5), (4, 5, 12), 2),  # from heads
])  # fmt: skip
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_a_product_is_that_of_the_matrix_multiplied_out(x_axes, shape, inputs, rows):
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (*rows, *x_axes)), jax.random.normal(keys[1], shape)
    made = quantize(w, tuple(range(inputs)))
    want = np.tensordot(np.asarray(x, np.float64), np.asarray(tiny.multiplied_out(made)), inputs)
    np.testing.assert_allclose(jax.jit(apply, static_argnums=2)(x, made, inputs), want, atol=1e-5)
    np.testing.assert_allclose(apply(x, tiny.multiplied_out(made), inputs), want, atol=1e-5)


def test_narrow_products_are_summed_in_float32():
    """4096 * 127 would overflow float16; bfloat16 would lose the ones beside 256."""
    x = jnp.ones((1, 4096), "float16")
    made = Quantized(jnp.full((4096, 1), 127, jnp.int8), jnp.full((1, 1), 1e-3))
    assert float(apply(x, made)[0, 0]) == np.float16(4096 * 127e-3)
    one = Quantized(jnp.ones((4096, 1), jnp.int8), jnp.full((1, 1), 2.0**-12))
    assert float(apply(x.astype("bfloat16"), one)[0, 0]) == 1.0


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_grouped_product_takes_every_experts_own_scales(backend):
    """Empty experts included; channels of one expert differ by powers of ten from another's."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (150, 16))
    w = jax.random.normal(keys[1], (5, 16, 24)) * 10.0 ** jnp.arange(-2, 3)[:, None, None]
    sizes, made = jnp.array([70, 0, 3, 77, 0], jnp.int32), quantize(w, (1,))
    whole = np.asarray(tiny.multiplied_out(made))
    expert = np.repeat(np.arange(5), sizes)
    want = np.einsum("md,mdf->mf", np.asarray(x), whole[expert])
    with pallas_kernels.using(backend):
        got = moe.grouped_matmul(x, made, sizes)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- whole policies


def hidden(config, params):
    @jax.jit
    def run(params):
        attend = attention.packed(config, jnp.full((2, 16), 16, jnp.int32))
        positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
        return policy.forward(config, params, TOKENS, positions, attend)[0]

    return np.asarray(run(params))


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny.CONFIG, MOE], ids=["dense", "experts"])
def test_an_int8_policy_computes_what_its_multiplied_out_weights_compute(config):
    """Through jit and the scan over layers. Elements of hidden states are about 1."""
    drawn = parameters.init_params(config, jax.random.key(0))
    made = int8(config, drawn)
    found = hidden(config, made)
    np.testing.assert_allclose(found, hidden(config, tiny.multiplied_out(made)), atol=2e-5)
    # A few tokens are sent to another expert, hence the mean.
    assert 1e-3 < np.abs(found - hidden(config, drawn)).mean() < 0.03


def test_only_the_matrices_of_layers_are_quantised():
    config = dataclasses.replace(MOE, attention_bias=True, output_bias=True, tied_embeddings=False)
    target = parameters.rollout_target(config, parameters.abstract_params(config), "int8")
    layers = target.pop("layers")
    assert {name for name, leaf in layers.items() if isinstance(leaf, Quantized)} == {
        "q", "k", "v", "o", "expert_gate", "expert_up", "expert_down"
    }  # fmt: skip
    rest = [leaf for leaf in layers.values() if not isinstance(leaf, Quantized)]
    assert {leaf.dtype for leaf in [*rest, *target.values()]} == {jnp.dtype("bfloat16")}
    assert layers["o"].scale.shape == (3, 1, 1, 32)  # L, of N and H one, D
    assert layers["expert_up"].scale.shape == (3, 4, 1, 24)  # L, E, of D one, F
    dense = parameters.rollout_target(tiny.CONFIG, parameters.abstract_params(tiny.CONFIG), "int8")[
        "layers"
    ]
    assert all(isinstance(dense[name], Quantized) for name in ("gate", "up", "down"))
    with pytest.raises(ValueError, match="'int4'; choose one of float32, bfloat16, int8"):
        parameters.rollout_target(tiny.CONFIG, parameters.abstract_params(tiny.CONFIG), "int4")


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("name", "whole"), [
    ("Qwen2.5-7B-Instruct", 0.572), ("Qwen2.5-14B-Instruct", 0.553), ("Qwen3-4B", 0.549),
    ("Qwen3-30B-A3B", 0.512), ("Llama-3.1-8B", 0.566),
])  # fmt: skip
def test_an_int8_policy_is_little_more_than_half_of_a_bfloat16_one(name, whole):
    """The layers' share is a scale in some thousand bytes over a half; embeddings stay whole."""
    config = MODELS[name]
    abstract = parameters.abstract_params(config)
    narrow, small = (
        parameters.rollout_target(config, abstract, dtype) for dtype in ("bfloat16", "int8")
    )
    assert nbytes(narrow) == 2 * parameters.count(config)
    assert 0.5 < nbytes(small["layers"]) / nbytes(narrow["layers"]) < 0.505
    assert nbytes(small) / nbytes(narrow) == pytest.approx(whole, abs=1e-3)


# ---------------------------------------------------------------- over devices


def test_a_scale_is_split_as_its_output_axes_are():
    layout = parameters.shardings(MOE, jax.sharding.AbstractMesh((2, 2), mesh.AXES), mesh.TRAINING)
    abstract = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        parameters.abstract_params(MOE), layout,
    )  # fmt: skip
    layers = parameters.rollout_target(MOE, abstract, "int8")["layers"]
    specs = {
        name: (tuple(leaf.values.sharding.spec), tuple(leaf.scale.sharding.spec))
        for name, leaf in layers.items() if isinstance(leaf, Quantized)
    }  # fmt: skip
    heads = ((None, "fsdp", "tensor"), (None, None, "tensor"))
    assert specs["q"] == specs["k"] == specs["v"] == heads
    assert specs["o"] == ((None, "tensor", None, "fsdp"), (None, None, None, "fsdp"))
    assert specs["expert_up"] == ((None, "tensor", "fsdp"), (None, "tensor"))
    assert specs["expert_down"] == ((None, "tensor", None, "fsdp"),) * 2
    assert layers["router"].sharding == layout["layers"]["router"]


SPREAD = """
import dataclasses, jax, jax.numpy as jnp, numpy as np
import tiny
from test_matrices import MOE, hidden, int8
from notepad_jax.checkpoint import handoff
from notepad_jax.model import parameters
from notepad_jax.parallel import mesh as meshes, place
from notepad_jax.types import PolicySnapshot

assert jax.device_count() == 4
mesh = meshes.make(tensor=2)
for config in (tiny.CONFIG, MOE):
    params = parameters.init_params(config, jax.random.key(0))
    spread = place.commit(params, parameters.shardings(config, mesh, meshes.TRAINING))
    target = parameters.rollout_target(
        config,
        jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            params, parameters.shardings(config, mesh, meshes.SERVING),
        ),
        "int8",
    )
    bridge = handoff.InProcess(target)
    bridge.publish(PolicySnapshot(0, spread))
    many, one = bridge.adopt().params, int8(config, params)
    jax.tree.map(np.testing.assert_array_equal, many, one)
    for found, wanted in zip(jax.tree.leaves(many), jax.tree.leaves(target), strict=True):
        assert found.sharding == wanted.sharding, (found.sharding, wanted.sharding)
    np.testing.assert_allclose(hidden(config, many), hidden(config, one), atol=2e-5)
assert many["layers"]["expert_up"].scale.addressable_shards[0].data.shape == (3, 2, 1, 24)
print("agreed")
"""


@pytest.mark.slow
def test_weights_are_quantised_where_they_lie_on_four_devices():
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", SPREAD], env=os.environ | flags | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "agreed", done.stderr[-3000:]
