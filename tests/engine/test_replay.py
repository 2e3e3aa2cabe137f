"""A rollout that goes on with the turns that had ended: the same launches, less work.

The executor is arithmetic, and its logprobs tell who else was in a launch: a schedule that is not
the first one's cannot give the same.
"""

import asyncio

import pytest

from notepad_jax.engine.executor import Sampled
from notepad_jax.engine.replay import Replay
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import CompleterFailed, PolicySnapshot, Prompt, SamplingParams, tokens

SETTINGS = EngineSettings(
    slots=4, page_size=8, pages=24, max_prompt=96, max_new_tokens=12, steps_per_launch=2,
    row_tokens=256,
)  # fmt: skip
STOP = 999


class Enough(Exception):
    """Somebody stops the rollout."""


class Company:
    """The n-th token is 10 + seed + n, then a stop; its logprob the sum of the seeds beside it."""

    def __init__(self, launches: int = 10**9):
        self.settings, self.left = SETTINGS, launches
        self.reads, self.launches = [], []

    def weights(self, params):
        return params

    def read(self, params, prefixes):
        self.reads.append([prefix.tokens.tolist() for prefix in prefixes])

    def start(self, params, contexts):
        return self._launched("start", contexts, 1)

    def decode(self, params, contexts):
        return self._launched("decode", contexts, SETTINGS.steps_per_launch) if contexts else []

    def _launched(self, kind, contexts, most):
        self.left -= 1
        if self.left < 0:
            raise Enough
        seeds = [context.sampling.seed for context in contexts]
        self.launches.append((kind, seeds))
        return [self._tokens(context, most, sum(seeds)) for context in contexts]

    def _tokens(self, context, most, company):
        length, seed, made = 1 + context.sampling.seed % 9, context.sampling.seed, context.made
        ends = range(made, min(made + most, length))
        new = [10 + seed + n if n < length - 1 else STOP for n in ends]
        return Sampled(new, [-float(company)] * len(ends))


def turn(reading, number, said):
    """A reading's next turn: after a prefix that it shares with two others."""
    shared = tokens(range(reading // 3, reading // 3 + 16 + number))
    return (
        Prompt(shared, tokens([*said[-3:], 5])),
        SamplingParams(1.0, 1.0, 8, (STOP,), reading * 31 + number * 7),
    )


def rollout(executor, known=None, length=4):
    """Nine readings of four turns in four slots; returns (completions, stats, replay)."""
    replay, done, stats = Replay(executor), {}, None
    replay.begin(known or {})

    async def reading(service, which):
        said = [1]
        for number in range(length):
            completion = await service.complete(*turn(which, number, said))
            said = completion.tokens.tolist()
            done[which, number] = said, completion.behaviour_logprobs.tolist(), completion.finish

    async def all_of_them():
        async with EngineService(replay, PolicySnapshot(3, None)) as service:
            async with asyncio.TaskGroup() as readings:
                for which in range(9):
                    readings.create_task(reading(service, which))
            stats = service.take_stats()
            stats.prefill_seconds = stats.decode_seconds = 0.0
            return stats

    try:
        stats = asyncio.run(asyncio.wait_for(all_of_them(), 20))
    except* CompleterFailed as failed:
        assert isinstance(failed.exceptions[0].__cause__, Enough)
    return done, stats, replay


@pytest.fixture(scope="module")
def whole():
    executor = Company()
    return executor, *rollout(executor)


def test_the_rollout_of_this_test_tries_something(whole):
    """Turns of one launch and of several, beside others, also where somebody waits."""
    executor, done, _, replay = whole
    assert len(done) == 36 and len(replay.turns) == 36
    assert {len(given.pieces) for given in replay.turns.values()} >= {1, 2, 3, 4}
    assert {len(seeds) for _, seeds in executor.launches} >= {1, 3, 4}


def test_wherever_it_is_stopped_it_ends_as_if_it_had_not_been(whole):
    executor, done, stats, _ = whole
    for stopped in range(1, len(executor.launches)):
        first = rollout(Company(stopped))[2].turns
        again = Company()
        found, counts, replay = rollout(again, first)
        assert found == done and counts == stats, stopped
        assert len(replay.turns) == 36
        assert replay.replayed == len(first)
        assert again.reads == executor.reads
        left = [one for one in executor.launches if not set(one[1]) <= set(first)]
        assert again.launches == left  # whole launches, and only those with an unknown turn


def test_it_can_be_stopped_again_and_again(whole):
    _, done, stats, _ = whole
    known, rounds, counts = {}, 0, None
    while counts is None:
        found, counts, replay = rollout(Company(8), known)
        assert set(known) < set(replay.turns)
        known, rounds = replay.turns, rounds + 1
    assert found == done and counts == stats and rounds > 3


def test_turns_of_other_prompts_or_samplings_are_not_given(whole):
    _, done, _, replay = whole

    def asked(prompt, sampling):
        async def one():
            async with EngineService(again, PolicySnapshot(3, None)) as service:
                await service.complete(prompt, sampling)

        again = Replay(Company())
        again.begin(replay.turns)
        asyncio.run(one())
        return again.replayed

    prompt, sampling = turn(2, 0, [1])
    assert asked(prompt, sampling) == 1
    assert asked(Prompt(prompt.shared, tokens([2, 5])), sampling) == 0
    assert asked(Prompt(prompt.shared[1:], prompt.tail), sampling) == 0
    assert asked(prompt, SamplingParams(0.5, 1.0, 8, (STOP,), sampling.seed)) == 0
    assert asked(prompt, SamplingParams(1.0, 1.0, 8, (STOP,), sampling.seed + 1)) == 0
