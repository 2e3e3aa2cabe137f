"""Answers of several contexts from a real engine to the gradient: what is sampled is learnt."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.engine.service import EngineService
from notepad_jax.grpo import forward, update
from notepad_jax.grpo.batch import pack
from notepad_jax.model import attention, policy
from notepad_jax.reading import memory_agent
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.text.prompts import Template
from notepad_jax.types import (
    Finish,
    Group,
    PolicySnapshot,
    Reading,
    Status,
    Task,
    TextDocument,
    Trajectory,
    TurnKind,
    tokens,
)
from tests import tiny
from tests.grpo.test_update import SETTINGS, assert_same

pytestmark = pytest.mark.slow  # compiles an engine and an update of its own

RULES = Rules(8, 16, 6, 9, "overwrite", answer_chunks=3, carry=4)
CUES = [tokens([n] * 10) for n in (50, 51)]  # with a memory behind them a page is full
TEMPLATE = Template(
    name="made", update=(CUES[0], "question", "chunk", "memory"),
    answer=(CUES[1], "question", "memory", tokens([52, 53])), direct=(),
    no_memory=tokens([54]), keep=tokens(), between=tokens(), stop_ids=tiny.STOPS,
)  # fmt: skip


def readings(config, params, **options):
    """Three readings of one document; returns (their turns, what the service counted)."""
    draw = np.random.default_rng(1).integers
    question, chunks = tokens(draw(4, 50, 6)), [tokens(draw(4, 50, 16)) for _ in range(2)]
    state = memory_agent.start(question, chunks)

    async def one(service, seed):
        how = TurnSampling(1.0, 1.0, tiny.STOPS, seed)
        read = memory_agent.read(service, TEMPLATE, RULES, state, how)
        return tuple([turn async for turn, _ in read])

    async def go():
        runner, snapshot = tiny.executor(config=config), PolicySnapshot(0, params)
        async with EngineService(runner, snapshot, **options) as service:
            return await asyncio.gather(*[one(service, seed) for seed in range(3)]), service.stats

    return asyncio.run(go())


@pytest.fixture(scope="module")
def sampled(config, params):
    return readings(config, params)


def test_an_engine_answers_contexts_alike_however_prefixes_are_kept(sampled, config, params):
    """And reports the trainer's logprobs; a later context reads question and memory no more."""
    (shared, stats), (plain, _) = sampled, readings(config, params, share_prefixes=False)
    assert max(len(turns) for turns in shared) == 2 + 3
    for mine, theirs in zip(shared, plain, strict=True):
        assert [t.completion.tokens.tolist() for t in mine] == [
            t.completion.tokens.tolist() for t in theirs]  # fmt: skip
    for turn in (turn for turns in shared for turn in turns):
        trained = tiny.trainer_logprobs(params, turn.prompt, turn.completion, 1.0, config)
        assert np.abs(trained - turn.completion.behaviour_logprobs).max() < 1e-5
    later = [turn for turns in shared for turn in turns if turn.chunk == 2][1:]
    saved = sum(len(t.prompt.shared) for turns in shared for t in turns[3:])
    assert later and saved > 0 and stats.prefix_tokens_saved >= saved


def test_the_gradient_of_packed_contexts_is_reinforce(sampled, config, params):
    """Against a 20-line oracle: each turn in a row of its own, -A log p of what it wrote."""
    advantages = np.array([0.75, -1.0, 0.25])
    task = Task("t", "?", TextDocument(""), ("a",), "test", "em")
    read = [Reading("t", k, turns, "", Status.TRUNCATED) for k, turns in enumerate(sampled[0])]
    group = Group(task, tuple(Trajectory(one, 0.0, {}) for one in read))
    turns = [(turn, a) for one, a in zip(read, advantages, strict=True) for turn in one.turns]
    assert any(t.kind is TurnKind.ANSWER and t.completion.finish is Finish.LENGTH for t, _ in turns)

    width = max(len(t.prompt.tokens) + len(t.completion.tokens) for t, _ in turns)
    rows, weights = np.zeros((len(turns), width), np.int32), np.zeros((len(turns), width))
    for row, (turn, advantage) in enumerate(turns):
        begin, text = len(turn.prompt.tokens), [*turn.prompt.tokens, *turn.completion.tokens]
        rows[row, : len(text)], weights[row, begin : len(text)] = text, advantage

    def reinforce(params):
        attend = attention.packed(config, jnp.full(rows.shape, width, jnp.int32))
        places = jnp.tile(jnp.arange(width), (len(turns), 1))
        hidden, *_ = policy.forward(config, params, jnp.asarray(rows), places, attend)
        logits = hidden @ policy.output_matrix(config, params)
        logits = jnp.where(jnp.arange(config.vocab_size) < config.valid_vocab, logits, -jnp.inf)
        logp = jax.nn.log_softmax(logits[:, :-1])
        said = jnp.take_along_axis(logp, rows[:, 1:, None], -1)[..., 0]
        kept = jnp.where(weights[:, 1:] != 0, said * weights[:, 1:], 0.0)
        return -kept.sum() / (weights != 0).sum()

    wanted = jax.jit(jax.grad(reinforce))(params)
    packed = pack([group], [advantages], 384, length_multiple=384)
    assert packed.stats.rows == 1 and packed.stats.prefix_tokens_saved > 0
    how = dataclasses.replace(SETTINGS, micro_batch_rows=1)
    # The engine's own logprobs differ in their last bits, and so do ratios to them from 1.
    proximal = forward.told(config, params, packed.batch, 1.0, 1).logprobs
    batch = dataclasses.replace(packed.batch, proximal_logprobs=proximal)
    _, found = update.loss_and_gradient(config, how, params, {}, batch)
    assert_same((0.0, found), (0.0, wanted), 1e-5)
