"""Turns under a grammar: what is drawn is allowed, and nobody beside them gets anything else."""

import asyncio
import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from notepad_jax.engine import sampler
from notepad_jax.engine.service import EngineService
from notepad_jax.types import Finish, PolicySnapshot, Prompt, SamplingParams, tokens

WORDS = -(-tiny.CONFIG.vocab_size // 32)
PLAIN = dataclasses.replace(tiny.SETTINGS, slots=4, row_tokens=96)
SETTINGS = dataclasses.replace(PLAIN, mask_words=WORDS)
PROMPTS = tiny.prompts()[:6]
LEAST = 4  # tokens before a stop


def bits(ids) -> np.ndarray:
    found = np.zeros(WORDS * 32, bool)
    found[list(ids)] = True
    return np.packbits(found, bitorder="little").view(np.int32)


@dataclasses.dataclass(frozen=True)
class Thirds:
    """After a token n comes one of n + 1 modulo 3, the first of 0; a stop after LEAST tokens."""

    def matcher(self, stop_ids):
        return _Thirds(stop_ids)


class _Thirds:
    def __init__(self, stop_ids) -> None:
        self._stops, self._next, self._made = stop_ids, 0, 0

    def allowed(self):
        valid = range(self._next, tiny.CONFIG.valid_vocab, 3)
        ids = {i for i in valid if i not in self._stops}
        return bits(ids | ({*self._stops} if self._made >= LEAST else set()))

    def take(self, token: int) -> None:
        self._next, self._made = (token + 1) % 3, self._made + 1


def bounded(number: int, **more) -> SamplingParams:
    temperature = (1.0, 0.7, 0.0)[number % 3]
    how = dataclasses.replace(tiny.sampling(number, temperature, 12), grammar=Thirds())
    return dataclasses.replace(how, **more)


def run(prompts, samples, settings=SETTINGS, streamed=False, **options):
    async def one(service, prompt, sampling):
        if not streamed:
            return await service.complete(prompt, sampling)
        async with contextlib.aclosing(service.stream(prompt, sampling)) as pieces:
            return [piece async for piece in pieces]

    async def go():
        snapshot = PolicySnapshot(0, tiny.params())
        async with EngineService(tiny.executor(settings), snapshot, **options) as service:
            pairs = zip(prompts, samples, strict=True)
            return await asyncio.gather(*[one(service, *pair) for pair in pairs])

    return asyncio.run(go())


def follows(completion, stop_ids) -> bool:
    wanted = 0
    for place, token in enumerate(completion.tokens.tolist()):
        if token in stop_ids:
            return place >= LEAST and place == len(completion.tokens) - 1
        if token % 3 != wanted:
            return False
        wanted = (token + 1) % 3
    return True


@pytest.fixture(scope="module")
def company():
    """Every other turn has a grammar."""
    samples = [bounded(n) if n % 2 else tiny.sampling(n) for n in range(len(PROMPTS))]
    return samples, run(PROMPTS, samples)


@pytest.mark.slow
def test_what_is_drawn_is_allowed_and_reported_as_the_trainer_computes_it(company):
    samples, done = company
    of_grammar = [n for n in range(len(PROMPTS)) if n % 2]
    assert all(follows(done[n], samples[n].stop_ids) for n in of_grammar)
    assert not all(follows(done[n], samples[n].stop_ids) for n in range(0, len(PROMPTS), 2))
    for n in of_grammar:
        wanted = tiny.trainer_logprobs(tiny.params(), PROMPTS[n], done[n], samples[n].temperature)
        assert np.abs(wanted - done[n].behaviour_logprobs).max() < 1e-4
        assert np.isfinite(done[n].behaviour_logprobs).all()


@pytest.mark.slow
def test_who_has_no_grammar_gets_what_he_gets_alone(company):
    samples, done = company
    free = range(0, len(PROMPTS), 2)
    alone = run([PROMPTS[n] for n in free], [samples[n] for n in free], PLAIN)
    for n, one in zip(free, alone, strict=True):
        assert one.tokens.tolist() == done[n].tokens.tolist()


@pytest.mark.slow
def test_shared_prefixes_drafts_and_streams_change_nothing(company):
    samples, done = company
    plain = run(PROMPTS, samples, share_prefixes=False, use_drafts=False)
    drafted = [
        dataclasses.replace(prompt, draft=tokens([*one.tokens[:3], 0, 1]))
        for prompt, one in zip(PROMPTS, done, strict=True)
    ]
    again = run(drafted, samples)
    pieces = run(PROMPTS, samples, streamed=True)
    for one, *others in zip(done, plain, again, strict=True):
        assert all(one.tokens.tolist() == other.tokens.tolist() for other in others)
    for one, some in zip(done, pieces, strict=True):
        assert np.concatenate([piece.tokens for piece in some]).tolist() == one.tokens.tolist()
        assert some[-1].finish is one.finish


@pytest.mark.slow
def test_a_turn_under_a_grammar_ends_at_its_length_or_where_it_may():
    done = run([PROMPTS[0]] * 8, [bounded(n, max_new_tokens=3 + n) for n in range(8)])
    assert all(len(one.tokens) <= 3 + n for n, one in enumerate(done))
    assert done[0].finish is Finish.LENGTH  # before it may stop
    (short,) = run([Prompt(PROMPTS[0].shared, PROMPTS[0].tail)], [bounded(1, max_new_tokens=1)])
    assert len(short.tokens) == 1 and short.tokens[0] % 3 == 0


@pytest.mark.slow
def test_top_p_is_a_share_of_what_may_be_drawn():
    """The likeliest tokens are forbidden; of the others the likeliest half stays."""
    shares = np.log([0.5, 0.2, 0.15, 0.1, 0.05]).astype(np.float32)
    logits = jnp.tile(jnp.asarray(shares), (200, 1))
    masks = jnp.asarray([[0b11100]], jnp.int32)
    seeds = jnp.stack([jnp.zeros(200, jnp.uint32), jnp.arange(200, dtype=jnp.uint32)], 1)
    ones, zeros = jnp.ones(200), jnp.zeros(200, jnp.int32)
    drawn, logps = sampler.sample(logits, ones, ones * 0.45, seeds, zeros, masks, zeros)
    assert {*drawn.tolist()} == {2}  # 0.15 of 0.3
    np.testing.assert_allclose(logps, np.log(0.15), rtol=1e-5)  # of all that there are
    drawn, _ = sampler.sample(logits, ones, ones, seeds, zeros, masks, zeros)
    assert {*drawn.tolist()} == {2, 3, 4}
    drawn, _ = sampler.sample(logits, ones, ones, seeds, zeros, masks, zeros - 1)
    plain, _ = sampler.sample(logits, ones, ones, seeds, zeros)
    assert {*drawn.tolist()} == {0, 1, 2, 3, 4} and drawn.tolist() == plain.tolist()


def test_an_engine_without_masks_refuses_a_grammar():
    with pytest.raises(ValueError, match="built without masks"):
        run([PROMPTS[0]], [bounded(0)], PLAIN)
    with pytest.raises(ValueError, match="needs stop_ids"):
        bounded(0, stop_ids=())
