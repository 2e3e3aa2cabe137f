"""Entropy's bonus and interpolated proximal logprobs, through packed rows.

Of each the loss is that of a plain softmax, turn by turn; one program is compiled for both.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.grpo import ratios, update
from notepad_jax.grpo.batch import pack
from notepad_jax.grpo.objective import objective
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.model import attention, policy

TEMPERATURE = 0.7
SETTINGS = UpdateSettings(
    ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="interpolated", kl="k3", kl_weight=0.0,
    entropy_weight=0.1, temperature=TEMPERATURE, micro_batch_rows=1, remat=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def groups(make):
    return make["random_groups"](5, groups=1, samples=2, turns=1)


@pytest.fixture(scope="module")
def batch(groups):
    """Without an advantage, so that the bonus is the whole loss."""
    return pack(groups, [np.zeros(2)], 64, length_multiple=64).batch


def dense(config, params, groups):
    """(logprob, entropy) of each completion token, turn by turn, of one plain log-softmax."""
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
    hidden, *_ = policy.forward(config, params, *at, attend)
    logits = hidden[before] @ policy.output_matrix(config, params) / TEMPERATURE
    log_p = jax.nn.log_softmax(logits[:, : config.valid_vocab])
    labels = np.concatenate([t.completion.tokens for t in turns])
    own = jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]
    return own, -(jnp.exp(log_p) * log_p).sum(-1)


@pytest.fixture(scope="module")
def oracle(config, params, groups):
    """((loss of a bonus of 0.1 alone, (logprobs, entropies)), its gradient by the final norm).

    What lies below the norm has the gradient that it has for logprobs.
    """

    def plain(norm):
        own, entropy = dense(config, params | {"final_norm": norm}, groups)
        return -0.1 * entropy.mean(), (own, entropy)

    return jax.jit(jax.value_and_grad(plain, has_aux=True))(params["final_norm"])


@pytest.mark.slow
def test_the_bonus_has_the_gradient_of_a_plain_softmax_s(config, params, batch, oracle):
    loss, got = update.loss_and_gradient(config, SETTINGS, params, {}, batch)
    (expected, _), want = oracle
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    size = float(jnp.abs(want).max())
    assert size > 1e-3
    np.testing.assert_allclose(got["final_norm"], want, rtol=0, atol=5e-6 * size)


def test_proximal_logprobs_lie_between_sampler_and_policy(config, params, groups, oracle):
    """By the versions of turns: 0, 1 and 2 behind, after half a version of learning."""
    turns = [t for member in groups[0].trajectories for t in member.turns]
    behind = [0, 1, 2, 1]
    advantage = [np.array([0.5, -0.5])]
    one = pack(groups, advantage, 64, length_multiple=64, version=3).batch
    assert set(one.age[one.weights > 0]) == {3}  # all turns are of version 0
    ages = np.where(one.turn >= 0, np.array(behind)[one.turn], 0).astype(np.int32)
    loss, _ = update.loss_and_gradient(
        config, SETTINGS, params, {}, dataclasses.replace(one, age=ages), since=0.5
    )
    (bonus, (now, _)), _ = oracle
    count = [len(t.completion.tokens) for t in turns]
    mu = np.concatenate([t.completion.behaviour_logprobs for t in turns])
    share = np.repeat([0, 1 / 1.5, 2 / 2.5, 1 / 1.5], count)
    ratio = np.exp(now - (mu + share * (now - mu)))
    a = np.repeat([0.5, 0.5, -0.5, -0.5], count)
    each = np.maximum(-ratio * a, -np.clip(ratio, 0.8, 1.2) * a)
    each = np.where(a < 0, np.minimum(each, -3 * a), each)
    assert float(loss) == pytest.approx(each.mean() + float(bonus), rel=1e-4)


def test_interpolation_by_hand():
    """log mu -2, log pi -1: a of 0, 2/3 and 3/4; and before the first step, of 0 and 1."""
    mu, now = jnp.full(3, -2.0), jnp.full(3, -1.0)
    ages = jnp.array([0, 1, 3])
    for since, expected in ((0.5, [-2, -4 / 3, -2 + 3 / 3.5]), (1.0, [-2, -1.5, -1.25])):
        found = ratios.interpolated(mu, now, ages, since)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(ratios.interpolated(mu, now, ages, 0.0), [-2, -1, -1])
    pull = jax.grad(lambda now: ratios.interpolated(mu, now, ages, 0.5).sum())
    assert not pull(now).any()


def test_a_bonus_by_hand():
    """Tokens of weights 1 and 1/2 and entropies 2 and 4: a sum of 4, a tenth of which is off."""
    one, weights = jnp.zeros(2), jnp.array([1.0, 0.5])
    entropy = jnp.array([2.0, 4.0])
    limits = SETTINGS.limits

    def loss(entropy, entropy_weight):
        vectors = one, one, one, one, one, weights, one, entropy
        return objective(*vectors, limits, 0.0, entropy_weight).loss

    both = jax.jit(jax.value_and_grad(loss))
    value, gradient = both(entropy, 0.1)
    assert value == pytest.approx(-0.4)
    np.testing.assert_allclose(gradient, -0.1 * weights, rtol=1e-6)
    value, gradient = both(entropy, None)
    assert value == 0 and not gradient.any()
