"""Turns written again, in the batch: their advantage, whose they are, and their gradient."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.grpo import advantages, algorithm, micro_batches, normalisers, update
from notepad_jax.model import attention, policy
from notepad_jax.types import Reading, Status, Trajectory
from tests.grpo.test_algorithm import having, never

SCORES = (1.0, 0.5, 0.5, 0.0)


def again(group, member=1, turn=1, scores=SCORES, seed=0):
    """The group with completions of one of its turns, the stop token 2 at the end of each."""
    rng, old = np.random.default_rng(seed), group.trajectories[member].turns[turn]
    local = []
    for sample, score in enumerate(scores):
        ids = np.append(rng.integers(3, 60, 2 + sample), 2).astype(np.int32)
        told = rng.normal(-4, 0.5, len(ids)).astype(np.float32)
        said = dataclasses.replace(old.completion, tokens=ids, behaviour_logprobs=told)
        one = dataclasses.replace(old, completion=said)
        local.append(Trajectory(Reading("t", sample, (one,), "", Status.ANSWERED), score, {}))
    return dataclasses.replace(group, local=tuple(local))


@pytest.fixture(scope="module")
def groups(make):
    first, second = make["random_groups"](7)
    return [again(first), second]


def test_the_advantage_by_hand():
    """1, .5, .5, 0: a spread of sqrt(1/6). A scale of several groups is none of a set's."""
    scores, equal = np.array(SCORES), np.array([0.3, 0.3, 0.3])
    for name in ("dr_grpo", "batch_std", "tmn"):
        assert advantages.local(name, scores, 0.5).tolist() == [0.25, 0, 0, -0.25]
    spread = advantages.local("grpo", scores, 1.0)
    np.testing.assert_allclose(spread, [1.224742, 0, 0, -1.224742], rtol=1e-5)
    np.testing.assert_allclose(advantages.local("rloo", scores, 1.0), [2 / 3, 0, 0, -2 / 3])
    for name in advantages.ADVANTAGES:
        assert advantages.local(name, equal, 0.5).tolist() == [0, 0, 0]


def labels(one):
    """(turn, trajectory, prompt, advantage, tokens) of every turn of a batch, by its number."""
    on = one.weights > 0
    rows = {}
    for turn in np.unique(one.turn[on]):
        here = one.turn == turn
        ids = [set(x[here].tolist()) for x in (one.trajectory, one.prompt, one.advantages)]
        assert [len(x) for x in ids] == [1, 1, 1]
        rows[int(turn)] = (*(x.pop() for x in ids), one.tokens[here].tolist())
    return rows


def test_local_turns_are_a_group_of_their_own(groups):
    (one,), (stats,) = algorithm.batches(*having(), groups, never, never)
    found = labels(one)
    assert len(found) == 2 * 4 * 4 + 4
    local = [found[number] for number in range(32, 36)]
    assert [row[0] for row in local] == [8, 9, 10, 11] and {row[1] for row in local} == {2}
    assert [row[2] for row in local] == [0.25, 0, 0, -0.25]
    for row, member in zip(local, groups[0].local, strict=True):
        assert row[3] == member.turns[0].completion.tokens.tolist()
    assert one.denominator == sum(len(row[3]) for row in found.values())
    # They lie behind the copy of the prompt that is there for the turn they were taken from, of
    # which a context's last token is always its own.
    turn = groups[0].local[0].turns[0]
    assert len(turn.prompt.shared)
    (plain,), (fewer,) = algorithm.batches(
        *having(), [dataclasses.replace(one, local=()) for one in groups], never, never
    )
    private = [1 + len(row[3]) for row in local]
    assert stats.packed_tokens - fewer.packed_tokens == sum(private)
    # And what the readings learn is what they learn without.
    assert {number: found[number] for number in range(32)} == labels(plain)


def test_no_local_turns_no_difference(groups):
    """Off is off, byte by byte, whatever the weight."""
    bare = [dataclasses.replace(one, local=()) for one in groups]
    (one,), _ = algorithm.batches(*having(local_weight=9.0), bare, never, never)
    (other,), _ = algorithm.batches(*having(local_weight=0.0), bare, never, never)
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), field.name


def test_minibatches_keep_local_turns_with_their_group_and_scales_do_not_see_them(groups):
    both = [groups[0], again(groups[1], scores=(9.0, 0.0))]
    made, _ = algorithm.batches(
        *having(minibatches=2, advantage="batch_std"), both, lambda one: one.weights, never
    )
    expected = advantages.of_groups("batch_std", groups)
    for one, group, values in zip(made, both, expected, strict=True):
        rows = list(labels(one).values())
        assert [row[2] for row in rows[:16:4]] == values.astype(np.float32).tolist()
        assert [row[0] for row in rows[16:]] == list(range(4, 4 + len(group.local)))
    assert [row[2] for row in labels(made[1]).values()][16:] == [2.25, -2.25]


def test_kl_is_taken_off_their_scores_too(make):
    """Tokens 0.5 above the reference: k1 of 3 and 4 tokens is 1.5 and 2, at 0.1 of it."""
    turn = make["turn"]
    group = make["group"]([[turn([5], [6], [7, 2])], [turn([5], [6], [8, 2])]], [1.0, 0.0])
    group = again(group, member=0, turn=0, scores=(1.0, 0.0))
    how, settings = having(kl_in="reward", kl_weight=0.1, kl="k1")
    (one,), _ = algorithm.batches(
        how, settings, [group], never, lambda one: one.proximal_logprobs - 0.5 * one.weights
    )
    found = [row[2] for row in labels(one).values()]
    half = 0.5 * ((1 - 0.15) - (0 - 0.2)) / 2
    np.testing.assert_allclose(found, [0.5, -0.5, half, -half], rtol=1e-5)


# ---------------------------------------------------------------- the gradient


def alone(config, params, turns):
    """Of each turn in a row of its own: (logprobs of completion tokens, their pullback)."""
    width = max(len(t.prompt.tokens) + len(t.completion.tokens) for t in turns)
    tokens, trained = np.zeros((len(turns), width), np.int32), np.zeros((len(turns), width), bool)
    for row, turn in enumerate(turns):
        text = np.concatenate([turn.prompt.tokens, turn.completion.tokens])
        tokens[row, : len(text)] = text
        trained[row, len(turn.prompt.tokens) : len(text)] = True
    positions = np.tile(np.arange(width, dtype=np.int32), (len(turns), 1))

    def logprobs(params):
        attend = attention.packed(config, jnp.full(tokens.shape, width, jnp.int32))
        at = jnp.asarray(tokens), jnp.asarray(positions)
        hidden, *_ = policy.forward(config, params, *at, attend)
        logits = hidden @ policy.output_matrix(config, params)
        logits = jnp.where(jnp.arange(config.vocab_size) < config.valid_vocab, logits, -jnp.inf)
        found = jax.nn.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0][trained[:, 1:]]

    run = jax.jit(lambda params, pulled: (lambda out, pull: (out, pull(pulled)[0]))(
        *jax.vjp(logprobs, params)))  # fmt: skip
    count = sum(len(t.completion.tokens) for t in turns)
    return lambda pulled=None: run(
        params, np.zeros(count, np.float32) if pulled is None else pulled.astype(np.float32)
    )


@pytest.mark.slow
def test_the_packed_gradient_is_reinforce_s_with_the_local_terms(
    config, params, groups, monkeypatch
):
    """On policy, of each normaliser: -A weight / denominator of each token, turn by turn."""
    monkeypatch.setattr(micro_batches, "bucket", lambda count: 256)
    readings = [t for group in groups for t in group.trajectories] + list(groups[0].local)
    turns = [turn for one in readings for turn in one.turns]
    oracle = alone(config, params, turns)
    logprobs, _ = oracle()
    cuts = np.cumsum([len(turn.completion.tokens) for turn in turns])[:-1]
    behaviour = dict(zip(map(id, turns), np.split(np.asarray(logprobs), cuts), strict=True))
    groups = [_told(group, behaviour) for group in groups]

    worth = [*np.concatenate(advantages.of_groups("dr_grpo", groups)), 0.25, 0, 0, -0.25]
    prompts = [0] * 4 + [1] * 4 + [2] * 4
    ids, advantage, number = [], [], itertools.count()
    for trajectory, one in enumerate(readings):
        for turn in one.turns:
            said = len(turn.completion.tokens)
            ids += [(next(number), trajectory, prompts[trajectory])] * said
            advantage += [worth[trajectory]] * said
    for name, normaliser in normalisers.NORMALISERS.items():
        how, settings = having(normaliser=name, constant=9.0)
        (one,), _ = algorithm.batches(how, settings, groups, never, never)
        assert len(one.tokens) == 1  # one row: chunks once, local turns behind them
        _, got = update.loss_and_gradient(config, settings, params, {}, one)
        weights, denominator = normaliser(*np.array(ids).T, 9.0)
        _, expected = oracle(-np.array(advantage) * weights / denominator)
        size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * size)


def _told(group, behaviour):
    """The group with the logprobs `behaviour` of its turns, by id."""

    def told(one):
        turns = tuple(
            dataclasses.replace(
                turn,
                completion=dataclasses.replace(
                    turn.completion, behaviour_logprobs=behaviour[id(turn)]
                ),
            )
            for turn in one.turns
        )
        return dataclasses.replace(one, reading=dataclasses.replace(one.reading, turns=turns))

    return dataclasses.replace(
        group,
        trajectories=tuple(map(told, group.trajectories)),
        local=tuple(map(told, group.local)),
    )
