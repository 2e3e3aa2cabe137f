"""What an executor tells of its launches adds up to the service's counts, and changes nothing."""

import asyncio

from notepad_jax.engine.metered import Metered
from notepad_jax.engine.service import EngineService
from notepad_jax.types import PolicySnapshot
from tests.engine import test_replay
from tests.engine.test_replay import POLICY, company


def test_what_is_told_adds_up_and_changes_nothing():
    told = []
    plain, watched = company(), company()
    done, stats, _ = test_replay.rollout(plain)
    found, counted, replay = test_replay.rollout(Metered(watched, lambda *work: told.append(work)))
    assert found == done and counted == stats
    assert watched.launches == plain.launches
    tokens, turns, seconds = map(sum, zip(*told, strict=True))
    assert turns == stats.turns == len(replay.turns) == 24
    assert tokens == stats.prefix_tokens + stats.tail_tokens + stats.decode_tokens
    assert seconds > 0 and len(told) <= len(plain.launches)  # at most once a launch


def test_what_was_read_is_told_with_the_launch_that_was_waited_for():
    told = []
    metered = Metered(company(), lambda *work: told.append(work[:2]))

    async def one():
        async with EngineService(metered, PolicySnapshot(3, POLICY)) as service:
            return await service.complete(*test_replay.turn(1, 0, [1, 2, 3]))

    completion = asyncio.run(one())
    length = len(completion.tokens)
    # 16 of the prefix, 4 of the tail and the first token; then two tokens a launch.
    assert told[0] == (16 + 4 + 1, int(length == 1))
    assert sum(tokens for tokens, _ in told) == 16 + 4 + length
    assert [turns for _, turns in told] == [0] * (len(told) - 1) + [1]
