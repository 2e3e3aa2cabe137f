"""Engines side by side: each in its thread, all settled together, whatever ends them.

What they say on devices of their own is compared in tests/parallel.
"""

import asyncio
import contextlib
import threading
import time

import pytest

from notepad_jax.engine.engines import Engines
from notepad_jax.engine.service import EngineService
from notepad_jax.parallel import mesh
from notepad_jax.types import CompleterFailed, Completers, Finish, PolicySnapshot, Streamer
from tests.engine.test_service import executor, is_right, prompt, sampling, snapshot
from tests.slots import Watched


def engines(*executors: Watched) -> Engines:
    """Each with a policy of its own already: a copy of one is compared elsewhere."""
    return Engines([EngineService(own, snapshot(0)) for own in executors], mesh.one())


def test_each_works_in_a_thread_of_its_own_and_all_results_come_in_order():
    async def completed(number, service):
        done = await service.complete(prompt(), sampling(seed=number))
        right = is_right(done, prompt(), sampling(seed=number))
        return threading.current_thread().name, right

    async def go():
        async with engines(executor(), executor(), executor()) as several:
            assert isinstance(several, Completers) and several.version == 0
            return await several.each(completed), several.take_stats()

    found, stats = asyncio.run(go())
    assert found == [("engine 0", True), ("engine 1", True), ("engine 2", True)]
    assert stats.turns == 3  # of all of them
    assert not any(thread.name.startswith("engine") for thread in threading.enumerate())


def test_one_does_not_wait_for_another():
    """The first can only end when the second, which begins later, has come a long way."""
    there = threading.Event()

    async def go(number, service):
        if number == 0:
            there.wait(30)  # as a launch does: nothing else of this thread runs
            return there.is_set()
        for seed in range(3):
            await service.complete(prompt(), sampling(seed=seed))
        there.set()

    async def both():
        async with engines(executor(), executor()) as several:
            return await several.each(go)

    assert asyncio.run(both()) == [True, None]


def test_a_failure_of_one_reaches_the_caller_when_the_others_have_ended():
    ended, begun = [], threading.Event()

    async def go(number, service):
        if number == 1:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(number)
        begun.wait(60)  # one that has not begun has nothing to end
        await service.complete(prompt(), sampling(seed=number))

    async def both():
        async with engines(executor({0}), executor()) as several:
            with pytest.raises(CompleterFailed, match="the device is on fire"):
                await several.each(go)
            return list(ended)

    assert asyncio.run(both()) == [1]


def test_who_is_cancelled_leaves_nothing_running():
    """Also one that takes its time to end, and one that had not begun."""
    begun, ended = [], []

    async def slow(number, service):
        begun.append(number)
        try:
            await asyncio.sleep(60)
        finally:
            time.sleep(0.05)
            ended.append(number)

    async def go():
        async with engines(executor(), executor()) as several:
            for least in (0, 2):
                begun.clear(), ended.clear()
                rolling = asyncio.ensure_future(several.each(slow))
                await asyncio.sleep(0)
                while len(begun) < least:
                    await asyncio.sleep(0.001)
                rolling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await rolling
                assert sorted(ended) == sorted(begun)
            done = await several.each(lambda n, s: s.complete(prompt(), sampling(seed=n)))
            return [is_right(one, prompt(), sampling(n)) for n, one in enumerate(done)]

    assert asyncio.run(go()) == [True, True] and len(ended) == 2


def test_a_version_that_one_has_is_adopted_by_none():
    async def go():
        async def ahead(number, service):
            if number == 0:
                await service.adopt(PolicySnapshot(1, {}))

        async def version(number, service):
            return service.version

        async with engines(executor(), executor()) as several:
            await several.each(ahead)
            with pytest.raises(ValueError, match="version 1 is resident"):
                await several.adopt(PolicySnapshot(1, {}))
            refused = await several.each(version)
            await several.adopt(PolicySnapshot(2, {}))
            return refused, await several.each(version)

    assert asyncio.run(go()) == ([1, 0], [2, 2])


# ---------------------------------------------------------------- seats


def test_a_seat_streams_what_it_completes_and_goes_to_who_has_fewest():
    async def streamed(seat, seed):
        async with contextlib.aclosing(seat.stream(prompt(), sampling(seed))) as pieces:
            return [piece async for piece in pieces]

    async def go():
        async with engines(executor(), executor()) as several:
            with several.seat() as first, several.seat() as second:
                assert isinstance(first, Streamer)
                both = await asyncio.gather(streamed(first, 1), streamed(second, 2))
                done = await first.complete(prompt(), sampling(1))
            return both, done, several.take_stats()

    (pieces, others), done, stats = asyncio.run(go())
    assert [i for piece in pieces for i in piece.tokens] == done.tokens.tolist()
    assert is_right(done, prompt(), sampling(1))
    assert len(others) > 2 and stats.turns == 3
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish is Finish.LENGTH


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_who_leaves_a_seat_in_the_middle_frees_slot_and_pages(pieces):
    async def go():
        service = EngineService(executor(), snapshot(0))
        several = Engines([service], mesh.one())
        async with several:
            with several.seat() as seat:
                async with contextlib.aclosing(seat.stream(prompt(), sampling(3))) as stream:
                    for _ in range(pieces):
                        await anext(stream)
            idle = await several.each(lambda n, s: _idle(s))
        return idle, service.scheduler

    async def _idle(service):
        return service.scheduler.idle

    idle, scheduler = asyncio.run(go())
    assert idle == [True]
    assert scheduler.pool.free + scheduler.prefixes.unused == scheduler.settings.pages


def test_a_failure_reaches_a_stream():
    async def go():
        async with engines(executor({2})) as several:
            with several.seat() as seat, pytest.raises(CompleterFailed, match="on fire"):
                async for _ in seat.stream(prompt(), sampling(1)):
                    pass

    asyncio.run(go())
