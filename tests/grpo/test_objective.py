import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.grpo.objective import divide, k1, k2, k3, merge, objective, zero
from notepad_jax.grpo.ratios import RATIOS, Limits

run = jax.jit(objective, static_argnames=("ratio", "kl", "over_turns"))
LIMITS = Limits(clip_low=0.2, clip_high=0.2, dual_clip=3.0, cap=4.0, tis_cap=0.0)


def sums_of(
    logprob, behaviour, advantage, mask=None, reference=None, kl_weight=0.0, ratio="ppo_clip",
    kl="k3", over_turns=None, **limits,
):  # fmt: skip
    logprob = jnp.asarray(logprob, jnp.float32)
    behaviour = jnp.asarray(behaviour, jnp.float32)
    mask = jnp.ones_like(logprob) if mask is None else jnp.asarray(mask, jnp.float32)
    reference = behaviour if reference is None else jnp.asarray(reference, jnp.float32)
    advantage = jnp.broadcast_to(jnp.asarray(advantage, jnp.float32), logprob.shape)
    vectors = logprob, behaviour, behaviour, reference, advantage, mask, mask, mask
    how = dict(ratio=ratio, kl=kl) | ({"over_turns": over_turns} if over_turns else {})
    return run(*vectors, LIMITS._replace(**limits), kl_weight=kl_weight, **how)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss"),
    [
        (1, 0.5, -0.5),
        (1, 1.5, -1.2),
        (1, 5.0, -1.2),
        (-1, 0.5, 0.8),
        (-1, 0.9, 0.9),
        (-1, 1.5, 1.5),
        (-1, 5.0, 3.0),
    ],
)
def test_clip_table_of_the_spec(advantage, ratio, loss):
    got = sums_of([np.log(ratio)], [0.0], advantage)
    np.testing.assert_allclose(got.loss, loss, rtol=1e-6)


def test_a_clip_takes_the_gradient_and_is_counted():
    ratios = np.array([0.5, 1.5, 0.5, 0.9, 1.5, 5.0])
    advantage = np.array([1, 1, -1, -1, -1, -1])
    grad, sums = jax.grad(
        lambda lp: (lambda s: (s.loss, s))(sums_of(lp, np.zeros(6), advantage)), has_aux=True
    )(jnp.log(ratios))
    np.testing.assert_allclose(grad, [-0.5, 0, 0, 0.9, 1.5, 0], rtol=1e-6, atol=0)
    assert sums.clipped_update + sums.clipped_answer == 3


def test_token_mean_over_trajectories_and_turns_is_one_twelfth():
    # A = .5 with completions of 3 and 2 tokens, A = -.5 with 4, 1 and 2; on-policy
    advantage = np.repeat([0.5, -0.5], [5, 7])
    logprob = np.random.default_rng(0).normal(-3, 1, 12)
    got = divide(sums_of(logprob, logprob, advantage), 12.0)
    assert got["loss"] == pytest.approx(1 / 12, abs=1e-7)


def test_k3_numbers_of_the_spec():
    d = jnp.array([0, -0.5, 0.5, 10, 50, -50])
    expected = [0, 0.1065307, 0.1487213, np.exp(10) - 11, np.exp(10) - 11, np.exp(-10) + 9]
    np.testing.assert_allclose(k3(jnp.zeros(6), d), expected, rtol=1e-6)


def test_k3_is_never_negative_for_tiny_differences():
    d = jnp.linspace(-1e-3, 1e-3, 101)
    assert (k3(jnp.zeros(101), d) >= 0).all()


def test_kl_enters_the_loss_with_its_weight():
    got = sums_of([-1.0], [-1.0], 0.0, reference=[-0.5], kl_weight=0.1)
    np.testing.assert_allclose(got.kl, 0.1487213, rtol=1e-6)
    np.testing.assert_allclose(got.loss, 0.01487213, rtol=1e-6)
    assert got.policy_loss == 0


@pytest.mark.parametrize("ratio", RATIOS)
def test_on_policy_gradient_is_reinforce(ratio):
    advantage = np.array([0.7, 0.7, -0.2, -0.2, -0.2, 0.0])
    logprob = np.random.default_rng(1).normal(-3, 1, 6)
    grad = jax.grad(lambda lp: sums_of(lp, logprob, advantage, ratio=ratio).loss)(
        jnp.asarray(logprob)
    )
    np.testing.assert_allclose(grad, -advantage, rtol=1e-6)


def over_turns(x_X):
    """Two turns of two tokens each."""
    return jnp.repeat(x_X.reshape(2, 2).mean(1), 2)


def test_gspo_clips_whole_turns_by_the_geometric_mean_of_their_ratios():
    """Ratios 2 and 1/2 are a turn's 1, which is not cut; 1.1 and 1.3 are its 1.196, cut at 1.1."""
    ratios, advantage = np.array([2, 0.5, 1.1, 1.3]), 1.0
    how = dict(ratio="gspo", over_turns=over_turns, clip_low=0.1, clip_high=0.1)
    grad, got = jax.grad(
        lambda lp: (lambda s: (s.loss, s))(sums_of(lp, np.zeros(4), advantage, **how)),
        has_aux=True,
    )(jnp.log(ratios))
    np.testing.assert_allclose(grad, [-1, -1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(got.loss, -2 - 2 * 1.1, rtol=1e-6)
    assert got.clipped_update + got.clipped_answer == 2


def test_gspo_in_token_form_has_the_gradient_of_the_paper_s():
    """Of -A s, s the geometric mean over a turn, averaged over turns: weights of 1/2 a token."""
    logprob, advantage = np.log([1.05, 0.95, 1.02, 1.01]), np.array([1.0, 1, -2, -2])
    how = dict(ratio="gspo", over_turns=over_turns, mask=np.full(4, 0.5))
    got = jax.grad(lambda lp: sums_of(lp, np.zeros(4), advantage, **how).loss)(jnp.asarray(logprob))
    paper = jax.grad(lambda lp: -(jnp.exp(lp.reshape(2, 2).mean(1)) * advantage[::2]).sum())
    np.testing.assert_allclose(got, paper(jnp.asarray(logprob)), rtol=1e-5)


def test_cispo_bounds_a_token_s_weight_and_never_its_gradient():
    ratios = np.array([0.5, 3.0, 9.0])
    for advantage in (1.0, -1.0):
        grad, got = jax.grad(
            lambda lp, a=advantage: (lambda s: (s.loss, s))(
                sums_of(lp, np.zeros(3), a, ratio="cispo")
            ),
            has_aux=True,
        )(jnp.log(ratios))
        np.testing.assert_allclose(grad, -advantage * np.array([0.5, 3.0, 4.0]), rtol=1e-6)
        assert got.clipped_update + got.clipped_answer == 0


def test_a_correction_weighs_tokens_by_how_far_the_sampler_was_off():
    """Proximal over behaviour is 0.5, 1.5 and 8; the cap is 2; the ratio itself is 1."""
    proximal, behaviour = np.log([0.5, 1.5, 8.0]), np.zeros(3)
    one = jnp.ones(3)
    gradient = jax.grad(
        lambda lp, cap: run(
            lp, jnp.asarray(behaviour), jnp.asarray(proximal), jnp.asarray(behaviour), one, one,
            one, one, LIMITS._replace(tis_cap=cap), kl_weight=0.0,
        ).loss
    )  # fmt: skip
    np.testing.assert_allclose(gradient(jnp.asarray(proximal), 2.0), [-0.5, -1.5, -2], rtol=1e-6)
    np.testing.assert_allclose(gradient(jnp.asarray(proximal), 1e9), [-0.5, -1.5, -8], rtol=1e-6)
    np.testing.assert_allclose(gradient(jnp.asarray(proximal), 0.0), [-1, -1, -1], rtol=1e-6)


def test_the_three_estimates_of_kl():
    d = 0.5
    found = [float(one(jnp.zeros(1), jnp.full(1, d))[0]) for one in (k1, k2, k3)]
    np.testing.assert_allclose(found, [-d, d**2 / 2, np.exp(d) - 1 - d], rtol=1e-6)
    got = sums_of([-1.0], [-1.0], 0.0, reference=[-0.5], kl_weight=0.1, kl="k2")
    np.testing.assert_allclose(got.loss, 0.0125, rtol=1e-6)


def test_where_the_mask_is_zero_anything_may_stand():
    logprob, behaviour = [-1.0, np.nan, -2.0], [-1.1, -np.inf, -2.0]
    loss = lambda lp: sums_of(lp, behaviour, [1, np.nan, -1], mask=[1, 0, 1]).loss  # noqa: E731
    value, grad = jax.value_and_grad(loss)(jnp.asarray(logprob))
    np.testing.assert_allclose(value, -np.exp(0.1) + 1, rtol=1e-5)
    assert np.isfinite(grad).all() and grad[1] == 0


def test_merged_halves_are_the_whole():
    rng = np.random.default_rng(2)
    logprob, behaviour, advantage = rng.normal(size=(3, 10))
    whole = sums_of(logprob, behaviour, advantage)
    half = [sums_of(logprob[s], behaviour[s], advantage[s]) for s in (slice(7), slice(7, 10))]
    merged = merge(merge(zero(), half[0]), half[1])
    for name, value in divide(whole, 10.0).items():
        assert divide(merged, 10.0)[name] == pytest.approx(value, rel=1e-5), name
    assert merged.gap_max == whole.gap_max


def test_weights_scale_the_loss_and_count_in_no_mean():
    """Two turns of 2 tokens and 1: turn_mean is weights 1/2, 1/2, 1 over a denominator of 2."""
    logprob, behaviour = np.log([1.5, 1.0, 0.5]), np.zeros(3)
    got = sums_of(logprob, behaviour, [1, 1, -1], mask=[0.5, 0.5, 1.0])
    metrics = divide(got, 2.0)
    assert metrics["loss"] == pytest.approx((0.5 * (-1.2 - 1.0) + 0.8) / 2)
    assert metrics["loss_tokens"] == 3 and metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["clip_share"] == pytest.approx(2 / 3)


def test_the_ratio_is_to_the_proximal_policy_and_the_gap_to_the_sampler():
    one = jnp.ones(1)
    got = run(jnp.log(one * 1.1), jnp.log(one * 0.5), jnp.log(one), jnp.log(one), one, one, one,
              one, LIMITS, kl_weight=0.0)  # fmt: skip
    assert got.ratio == pytest.approx(1.1) and got.gap == pytest.approx(np.log(2.2))


def test_metrics_by_hand():
    mask = jnp.array([1.0, 1, 1, 0])
    got = divide(
        run(
            jnp.log(jnp.array([1.0, 1.1, 1.5, 9.0])), jnp.zeros(4), jnp.zeros(4), jnp.zeros(4),
            jnp.ones(4), mask, jnp.array([1.0, 1, 0, 0]), jnp.array([2.0, 4, 5, 7]),
            LIMITS, kl_weight=0.0,
        ),
        3.0,
    )  # fmt: skip
    assert got["loss_tokens"] == 3
    assert got["clip_share"] == pytest.approx(1 / 3)
    assert got["ratio_mean"] == pytest.approx(1.2)
    assert (got["clip_share_update"], got["clip_share_answer"]) == (0, 1)
    assert got["ratio_max"] == pytest.approx(1.5)
    assert got["ratio_effective"] == pytest.approx(3.6**2 / (3 * (1 + 1.21 + 2.25)))
    assert got["logprob_gap_max"] == pytest.approx(np.log(1.5))
    assert got["entropy_update"] == 3 and got["entropy_answer"] == 5


def test_a_ratio_beyond_all_bounds_stays_finite():
    for advantage in (1.0, -1.0):
        loss = lambda lp, a=advantage: sums_of(lp, [-200.0], a).loss  # noqa: E731
        value, grad = jax.value_and_grad(loss)(jnp.zeros(1))
        assert np.isfinite(value) and grad[0] == 0
