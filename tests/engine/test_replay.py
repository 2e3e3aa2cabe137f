"""A rollout that goes on with the turns that had ended: the same launches, less work.

The executor's keys are hashes, and its logprobs tell who else was in a launch: a schedule that is
not the first one's cannot give the same, nor can one that reads what a known turn left out.
"""

import asyncio

import pytest

from notepad_jax.engine.replay import Replay
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import CompleterFailed, PolicySnapshot, Prompt, SamplingParams, tokens
from tests import slots

SETTINGS = EngineSettings(
    slots=4, page_size=8, pages=24, max_prompt=96, max_new_tokens=12, steps_per_launch=2,
    row_tokens=256,
)  # fmt: skip
STOP = 999
POLICY = slots.HashPolicy(3, (STOP, 10, 11, 12, 13, 14))


class Enough(Exception):
    """Somebody stops the rollout."""


def company(launches: int = 10**9) -> slots.Watched:
    """An executor that is stopped after so many launches; those that read prefixes do not count."""

    def before(number: int) -> None:
        if len(of_turns(runner)) == launches:
            raise Enough

    runner = slots.Watched(slots.executor(SETTINGS), before)
    return runner


def of_turns(executor: slots.Watched) -> list[tuple[str, list]]:
    """The launches that turns are in."""
    return [(kind, who) for kind, who in executor.launches if kind != "read"]


def turn(reading, number, said):
    """A reading's next turn: after a prefix that it shares with two others, or has for itself."""
    shared, tail = [*range(reading // 3, reading // 3 + 16 + number)], [*said[-3:], 5]
    cut = -1 if number == 2 else -len(tail)
    whole = [*shared, *tail]
    return (
        Prompt(tokens(whole[:cut]), tokens(whole[cut:])),
        SamplingParams(1.0, 1.0, 8, (STOP,), reading * 31 + number * 7),
    )


def rollout(executor, known=None, length=4):
    """Six readings of four turns in four slots; returns (completions, stats, replay)."""
    replay, done, stats = Replay(executor), {}, None
    replay.begin(known or {})

    async def reading(service, which):
        said = [1]
        for number in range(length):
            asked = turn(which, number, said)
            completion = await service.complete(*asked)
            assert slots.is_right(completion, POLICY, *asked)
            said = completion.tokens.tolist()
            done[which, number] = said, completion.behaviour_logprobs.tolist(), completion.finish

    async def all_of_them():
        async with EngineService(replay, PolicySnapshot(3, POLICY)) as service:
            async with asyncio.TaskGroup() as readings:
                for which in range(6):
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
    executor = company()
    return executor, *rollout(executor)


def test_the_rollout_of_this_test_tries_something(whole):
    """Turns of one launch and of several, beside others, also where somebody waits."""
    executor, done, _, replay = whole
    assert len(done) == 24 and len(replay.turns) == 24
    pieces = [given.pieces for given in replay.turns.values()]
    assert {len(some) for some in pieces} >= {1, 2, 3, 4} and any(some[0] == 0 for some in pieces)
    assert {len(seeds) for _, seeds in of_turns(executor)} >= {1, 3, 4}


def test_wherever_it_is_stopped_it_ends_as_if_it_had_not_been(whole):
    executor, done, stats, _ = whole
    for stopped in range(1, len(of_turns(executor))):
        first = rollout(company(stopped))[2].turns
        again = company()
        found, counts, replay = rollout(again, first)
        assert found == done and counts == stats, stopped
        assert len(replay.turns) == 24
        assert replay.replayed == len(first)
        # Prefixes, and whole launches: only those with an unknown turn.
        assert again.launches == [
            (kind, who)
            for kind, who in executor.launches
            if kind == "read" or not set(who) <= set(first)
        ]


def test_it_can_be_stopped_again_and_again(whole):
    _, done, stats, _ = whole
    known, rounds, counts = {}, 0, None
    while counts is None:
        found, counts, replay = rollout(company(8), known)
        assert set(known) < set(replay.turns)
        known, rounds = replay.turns, rounds + 1
    assert found == done and counts == stats and rounds > 3


def test_turns_of_other_prompts_or_samplings_are_not_given(whole):
    _, done, _, replay = whole

    def asked(prompt, sampling):
        async def one():
            async with EngineService(again, PolicySnapshot(3, POLICY)) as service:
                await service.complete(prompt, sampling)

        again = Replay(company())
        again.begin(replay.turns)
        asyncio.run(one())
        return again.replayed

    prompt, sampling = turn(2, 0, [1])
    assert asked(prompt, sampling) == 1
    assert asked(Prompt(prompt.shared, tokens([2, 5])), sampling) == 0
    assert asked(Prompt(prompt.shared[1:], prompt.tail), sampling) == 0
    assert asked(prompt, SamplingParams(0.5, 1.0, 8, (STOP,), sampling.seed)) == 0
    assert asked(prompt, SamplingParams(1.0, 1.0, 8, (STOP,), sampling.seed + 1)) == 0
