import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from notepad_jax.grpo import optimizer
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer, matrix_axes, schedule
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import Experts

ADAMW = OptimizerSettings("adamw", 1e-2, 0.0, warmup_steps=4)
MUON = OptimizerSettings("muon", 1e-2, 2e-3, warmup_steps=0, weight_decay=0.0)


def one_update(settings, params, gradient):
    made = make_optimizer(settings)
    return jax.jit(lambda g, p: made.update(g, made.init(p), p)[0])(gradient, params)


def random_like(params, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)


def test_warm_up_is_linear_then_constant_and_moves_at_once():
    rate = schedule(ADAMW)
    got = [float(rate(step)) for step in (0, 1, 2, 3, 4, 1000)]
    np.testing.assert_allclose(got, [0.25, 0.5, 0.75, 1, 1, 1], rtol=1e-6)


def test_no_warm_up_and_linear_decay():
    settings = dataclasses.replace(
        MUON, decay="linear", decay_from=10, decay_steps=20, decay_to=0.1
    )
    rate = schedule(settings)
    got = [float(rate(step)) for step in (0, 10, 15, 20, 99)]
    np.testing.assert_allclose(got, [1, 1, 0.55, 0.1, 0.1], rtol=1e-6)


def test_warm_up_then_constant_then_cosine():
    settings = dataclasses.replace(
        MUON, warmup_steps=2, decay="cosine", decay_from=4, decay_steps=10, decay_to=0.2
    )
    rate = schedule(settings)
    got = [float(rate(step)) for step in (0, 1, 4, 6, 7, 8, 10, 99)]
    # 0.2 + 0.8 * (1 + cos(pi * (step - 4) / 6)) / 2: cosines 1, 1/2, 0, -1/2, -1
    np.testing.assert_allclose(got, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2], rtol=1e-6)


def test_without_a_decay_its_steps_are_not_looked_at():
    settings = dataclasses.replace(MUON, decay="none", decay_from=10, decay_steps=3)
    assert float(schedule(settings)(1000)) == 1.0


def test_first_adamw_step_by_hand():
    params = {"layers": {"gate": jnp.full((1, 1, 2), 2.0), "mlp_norm": jnp.ones((1, 1))}}
    settings = dataclasses.replace(ADAMW, max_grad_norm=0.0)
    got = one_update(settings, params, jax.tree.map(jnp.ones_like, params))
    # -rate * (sign of the gradient + weight decay * parameter), norms undecayed
    np.testing.assert_allclose(got["layers"]["gate"], -0.01 * (1 + 0.01 * 2), rtol=1e-5)
    np.testing.assert_allclose(got["layers"]["mlp_norm"], -0.01, rtol=1e-5)


def test_adams_betas_and_eps_by_hand():
    settings = dataclasses.replace(
        ADAMW, warmup_steps=0, b1=0.5, b2=0.75, eps=1.0, weight_decay=0.0, max_grad_norm=0.0
    )
    made, params = make_optimizer(settings), {"embed": jnp.zeros(1)}
    state, got = made.init(params), []
    for gradient in (1.0, 3.0):
        update, state = made.update({"embed": jnp.full(1, gradient)}, state, params)
        got.append(float(update["embed"][0]) / -1e-2)
    # m 0.5 / 0.5, v 0.25 / 0.25; then m 1.75 / 0.75, v 2.4375 / 0.4375: m / (sqrt(v) + 1)
    np.testing.assert_allclose(got, [1 / 2, (7 / 3) / (5.571429**0.5 + 1)], rtol=1e-5)


def test_muon_without_momentum_sees_the_last_gradient_alone():
    params = {"layers": {"gate": jnp.zeros((1, 4, 4))}}
    first, second = random_like(params, 1), random_like(params, 2)
    for momentum, forgets in ((0.0, True), (0.95, False)):
        made = make_optimizer(dataclasses.replace(MUON, momentum=momentum))
        _, state = made.update(first, made.init(params), params)
        later, _ = made.update(second, state, params)
        alone, _ = made.update(second, made.init(params), params)
        same = np.allclose(later["layers"]["gate"], alone["layers"]["gate"], rtol=1e-4)
        assert same is forgets


@pytest.mark.parametrize("settings", [ADAMW, MUON], ids=lambda settings: settings.kind)
def test_clipping_can_be_switched_off_without_changing_the_state(params, settings):
    on, off = (
        make_optimizer(dataclasses.replace(settings, max_grad_norm=norm)) for norm in (1.0, 0.0)
    )
    states = [jax.eval_shape(made.init, params) for made in (on, off)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    small = {"layers": {"gate": jnp.zeros((1, 1, 2))}}
    # eps far above the gradient makes Adam linear in it: the norm of 50 passes
    linear = dataclasses.replace(
        ADAMW, eps=1e6, weight_decay=0.0, learning_rate=1e6, max_grad_norm=0.0
    )
    got = one_update(linear, small, jax.tree.map(lambda p: jnp.full_like(p, 50.0), small))
    np.testing.assert_allclose(got["layers"]["gate"], -50.0, rtol=1e-3)


def test_gradients_are_clipped_by_their_global_norm():
    params = {"layers": {"gate": jnp.zeros((1, 1, 2)), "up": jnp.zeros((1, 1, 2))}}
    # eps far above the gradient makes Adam linear in it
    settings = dataclasses.replace(ADAMW, eps=1e6, weight_decay=0.0, learning_rate=1e6)
    got = one_update(settings, params, jax.tree.map(lambda p: jnp.full_like(p, 5.0), params))
    np.testing.assert_allclose(optax.tree.norm(got), 1.0, rtol=1e-5)


def mixture(config):
    return dataclasses.replace(config, experts=Experts(4, 2, 24, normalize=True))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_muon_orthogonalises_each_layers_matrix(config, experts):
    config = mixture(config) if experts else config
    params = parameters.init_params(config, jax.random.key(0))
    gradient = random_like(params)
    axes = matrix_axes(params)
    got = one_update(MUON, params, gradient)
    for name, dims in optimizer.MATRICES.items():
        if name.startswith("expert_") != experts:  # the others are checked without experts
            continue
        assert axes["layers"][name] == dims
        update = np.asarray(got["layers"][name])
        rows = int(np.prod([update.shape[i] for i in dims.reduction_axis]))
        # Singular values of every layer's (and expert's) own matrix are all alike.
        for matrix in update.reshape(-1, rows, int(np.prod(update.shape[dims.output_axis[0] :]))):
            values = np.linalg.svd(matrix, compute_uv=False) / 1e-2
            scale = max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5
            assert (0.5 < values / scale).all() and (values / scale < 1.5).all(), name


ADAPTED = lora.Lora(rank=2, alpha=4.0, targets=("q", "o", "down"))


def factors(name, leaf):
    """A layer's adapters A [inputs, r] and B [r, outputs] as numpy matrices."""
    flat = (leaf.shape[0], -1, 2) if name.endswith("_in") else (leaf.shape[0], 2, -1)
    return np.asarray(leaf).reshape(flat)


def test_every_adapter_is_a_matrix_of_muons(config):
    everywhere = dataclasses.replace(ADAPTED, targets=lora.TARGETS)
    adapters = jax.eval_shape(lambda key: lora.init(config, everywhere, key), jax.random.key(0))
    assert set(adapters["layers"]) == set(optimizer.ADAPTERS)
    assert None not in matrix_axes(adapters)["layers"].values()


def test_muon_orthogonalises_each_factor_of_an_adapter_at_its_rate(config):
    adapters = lora.init(config, ADAPTED, jax.random.key(0))
    # An Adam rate far away from muon's: no leaf may follow it.
    settings = dataclasses.replace(MUON, adam_learning_rate=100.0)
    got = one_update(settings, adapters, random_like(adapters))
    for name, leaf in got["layers"].items():
        for matrix in factors(name, leaf):
            values = np.linalg.svd(matrix, compute_uv=False) / 1e-2
            scale = max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5
            assert (0.5 < values / scale).all() and (values / scale < 1.5).all(), name


def test_the_first_muon_step_of_adapters_moves_b_alone(config):
    """While B is zero the gradient of A is, too; nothing is divided by its norm."""
    adapters = lora.init(config, ADAPTED, jax.random.key(0))
    gradient = random_like(adapters)["layers"]
    gradient = {n: g if n.endswith("_out") else 0 * g for n, g in gradient.items()}
    got = one_update(MUON, adapters, {"layers": gradient})["layers"]
    for name, leaf in got.items():
        assert np.isfinite(leaf).all() and bool(leaf.any()) == name.endswith("_out")


def test_muon_leaves_embeddings_and_norms_to_adam(params):
    axes = matrix_axes(params)
    assert axes["embed"] is None and axes["final_norm"] is None
    assert axes["layers"]["attn_norm"] is None and axes["layers"]["q_norm"] is None
    got = one_update(MUON, params, random_like(params))
    for leaf in (got["embed"], got["final_norm"], got["layers"]["q_norm"]):
        # the first Adam step has the same size for every element: no matrix is looked at
        sizes = np.abs(leaf)
        np.testing.assert_allclose(sizes, np.median(sizes), rtol=1e-2)


def test_every_parameter_has_its_place(config):
    """A new matrix must be listed: muon would silently leave it to Adam."""
    seen = set()
    for sizes in (config, dataclasses.replace(config, attention_bias=True), mixture(config)):
        tree = parameters.specs(sizes)["layers"]
        rest = set(tree) - set(optimizer.MATRICES) - {"router"}  # a router is Adam's
        assert all(name.endswith(("_norm", "_bias")) for name in rest)
        seen |= set(tree)
    assert set(optimizer.MATRICES) <= seen


def test_equal_settings_are_one_optimizer():
    assert make_optimizer(ADAMW) is make_optimizer(dataclasses.replace(ADAMW))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kind="adam"), "kind is 'adam'; use one of adamw, muon"),
        (dict(decay="step"), "decay is 'step'; use one of none, linear, cosine"),
        (dict(warmup_steps=-1), "warmup_steps is -1; .* 0 to 2147483647"),
        (dict(warmup_steps=0.5), "warmup_steps needs a whole number, and got 0.5"),
        (dict(decay_steps=10**30), "decay_steps is a number of 100 bits.* 0 to 2147483647"),
        (dict(decay="linear", decay_steps=5, decay_from=5), "from step 5 to 5.* decay='none'"),
        (dict(decay="cosine", decay_steps=9, decay_from=3), "the warm-up to 4"),
        (dict(learning_rate=0.0), "learning_rate is 0.0; it must be above 0"),
        (dict(learning_rate=1e-46), "above 0"),  # 0 in float32
        (dict(adam_learning_rate=1e39), "adam_learning_rate is 1e.39; .* finite"),
        (dict(decay_to=1.1), "decay_to is 1.1; it must be a share of the rate, 0 to 1"),
        (dict(momentum=1.0), "momentum is 1.0; .* below 1"),
        (dict(b1=-0.1), "b1 is -0.1; it must be at least 0"),
        (dict(b2=0.999999999), "in float32, below 1"),
        (dict(eps=0.0), "eps is 0.0; it must be above 0"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(ADAMW, **change)


FLOATS = [field.name for field in dataclasses.fields(OptimizerSettings) if field.type == "float"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("name", FLOATS)
def test_no_number_of_an_optimizer_may_be_negative_or_not_finite(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be"):
        dataclasses.replace(ADAMW, **{name: value})
