import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from notepad_jax.grpo import optimizer
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer, matrix_axes, schedule
from notepad_jax.model import parameters
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
    rate = schedule(ADAMW, ADAMW.learning_rate)
    got = [float(rate(step)) for step in (0, 1, 2, 3, 4, 1000)]
    np.testing.assert_allclose(got, [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01], rtol=1e-6)


def test_no_warm_up_and_linear_decay():
    settings = dataclasses.replace(MUON, decay_from=10, decay_steps=20, decay_to=0.1)
    rate = schedule(settings, 1.0)
    got = [float(rate(step)) for step in (0, 10, 15, 20, 99)]
    np.testing.assert_allclose(got, [1, 1, 0.55, 0.1, 0.1], rtol=1e-6)


def test_first_adamw_step_by_hand():
    params = {"layers": {"gate": jnp.full((1, 1, 2), 2.0), "mlp_norm": jnp.ones((1, 1))}}
    settings = dataclasses.replace(ADAMW, max_grad_norm=0.0)
    got = one_update(settings, params, jax.tree.map(jnp.ones_like, params))
    # -rate * (sign of the gradient + weight decay * parameter), norms undecayed
    np.testing.assert_allclose(got["layers"]["gate"], -0.0025 * (1 + 0.01 * 2), rtol=1e-5)
    np.testing.assert_allclose(got["layers"]["mlp_norm"], -0.0025, rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    params = {"layers": {"gate": jnp.zeros((1, 1, 2)), "up": jnp.zeros((1, 1, 2))}}
    # eps far above the gradient makes Adam linear in it
    settings = dataclasses.replace(ADAMW, eps=1e6, weight_decay=0.0, learning_rate=4e6)
    got = one_update(settings, params, jax.tree.map(lambda p: jnp.full_like(p, 5.0), params))
    np.testing.assert_allclose(optax.tree.norm(got), 1.0, rtol=1e-5)


def mixture(config):
    return dataclasses.replace(config, experts=Experts(4, 2, 24, normalize=True))


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
        (dict(kind="adam"), "known: adamw, muon"),
        (dict(warmup_steps=-1), "warmup_steps is -1"),
        (dict(decay_steps=3, decay_from=5), "from step 5 to 3"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(ADAMW, **change)
