import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.grpo import ratios
from notepad_jax.grpo.objective import divide, k1, k2, k3, merge, objective, zero
from notepad_jax.grpo.ratios import RATIOS

run = jax.jit(objective, static_argnames=("ratio", "kl", "over_turns"))
LIMITS = ratios.USUAL._replace(tis_veto=None, off_policy_at=None)  # None: no part of the program


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
    far = np.array([0.5, 1.5, 0.5, 0.9, 1.5, 5.0])
    advantage = np.array([1, 1, -1, -1, -1, -1])
    grad, sums = jax.grad(
        lambda lp: (lambda s: (s.loss, s))(sums_of(lp, np.zeros(6), advantage)), has_aux=True
    )(jnp.log(far))
    np.testing.assert_allclose(grad, [-0.5, 0, 0, 0.9, 1.5, 0], rtol=1e-6, atol=0)
    assert sums.clipped_update + sums.clipped_answer == 3
    without = sums_of(np.log(far), np.zeros(6), advantage, dual_clip=ratios.NEVER)
    np.testing.assert_allclose(without.loss - sums.loss, 5 - 3, rtol=1e-6)


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
    far, advantage = np.array([2, 0.5, 1.1, 1.3]), 1.0
    how = dict(ratio="gspo", over_turns=over_turns, clip_low=0.1, clip_high=0.1)
    grad, got = jax.grad(
        lambda lp: (lambda s: (s.loss, s))(sums_of(lp, np.zeros(4), advantage, **how)),
        has_aux=True,
    )(jnp.log(far))
    np.testing.assert_allclose(grad, [-1, -1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(got.loss, -2 - 2 * 1.1, rtol=1e-6)
    assert got.clipped_update + got.clipped_answer == 2


def test_a_turn_s_ratio_is_dually_clipped_as_a_token_s():
    """Ratios 8 and 2 are a turn's 4: of a failure the loss is 3 a token, and no gradient."""
    how = dict(ratio="gspo", over_turns=over_turns)
    far, zero = jnp.log(jnp.array([8.0, 2.0, 1.0, 1.0])), np.zeros(4)
    loss = lambda lp, dual: sums_of(lp, zero, -1.0, dual_clip=dual, **how).loss  # noqa: E731
    value, grad = jax.value_and_grad(loss)(far, 3.0)
    np.testing.assert_allclose(value, 3 + 3 + 1 + 1, rtol=1e-6)
    np.testing.assert_allclose(grad, [0, 0, 1, 1], atol=1e-6)
    value, grad = jax.value_and_grad(loss)(far, ratios.NEVER)
    np.testing.assert_allclose(value, 4 + 4 + 1 + 1, rtol=1e-6)
    np.testing.assert_allclose(grad, [4, 4, 1, 1], rtol=1e-6)


def test_gspo_in_token_form_has_the_gradient_of_the_paper_s():
    """Of -A s, s the geometric mean over a turn, averaged over turns: weights of 1/2 a token."""
    logprob, advantage = np.log([1.05, 0.95, 1.02, 1.01]), np.array([1.0, 1, -2, -2])
    how = dict(ratio="gspo", over_turns=over_turns, mask=np.full(4, 0.5))
    got = jax.grad(lambda lp: sums_of(lp, np.zeros(4), advantage, **how).loss)(jnp.asarray(logprob))
    paper = jax.grad(lambda lp: -(jnp.exp(lp.reshape(2, 2).mean(1)) * advantage[::2]).sum())
    np.testing.assert_allclose(got, paper(jnp.asarray(logprob)), rtol=1e-5)


def test_cispo_bounds_a_token_s_weight_and_never_its_gradient():
    far = np.array([0.5, 3.0, 9.0])
    for advantage in (1.0, -1.0):
        grad, got = jax.grad(
            lambda lp, a=advantage: (lambda s: (s.loss, s))(
                sums_of(lp, np.zeros(3), a, ratio="cispo")
            ),
            has_aux=True,
        )(jnp.log(far))
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


def corrected(weights, advantage=1.0, **limits):
    """Gradient and sums of tokens, two a turn, that are on policy but for the sampler."""
    proximal, zero = jnp.log(jnp.asarray(weights, jnp.float32)), jnp.zeros(len(weights))
    one = jnp.ones(len(weights))

    def loss(lp):
        how = LIMITS._replace(**limits)
        got = run(
            lp, zero, proximal, zero, one * advantage, one, one, one, how, kl_weight=0.0,
            over_turns=over_turns,
        )  # fmt: skip
        return got.loss, got

    return jax.grad(loss, has_aux=True)(proximal)


def test_what_the_sampler_was_too_far_off_from_weighs_nothing():
    """Of weights .4, 1.5, 6 and .9 the first and third are outside [.5, 5]; a cap keeps them."""
    weights = [0.4, 1.5, 6.0, 0.9]
    grad, got = corrected(weights, tis_cap=5.0)
    np.testing.assert_allclose(grad, [-0.4, -1.5, -5, -0.9], rtol=1e-6)
    assert divide(got, 4.0)["tis_left_out"] == 0
    grad, got = corrected(weights, tis_cap=5.0, tis_low=0.5)
    np.testing.assert_allclose(grad, [0, -1.5, 0, -0.9], rtol=1e-6)
    assert divide(got, 4.0)["tis_left_out"] == 0.5 and got.tokens == 4


def test_one_token_that_the_trainer_would_never_have_said_vetoes_its_turn():
    grad, got = corrected([5e-5, 1.5, 2e-4, 0.9], tis_cap=5.0, tis_veto=1e-4)
    np.testing.assert_allclose(grad, [0, 0, -2e-4, -0.9], rtol=1e-5)
    assert divide(got, 4.0)["tis_left_out"] == 0.5


def test_corrections_are_numpy_s():
    weights = np.exp(np.random.default_rng(5).normal(0, 3, (200, 4))).astype(np.float32)
    low, cap, veto = 0.5, 5.0, 0.01
    turns = weights.reshape(-1, 2, 2)
    keep = (turns >= low) & (turns <= cap) & (turns >= veto).all(-1, keepdims=True)
    expected = -np.where(keep, turns, 0).reshape(-1, 4)
    found = [corrected(w, tis_cap=cap, tis_low=low, tis_veto=veto)[0] for w in weights]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert 0.3 < (expected == 0).mean() < 0.9


def masked(logprob, behaviour, advantage, at, **how):
    """Gradient of four tokens, two a turn, and the metrics."""
    grad, got = jax.grad(
        lambda lp: (lambda s: (s.loss, s))(
            sums_of(lp, behaviour, advantage, over_turns=over_turns, off_policy_at=at, **how)
        ),
        has_aux=True,
    )(jnp.asarray(logprob, jnp.float32))
    return grad, divide(got, 4.0)


def test_a_failure_that_the_policy_has_left_teaches_nothing():
    """Two turns of A = -1, log ratios to the sampler -.5, -.1 and -.1, -.1: means .3 and .1.

    Ratios .9 and up are within the clip; the first token's .61 is not.
    """
    logprob = np.array([-0.5, -0.1, -0.1, -0.1])
    ratio = np.exp(logprob)
    grad, told = masked(logprob, np.zeros(4), -1.0, None)
    np.testing.assert_allclose(grad, [0, *ratio[1:]], rtol=1e-6)
    assert told["off_policy_left_out"] == 0 and told["clip_share"] == 0.25
    grad, told = masked(logprob, np.zeros(4), -1.0, 0.2)
    np.testing.assert_allclose(grad, [0, 0, *ratio[2:]], rtol=1e-6)
    assert told["off_policy_left_out"] == 0.5 and told["clip_share"] == 0
    assert told["loss"] == pytest.approx(2 * np.exp(-0.1) / 4)
    for advantage, at in ((1.0, 0.2), (-1.0, 0.31)):  # a success, and what is near enough
        assert masked(logprob, np.zeros(4), advantage, at)[1]["off_policy_left_out"] == 0
    # A turn that the policy has come to like is as far, and is unlearnt.
    assert masked(-logprob, np.zeros(4), -1.0, 0.2)[1]["off_policy_left_out"] == 0


def test_what_is_left_out_is_still_held_to_the_reference():
    how = dict(reference=np.full(4, -1.0), kl_weight=0.1)
    whole = sums_of(np.zeros(4), np.zeros(4), -1.0, over_turns=over_turns, **how)
    grad, told = masked(np.zeros(4), np.ones(4), -1.0, 0.2, **how)
    assert told["off_policy_left_out"] == 1 and told["policy_loss"] == 0
    assert told["kl"] == pytest.approx(float(whole.kl) / 4)
    np.testing.assert_allclose(grad, 0.1 * (1 - np.exp(-1.0)), rtol=1e-6)


def test_the_mask_is_numpy_s_whatever_the_ratio():
    """Of every ratio the loss is that without a mask, of the turns that stay."""
    rng = np.random.default_rng(6)
    logprob, behaviour = rng.normal(-2, 0.5, (2, 50, 4)).astype(np.float32)
    advantage = np.repeat(rng.normal(size=(50, 2)), 2, axis=1).astype(np.float32)
    far = np.repeat((behaviour - logprob).reshape(50, 2, 2).mean(-1), 2, axis=1)
    out = (advantage < 0) & (far > 0.1)
    assert 0.1 < out.mean() < 0.4
    for name in RATIOS:
        for k in range(0, 50, 10):
            grad, told = masked(logprob[k], behaviour[k], advantage[k], 0.1, ratio=name)
            plain, _ = masked(logprob[k], behaviour[k], advantage[k], None, ratio=name)
            np.testing.assert_allclose(grad, np.where(out[k], 0, plain), rtol=1e-5, atol=1e-7)
            assert told["off_policy_left_out"] == pytest.approx(out[k].mean())


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
