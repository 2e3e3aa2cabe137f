"""The update against an oracle that runs each turn alone, and against itself, packed otherwise.

One file, though a long one: all of it runs on the few programs that are compiled here once.
"""

import dataclasses
import itertools

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
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.model import attention, parameters, policy
from notepad_jax.model.config import Experts
from notepad_jax.reading import answer
from notepad_jax.types import Group, TurnKind

SETTINGS = UpdateSettings(
    ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3", kl_weight=0.0,
    entropy_weight=0.0, temperature=1.0, micro_batch_rows=4, remat=False,
)  # fmt: skip
WIDE = 384  # one row of this length holds everything


def packed(groups, row_length=64, rows=4, name="dr_grpo", **options):
    """Every batch is [rows, 64] or [1, WIDE] a micro-batch: compiling is what takes time here."""
    return pack(
        groups, advantages.of_groups(name, groups), row_length, rows_multiple=rows,
        length_multiple=row_length, **options,
    ).batch  # fmt: skip


bucket = micro_batches.bucket


@pytest.fixture(autouse=True, scope="module")
def one_size():
    """One number of loss tokens a micro-batch, for the same reason."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batches, "bucket", lambda count: 192)
        yield


def assert_same(a, b, tolerance=2e-6):
    """Losses and gradients equal up to float32 sums: relative to the largest element of a leaf."""
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5, atol=2e-7)
    found, expected = ([np.asarray(leaf) for leaf in jax.tree.leaves(x[1])] for x in (a, b))
    size = max(float(np.abs(leaf).max()) for leaf in found)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size)


@pytest.fixture(scope="module")
def groups(make):
    return make["random_groups"](7, alike=True)


@pytest.fixture(scope="module")
def learn(config, params):
    def loss_and_gradient(batch, **settings):
        return update.loss_and_gradient(
            config, dataclasses.replace(SETTINGS, **settings), params, {}, batch
        )

    return loss_and_gradient


@pytest.fixture(scope="module")
def packed_once(groups):
    return packed(groups, WIDE, rows=1)


@pytest.fixture(scope="module")
def once(learn, groups, packed_once):
    """The reference result: everything in one row, prefixes shared."""
    return learn(packed_once, micro_batch_rows=1)


@pytest.fixture(scope="module")
def alone(config, params, groups):
    """Runs each turn in a row of its own, with a plain log-softmax.

    (cotangent of every completion token's logprob, temperature) -> (logprobs, gradient)
    """
    turns = [t for g in groups for trajectory in g.trajectories for t in trajectory.turns]
    width = max(len(t.prompt.tokens) + len(t.completion.tokens) for t in turns)
    tokens = np.zeros((len(turns), width), np.int32)
    trained = np.zeros((len(turns), width), bool)
    for row, turn in enumerate(turns):
        text = np.concatenate([turn.prompt.tokens, turn.completion.tokens])
        tokens[row, : len(text)] = text
        trained[row, len(turn.prompt.tokens) : len(text)] = True
    positions = np.tile(np.arange(width, dtype=np.int32), (len(turns), 1))

    def logprobs(params, temperature):
        attend = attention.packed(config, jnp.full(tokens.shape, width, jnp.int32))
        at = jnp.asarray(tokens), jnp.asarray(positions)
        hidden, *_ = policy.forward(config, params, *at, attend)
        logits = hidden @ policy.output_matrix(config, params) / temperature
        logits = jnp.where(jnp.arange(config.vocab_size) < config.valid_vocab, logits, -jnp.inf)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0][trained[:, 1:]]

    @jax.jit
    def run(params, cotangent, temperature):
        out, pull = jax.vjp(lambda p: logprobs(p, temperature), params)
        return out, pull(cotangent)[0]

    return lambda cotangent, temperature=1.0: run(params, cotangent, temperature)


def per_token(groups, name):
    """(advantage, behaviour logprob) of every completion token, in the order of `alone`."""
    advantage, behaviour = [], []
    for group, values in zip(groups, advantages.of_groups(name, groups), strict=True):
        for trajectory, value in zip(group.trajectories, values, strict=True):
            for turn in trajectory.turns:
                advantage += [value] * len(turn.completion.tokens)
                behaviour.append(turn.completion.behaviour_logprobs)
    return np.array(advantage, np.float32), np.concatenate(behaviour)


def token_by_token(alone, advantage, behaviour):
    """Loss and gradient of one row per turn, of what every completion token has."""
    logprob, _ = alone(np.zeros_like(advantage))

    def oracle(logprob):
        ratio = jnp.exp(logprob - behaviour)
        loss = jnp.maximum(-ratio * advantage, -jnp.clip(ratio, 0.8, 1.2) * advantage)
        return jnp.where(advantage < 0, jnp.minimum(loss, -3 * advantage), loss).mean()

    loss, cotangent = jax.value_and_grad(oracle)(logprob)
    return loss, alone(cotangent)[1]


def test_packed_rows_give_the_loss_and_gradient_of_one_row_per_turn(once, alone, groups):
    assert_same(once, token_by_token(alone, *per_token(groups, "dr_grpo")), 5e-6)


@pytest.mark.slow
def test_a_turn_s_own_advantage_is_that_of_its_tokens(once, learn, alone, groups):
    """Drawn for each turn, of either sign; splitting, packing and rows as for a trajectory's."""
    rng, (_, behaviour) = np.random.default_rng(8), per_token(groups, "dr_grpo")
    values = [[rng.normal(size=len(m.turns)) for m in g.trajectories] for g in groups]
    lengths = [
        [len(turn.completion.tokens) for turn in m.turns] for g in groups for m in g.trajectories
    ]
    flat = [own for its in values for own in its]
    advantage = np.concatenate([np.repeat(*pair) for pair in zip(flat, lengths, strict=True)])
    got = learn(pack(groups, values, 64, rows_multiple=4, length_multiple=64).batch)
    assert_same(got, token_by_token(alone, advantage.astype(np.float32), behaviour), 5e-6)
    assert abs(float(got[0] - once[0])) > 1e-3


def test_order_of_groups_and_members_does_not_matter(once, learn, groups):
    turned = [
        Group(g.task, tuple(g.trajectories[i] for i in (2, 0, 3, 1))) for g in reversed(groups)
    ]
    assert_same(once, learn(packed(turned)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_row_length_and_micro_batches_do_not_matter(once, learn, groups, rows):
    batch = packed(groups, rows=rows)
    assert batch.tokens.shape[0] > 4
    assert_same(once, learn(batch, micro_batch_rows=rows))


def test_sharing_does_not_matter(once, learn, groups):
    plain = packed(groups, share_prefixes=False)
    assert len(plain.tokens) > len(packed(groups).tokens)
    assert_same(once, learn(plain))


@pytest.mark.slow
def test_remat_does_not_matter(once, learn, groups):
    assert_same(once, learn(packed(groups), remat=True))


def test_splitting_a_completion_into_more_turns_does_not_matter(once, learn, groups, make):
    """Cut as a long answer is, in contexts that carry over everything."""

    def split(turn):
        c, cut, state = turn.completion, len(turn.completion.tokens) // 2, answer.start(turn.prompt)
        contexts = []
        for part in (slice(0, cut), slice(cut, None)):
            asked, ids, mu = answer.prompt(state), c.tokens[part], c.behaviour_logprobs[part]
            contexts.append(make["turn"](asked.shared, asked.tail, ids, mu, turn.kind))
            state = answer.advance(state, ids, len(c.tokens))
        return contexts

    more = [
        make["group"]([[s for t in m.turns for s in split(t)] for m in g.trajectories], g.rewards)
        for g in groups
    ]
    assert sum(len(m.turns) for g in more for m in g.trajectories) == 64
    assert_same(once, learn(packed(more)))


@pytest.fixture(scope="module")
def reinforced(config, params, alone, groups, packed_once):
    """Batches of every advantage and normaliser, and their gradients turn by turn.

    -A weight / denominator is the cotangent of each token's logprob.
    """
    proximal = forward.told(config, params, packed_once, 1.0, 1).logprobs
    ids, found = ids_of(groups), []
    for name, normaliser in itertools.product(advantages.ADVANTAGES, normalisers.NORMALISERS):
        how = normalisers.named(normaliser)
        batch = packed(groups, WIDE, rows=1, name=name, normaliser=how, constant=9.0)
        batch = dataclasses.replace(
            batch, proximal_logprobs=proximal, behaviour_logprobs=proximal + batch.weights
        )
        advantage, _ = per_token(groups, name)
        weights, denominator = how(*ids, 9.0)
        _, expected = alone((-advantage * weights / denominator).astype(np.float32))
        found.append((batch, expected))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ratio", ratios.RATIOS)
def test_on_policy_gradient_of_every_variant_is_reinforce(learn, reinforced, ratio):
    for batch, expected in reinforced:
        _, got = learn(batch, micro_batch_rows=1, ratio=ratio)
        assert_same((0.0, got), (0.0, expected), 1e-5)


def ids_of(groups):
    """Turn, trajectory and prompt of every completion token, in the order of `alone`."""
    found, turn, trajectory = [], itertools.count(), itertools.count()
    for prompt, group in enumerate(groups):
        for member in group.trajectories:
            number = next(trajectory)
            for one in member.turns:
                found += [(next(turn), number, prompt)] * len(one.completion.tokens)
    return np.array(found).T


@pytest.mark.slow
def test_a_turn_s_ratio_does_not_depend_on_where_its_tokens_lie(learn, groups, packed_once):
    """Off policy, so that turns' means matter and some are cut."""
    how = dict(ratio="gspo", clip_low=0.3, clip_high=0.3)
    once = learn(packed_once, micro_batch_rows=1, **how)
    assert_same(once, learn(packed(groups), **how))
    assert abs(float(once[0] - learn(packed_once, micro_batch_rows=1)[0])) > 1e-3


@pytest.mark.slow
def test_a_turn_is_left_out_wherever_its_tokens_lie(learn, groups, packed_once):
    how = dict(off_policy_at=0.1, tis_cap=5.0, tis_low=0.5, tis_veto=1e-4)
    apart = dataclasses.replace  # of the sampler, so that there is something to correct
    once, rows = (
        apart(one, proximal_logprobs=one.behaviour_logprobs + np.where(one.turn % 3, 0.2, -12.0))
        for one in (packed_once, packed(groups))
    )
    kept = learn(once, micro_batch_rows=1, **how)
    assert_same(kept, learn(rows, **how))
    every = dataclasses.replace(once, advantages=-np.abs(once.advantages))
    gone, _ = learn(every, micro_batch_rows=1, **how)
    assert 0 < abs(float(gone)) < abs(float(learn(every, micro_batch_rows=1)[0]))


def test_on_policy_loss_is_the_spec_s_one_twelfth(config, params, learn, make):
    lengths = [(3, 2), (4, 1, 2)]
    turns = [[make["turn"]([5], [6], range(10, 10 + n)) for n in own] for own in lengths]
    batch = packed([make["group"](turns, [1.0, 0.0])])
    proximal = forward.told(config, params, batch, 1.0, 4).logprobs
    loss, _ = learn(dataclasses.replace(batch, proximal_logprobs=proximal))
    assert float(loss) == pytest.approx(1 / 12, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_the_oracle_s(config, params, alone, groups, temperature):
    batch = packed(groups)
    got = forward.told(config, params, batch, temperature, 4).logprobs
    _, behaviour = per_token(groups, "dr_grpo")
    expected, _ = alone(np.zeros_like(behaviour), temperature)
    trained = batch.weights > 0
    np.testing.assert_allclose(np.sort(got[trained]), np.sort(expected), atol=1e-5)
    assert (got[~trained] == 0).all()


def test_the_stop_token_gets_gradient(learn, make):
    only_stop = [[make["turn"]([5, 6], [7], [2])], [make["turn"]([5, 6], [8], [2])]]
    _, gradient = learn(packed([make["group"](only_stop, [1.0, 0.0])]))
    assert float(jnp.abs(gradient["layers"]["gate"]).max()) > 1e-6


def test_padding_gets_no_gradient_whatever_it_holds(learn, groups):
    batch = packed(groups)
    padding = batch.kv_end == np.arange(1, 65)
    padding &= batch.weights == 0
    padding[:, :-1] &= batch.weights[:, 1:] == 0
    assert padding.sum() > 20
    noise = np.random.default_rng(0)
    other = dataclasses.replace(
        batch,
        tokens=np.where(padding, noise.integers(0, 60, padding.shape, np.int32), batch.tokens),
        advantages=np.where(padding, np.float32(9), batch.advantages),
        behaviour_logprobs=np.where(padding, np.float32(-9), batch.behaviour_logprobs),
        proximal_logprobs=np.where(padding, np.float32(-9), batch.proximal_logprobs),
        positions=np.where(padding, 3, batch.positions).astype(np.int32),
    )
    a, b = learn(batch), learn(other)
    np.testing.assert_array_equal(a[0], b[0])
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


def test_mutations_are_noticed(once, learn, packed_once):
    """Each of these is a bug that would still train: the loss must move.

    A kv_end that is one too early is no bug: the last token of a turn predicts nothing.
    """
    batch = packed_once
    width = batch.tokens.shape[1]
    column = np.arange(width)
    own_end = np.maximum(column + 1, batch.kv_end - 2)
    mutants = {
        "causal only": dict(kv_end=np.full_like(batch.kv_end, width)),
        "ends two early": dict(kv_end=own_end.astype(np.int32)),
        "positions of the row": dict(positions=np.tile(column, (1, 1)).astype(np.int32)),
        "stop token not trained": dict(
            weights=batch.weights * (batch.tokens != 2).astype(np.float32)
        ),
        "masked by token id": dict(weights=batch.weights * (batch.tokens != 0)),
        "advantage shifted": dict(advantages=np.roll(batch.advantages, 1, axis=1)),
    }
    for name, change in mutants.items():
        change = {k: v.astype(getattr(batch, k).dtype) for k, v in change.items()}
        loss, _ = learn(dataclasses.replace(batch, **change), micro_batch_rows=1)
        assert abs(float(loss - once[0])) > 1e-4, name


def test_kl_to_oneself_is_nothing_and_to_another_it_pulls(config, params, learn, groups):
    batch = packed(groups)
    own = forward.told(config, params, batch, 1.0, 4).logprobs
    batch = dataclasses.replace(
        batch, reference_logprobs=own, proximal_logprobs=own, advantages=np.zeros_like(own)
    )
    _, gradient = learn(batch, kl_weight=1.0)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-5
    away = (own + 0.5 * batch.weights).astype(np.float32)
    loss, _ = learn(dataclasses.replace(batch, reference_logprobs=away), kl_weight=1.0)
    assert float(loss) == pytest.approx(0.1487213, rel=1e-4)


# ---------------------------------------------------------------- the step


ADAMW = OptimizerSettings("adamw", 3e-3, 1e-3, warmup_steps=0)
ADAM = make_optimizer(ADAMW)


def begin(params, optimizer=ADAM):
    """A state of its own: updates donate it."""
    return state.start(jax.tree.map(jnp.copy, params), optimizer)


def step(config, started, *batches, optimizer=ADAM, **settings):
    settings = dataclasses.replace(SETTINGS, **settings)
    return update.learn(config, optimizer, settings, started, {}, batches)


@pytest.mark.slow
def test_steps_raise_good_completions_and_report(config, params, groups):
    batch = packed(groups)
    now = begin(params)
    before = forward.told(config, now.masters, batch, 1.0, 4).logprobs
    batch = dataclasses.replace(batch, behaviour_logprobs=before, proximal_logprobs=before)
    for number in range(3):
        old, (now, metrics) = now, step(config, now, batch)
        assert all(type(value) in (float, int) for value in metrics.values())
        if number == 0:  # on-policy
            assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
            assert metrics["logprob_gap_max"] < 1e-4 and metrics["clip_share"] == 0
    assert int(now.step) == 3
    assert metrics["loss_tokens"] == batch.weights.sum()
    assert metrics["grad_norm"] > 0 and metrics["update_norm"] > 0
    assert metrics["update/changed_share"] > 0.9
    assert metrics["update/applied_over_asked"] == pytest.approx(1, abs=1e-3)
    assert 0 < metrics["entropy_update"] < np.log(60) and 0 < metrics["entropy_answer"]
    assert old.masters["embed"].is_deleted()  # donated
    after = forward.told(config, now.masters, batch, 1.0, 4).logprobs
    assert ((after - before) * batch.advantages).sum() > 0.1


def test_several_steps_are_one_after_another_and_the_clips_act(config, params, groups):
    """Two minibatches, twice: each step sees what the last one left; the ratio moves off 1."""
    parts = [packed([group]) for group in groups]
    for i, part in enumerate(parts):
        own = forward.told(config, params, part, 1.0, 4).logprobs
        parts[i] = dataclasses.replace(part, proximal_logprobs=own)
    together, told = step(config, begin(params), *parts, *parts)
    alone, metrics = begin(params), []
    for part in (*parts, *parts):
        alone, one = step(config, alone, part)
        metrics.append(one)
    jax.tree.map(np.testing.assert_array_equal, together.masters, alone.masters)
    assert int(together.step) == told["update/optimizer_steps"] == 4
    assert metrics[0]["ratio_max"] == pytest.approx(1, abs=1e-5) and metrics[0]["clip_share"] == 0
    assert metrics[3]["ratio_max"] > 1.05
    assert told["clip_share"] == pytest.approx(np.mean([m["clip_share"] for m in metrics]), 0.2)
    tight, shares = begin(params), []
    for part in (*parts, *parts):
        tight, one = step(config, tight, part, clip_low=0.01, clip_high=0.01)
        shares.append(one["clip_share"])
    assert shares[0] == 0 and shares[2] > 0.2


@pytest.mark.parametrize("kind", ["loss", "gradient", "parameters"])
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(config, params, groups, kind):
    batch, now = packed(groups), begin(params)
    now, _ = step(config, now, batch)
    kept = jax.device_get(now)
    optimizer = ADAM
    if kind == "loss":
        bad = dataclasses.replace(batch, advantages=batch.advantages * np.float32(np.nan))
    elif kind == "gradient":
        bad = dataclasses.replace(batch, advantages=batch.advantages * np.float32(1e38))
    else:
        bad, optimizer = batch, make_optimizer(dataclasses.replace(ADAMW, learning_rate=1e38))
    now, metrics = step(config, now, bad, optimizer=optimizer)
    assert metrics["update/skipped"] == metrics["update/optimizer_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(now), kept)
    now, metrics = step(config, now, batch)
    assert metrics["update/skipped"] == 0 and int(now.step) == 2


def test_entropy_is_told_apart_by_turn_kind(config, params, make):
    def of_kind(kind):
        turns = [[make["turn"]([5, 6], [7], [8, 2], kind=kind)] for _ in range(2)]
        batch = packed([make["group"](turns, [1.0, 0.0])])
        return step(config, begin(params), batch)[1]

    up, answer = of_kind(TurnKind.UPDATE), of_kind(TurnKind.ANSWER)
    assert up["entropy_update"] == answer["entropy_answer"] > 0
    assert up["entropy_answer"] == answer["entropy_update"] == 0


def test_few_programs_are_compiled(learn, groups, make):
    sizes = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batches, "bucket", bucket)
        for seed in range(40):
            micros = micro_batches.split(packed(make["random_groups"](seed)), 4)
            assert len({micro.weights.shape for micro in micros}) == 1
            sizes |= {micro.weights.shape for micro in micros}
    assert len(sizes) <= 5
    learn(packed(groups))
    compiled = update._accumulate._cache_size()
    learn(packed(groups), clip_low=0.1, clip_high=0.3, dual_clip=5.0, kl_weight=0.1)
    assert update._accumulate._cache_size() == compiled


def test_buckets():
    sizes = (1, 256, 257, 4096, 4097, 5120, 5121, 8193)
    assert [bucket(n) for n in sizes] == [256, 256, 512, 4096, 5120, 5120, 6144, 10240]
    assert all(n <= bucket(n) <= max(256, 2 * n) for n in range(1, 5000))
    assert all(n <= bucket(n) <= 1.25 * n for n in range(4096, 50000, 7))


def test_what_cannot_be_run_is_refused(learn, groups):
    batch = packed(groups)
    with pytest.raises(ValueError, match="rows_multiple=5"):
        learn(batch, micro_batch_rows=5)
    with pytest.raises(ValueError, match="not one trained token"):
        learn(dataclasses.replace(batch, weights=np.zeros_like(batch.weights)))
    with pytest.raises(ValueError, match="first token of a row"):
        learn(dataclasses.replace(batch, weights=np.ones_like(batch.weights)))
    with pytest.raises(ValueError, match="temperature is 0"):
        dataclasses.replace(SETTINGS, temperature=0.0)
    with pytest.raises(ValueError, match="clip range"):
        dataclasses.replace(SETTINGS, dual_clip=1.0)


@pytest.mark.slow
def test_a_mixture_of_experts_learns_the_same_however_it_is_packed(config, groups, packed_once):
    """No capacity, no dropped token: neighbours in a row decide nothing."""
    config = dataclasses.replace(config, experts=Experts(4, 2, 24, normalize=True))
    params = parameters.init_params(config, jax.random.key(0))
    once = update.loss_and_gradient(
        config, dataclasses.replace(SETTINGS, micro_batch_rows=1), params, {}, packed_once
    )
    rows = packed(groups)
    assert_same(once, update.loss_and_gradient(config, SETTINGS, params, {}, rows), 1e-5)
    optimizer = make_optimizer(OptimizerSettings("adamw", 1e-3, 0, 0))
    _, metrics = step(config, begin(params, optimizer), rows, optimizer=optimizer)
    assert 1 <= metrics["moe_load_max"] <= 2  # two of four experts a token: at most twice the mean
    assert 0 <= metrics["moe_load_idle"] <= 0.5
