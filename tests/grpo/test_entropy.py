"""Entropy: the bonus has the gradient of a plain softmax's, through packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.grpo import update
from notepad_jax.grpo.batch import pack
from notepad_jax.grpo.objective import objective
from notepad_jax.grpo.ratios import Limits
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.model import attention, policy

TEMPERATURE = 0.7
SETTINGS = UpdateSettings(
    ratio="ppo_clip", clip_low=0.2, clip_high=0.2, dual_clip=3.0, cap=4.0,
    proximal="recomputed", tis_cap=0.0, kl="k3", kl_weight=0.0, entropy_weight=0.1,
    temperature=TEMPERATURE, micro_batch_rows=1, remat=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def groups(make):
    return make["random_groups"](5, groups=1, samples=2, turns=1)


@pytest.fixture(scope="module")
def batch(groups):
    """Without an advantage, so that the bonus is the whole loss."""
    return pack(groups, [np.zeros(2)], 64, length_multiple=64).batch


def dense(config, params, groups):
    """Entropy of each completion token, a turn a row, of one log-softmax over all the logits."""
    turns = [t for g in groups for member in g.trajectories for t in member.turns]
    width = max(len(t.prompt.tokens) + len(t.completion.tokens) for t in turns)
    tokens, before = np.zeros((len(turns), width), np.int32), np.zeros((len(turns), width), bool)
    for row, turn in enumerate(turns):
        text = np.concatenate([turn.prompt.tokens, turn.completion.tokens])
        tokens[row, : len(text)] = text
        before[row, len(turn.prompt.tokens) - 1 : len(text) - 1] = True
    positions = np.tile(np.arange(width, dtype=np.int32), (len(turns), 1))
    attend = attention.packed(config, jnp.full(tokens.shape, width, jnp.int32))
    at = jnp.asarray(tokens), jnp.asarray(positions)
    hidden, _, _ = policy.forward(config, params, *at, attend)
    logits = hidden[before] @ policy.output_matrix(config, params) / TEMPERATURE
    log_p = jax.nn.log_softmax(logits[:, : config.valid_vocab])
    return -(jnp.exp(log_p) * log_p).sum(-1)


def test_the_bonus_has_the_gradient_of_a_plain_softmax_s(config, params, groups, batch):
    loss, got = update.loss_and_gradient(config, SETTINGS, params, {}, batch)

    def plain(params):
        return -0.1 * dense(config, params, groups).mean()

    expected, want = jax.jit(jax.value_and_grad(plain))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    assert size > 1e-3
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * size)


def test_a_bonus_by_hand():
    """Tokens of weights 1 and 1/2 and entropies 2 and 4: a sum of 4, a tenth of which is off."""
    one, weights = jnp.zeros(2), jnp.array([1.0, 0.5])
    entropy = jnp.array([2.0, 4.0])
    limits = Limits(0.2, 0.2, 3.0, 4.0, 0.0)

    def loss(entropy, entropy_weight):
        vectors = one, one, one, one, one, weights, one, entropy
        return objective(*vectors, limits, 0.0, entropy_weight).loss

    assert loss(entropy, 0.1) == pytest.approx(-0.4)
    np.testing.assert_allclose(jax.grad(loss)(entropy, 0.1), -0.1 * weights, rtol=1e-6)
    assert loss(entropy, None) == 0 and not jax.grad(loss)(entropy, None).any()
