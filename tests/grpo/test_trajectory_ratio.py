"""GSPO over whole trajectories: one ratio, wherever the turns lie.

All through the programs that test_update compiles: rows of `WIDE` tokens, one a micro-batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.grpo import (
    advantages,
    forward,
    micro_batches,
    normalisers,
    ratios,
    state,
    update,
)
from notepad_jax.grpo.batch import pack
from notepad_jax.grpo.objective import objective
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer
from notepad_jax.grpo.settings import UpdateSettings

WIDE = 384
SETTINGS = UpdateSettings(
    ratio="gspo_trajectory", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3",
    kl_weight=0.0, entropy_weight=0.0, temperature=1.0, micro_batch_rows=1, remat=False,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_size():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batches, "bucket", lambda count: 192)
        yield


@pytest.fixture(scope="module")
def groups(make):
    return make["random_groups"](7)


def packed(groups, row_length=WIDE):
    """Rows of `row_length`, made WIDE with padding; each trajectory weighs the same."""
    one = pack(
        groups, advantages.of_groups("dr_grpo", groups), row_length, length_multiple=row_length,
        normaliser=normalisers.trajectory_mean,
    ).batch  # fmt: skip
    more = ((0, 0), (0, WIDE - row_length))
    own = {
        field.name: np.pad(value, more)
        for field in dataclasses.fields(one)
        if isinstance(value := getattr(one, field.name), np.ndarray)
    }
    column = np.arange(WIDE, dtype=np.int32)
    own["kv_end"] = np.where(column < row_length, own["kv_end"], column + 1)
    return dataclasses.replace(one, **own)


@pytest.fixture(scope="module")
def learn(config, params):
    return lambda batch: update.loss_and_gradient(config, SETTINGS, params, {}, batch)


@pytest.fixture(scope="module")
def off_policy(config, params, groups):
    """One row, proximal logprobs off by a normal draw; and the ratio of every trajectory."""
    one = packed(groups)
    now = forward.told(config, params, one, 1.0, 1).logprobs
    noise = np.random.default_rng(3).normal(0, 1.5, 60).astype(np.float32)
    return dataclasses.replace(one, proximal_logprobs=now + one.weights * 8 * noise[one.turn]), now


@pytest.mark.slow
def test_its_loss_is_the_paper_s_over_trajectories(learn, off_policy):
    """-mean over trajectories of min(s A, clip(s) A), s the geometric mean of their ratios."""
    one, now = off_policy
    on, losses, means = one.weights > 0, [], []
    for number in range(one.trajectory.max() + 1):
        mine = on & (one.trajectory == number)
        s = np.exp((now - one.proximal_logprobs)[mine].mean())
        (advantage,) = set(one.advantages[mine].tolist())
        losses.append(-min(s * advantage, np.clip(s, 0.8, 1.2) * advantage))
        means.append(s)
    assert min(means) < 0.8 and max(means) > 1.2
    loss, _ = learn(one)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.slow
def test_neither_rows_nor_micro_batches_matter(learn, groups, off_policy):
    """Sixteen rows or one: a trajectory's turns lie in many micro-batches."""
    one, _ = off_policy
    many = packed(groups, 64)
    assert len(many.tokens) > 4
    of_turn = {t: one.proximal_logprobs[(one.turn == t) & (one.weights > 0)] for t in range(32)}
    proximal = np.zeros_like(many.weights)
    for turn, values in of_turn.items():
        proximal[(many.turn == turn) & (many.weights > 0)] = values
    many = dataclasses.replace(many, proximal_logprobs=proximal)
    assert_same(learn(one), learn(many))


def test_splitting_completions_into_more_turns_does_not_matter(learn, groups, make):
    """To the sampler's logprobs, which are far off; each half is packed as a turn of its own."""

    def split(turn):
        c, cut = turn.completion, len(turn.completion.tokens) // 2
        mu, ids = c.behaviour_logprobs, c.tokens
        shared, tail = turn.prompt.shared, turn.prompt.tail
        first = make["turn"](shared, tail, ids[:cut], mu[:cut], turn.kind)
        longer = np.concatenate([tail, ids[:cut]])
        return [first, make["turn"](shared, longer, ids[cut:], mu[cut:], turn.kind)]

    more = [
        make["group"]([[s for t in m.turns for s in split(t)] for m in g.trajectories], g.rewards)
        for g in groups
    ]
    one, many = packed(groups), packed(more)
    assert many.turn.max() > one.turn.max() + 20
    assert_same(learn(one), learn(many))


def test_learn_says_what_each_step_stands_on(config, groups, monkeypatch):
    """How far it is from the version that sampled, and whether the policy has moved."""
    seen, batches = [], [packed(groups)] * 4
    monkeypatch.setattr(update, "_sum", lambda *args, **how: seen.append(tuple(how.values())))
    monkeypatch.setattr(update, "_apply", lambda state, *args, **how: (state, None))
    monkeypatch.setattr(update, "_metrics", lambda *args: {})
    for moved in (False, True):
        nothing = state.TrainState(0, {}, {})
        update.learn(config, None, SETTINGS, nothing, {}, batches, moved=moved)
    steps = [(0.25, True), (0.5, True), (0.75, True)]
    assert seen == [(0, False), *steps, (0, True), *steps]


@pytest.mark.slow
def test_the_first_step_needs_no_pass_and_the_second_sees_the_first(
    config, params, groups, monkeypatch
):
    """Of a rollout whose proximal logprobs are the policy's: ratios of 1, and then not."""
    one, passes = packed(groups), []
    own = forward.told(config, params, one, 1.0, 1).logprobs
    one = dataclasses.replace(one, proximal_logprobs=own, behaviour_logprobs=own)
    found = update._over_trajectories
    monkeypatch.setattr(
        update, "_over_trajectories", lambda *args: passes.append(found(*args)) or passes[-1]
    )
    optimizer = make_optimizer(OptimizerSettings("adamw", 3e-3, 1e-3, warmup_steps=0))
    started = state.start(jax.tree.map(jnp.copy, params), optimizer)
    steps = [one, one]
    _, metrics = update.learn(config, optimizer, SETTINGS, started, {}, steps, moved=False)
    (far_BT,) = passes
    on = one.weights > 0
    first, second = np.ones(on.sum()), np.exp(far_BT[on])
    assert metrics["ratio_mean"] == pytest.approx((first.mean() + second.mean()) / 2, rel=1e-5)
    up = one.advantages > 0
    assert (far_BT[on & up] > 0).all() and (far_BT[on & (one.advantages < 0)] < 0).all()


def test_in_token_form_it_has_the_gradient_of_the_paper_s():
    """Trajectories of 1 and 3 tokens, turns of which may lie anywhere: d s A / L of each token."""
    far = jnp.log(jnp.array([1.05, 0.95, 1.02, 1.01]))
    own, weights = jnp.array([0, 1, 1, 1]), jnp.array([1, 1 / 3, 1 / 3, 1 / 3])
    advantage, zero = jnp.array([1.0, -2, -2, -2]), jnp.zeros(4)
    mean = jnp.array([far[0], far[1:].mean()])

    def ours(lp):
        vectors = lp, zero, zero, zero, advantage, weights, zero, zero
        limits = SETTINGS.limits
        return objective(
            *vectors, limits, 0.0, ratio="gspo_trajectory", trajectory_X=mean[own]
        ).loss

    paper = jax.grad(lambda lp: -(jnp.exp(lp[0]) - 2 * jnp.exp(lp[1:].mean())))
    np.testing.assert_allclose(jax.jit(jax.grad(ours))(far), paper(far), rtol=1e-5)
    assert ratios.TRAJECTORYWISE == ("gspo_trajectory",)


def assert_same(a, b):
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5, atol=2e-7)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(a[1]))
    assert size > 0
    for x, y in zip(jax.tree.leaves(a[1]), jax.tree.leaves(b[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * size)
