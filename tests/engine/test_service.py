"""Futures, streams, versions and failures: the service over an executor whose keys are hashes."""

import asyncio
import gc
import weakref
from collections.abc import Container

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import CompleterFailed, PolicySnapshot, Prompt, SamplingParams, tokens
from tests import slots

SMALL = EngineSettings(
    slots=4, page_size=8, pages=40, max_prompt=96, max_new_tokens=12, steps_per_launch=2,
    row_tokens=256,
)  # fmt: skip


SAYS = tuple(range(10, 20))  # no stop id: every turn has the length that it asks for


def executor(fails: Container[int] = ()) -> slots.Watched:
    """An executor whose keys are hashes; the launches `fails`, counted from 0, raise."""

    def before(number: int) -> None:
        if number in fails:
            raise ZeroDivisionError("the device is on fire")

    return slots.Watched(slots.executor(SMALL), before)


def prompt(which: int = 0) -> Prompt:
    return Prompt(tokens(range(which, which + 16)), tokens([5, 6, 7]))


def sampling(seed: int, length: int = 12) -> SamplingParams:
    return SamplingParams(1.0, 1.0, length, (2,), seed)


def snapshot(version: int) -> PolicySnapshot:
    return slots.snapshot(version, SAYS)


def go(coroutine):
    async def limited():
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


def is_right(completion, *asked) -> bool:
    """Whether it is what its version says of the prompt."""
    return slots.is_right(completion, snapshot(completion.policy_version).params, *asked)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("fail_at", [0, 1, 2, 4], ids=["read", "start", "decode", "later"])
def test_a_failed_launch_reaches_everybody(fail_at):
    """Those who run, those who wait behind them, later calls and later adoptions."""

    async def run():
        async with EngineService(executor({fail_at}), snapshot(0)) as service:
            waiters = [
                asyncio.ensure_future(service.complete(prompt(i), sampling(i))) for i in range(9)
            ]
            told = await asyncio.gather(*waiters, return_exceptions=True)
            for later in (service.complete(prompt(), sampling(0)), service.adopt(snapshot(2))):
                with pytest.raises(CompleterFailed) as failed:
                    await later
                told.append(failed.value)
            with pytest.raises(CompleterFailed, match="on fire"):
                await anext(service.stream(prompt(), sampling(0)))
            return told

    for error in go(run()):
        assert isinstance(error, CompleterFailed) and "on fire" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_failed_launch_reaches_adoptions_that_wait():
    """One that waits for the oldest version to end, and one that waits to be alone."""

    async def run():
        runner = executor(fails := [])
        async with EngineService(runner, snapshot(0)) as service:
            calls = [asyncio.ensure_future(service.complete(prompt(), sampling(0)))]
            while not service.scheduler.running:
                await asyncio.sleep(0)
            calls.append(asyncio.ensure_future(service.adopt(snapshot(1), drain=True)))
            calls.append(asyncio.ensure_future(service.complete(prompt(), sampling(1))))
            while len(service.scheduler.running) < 2:
                await asyncio.sleep(0)
            calls.append(asyncio.ensure_future(service.adopt(snapshot(2))))
            fails.append(len(runner.launches) + 1)
            return await asyncio.gather(*calls, return_exceptions=True)

    for error in go(run()):
        assert isinstance(error, CompleterFailed) and "on fire" in str(error)


def test_an_adoption_whose_weights_do_not_fit_ends_and_does_not_wait_for_ever(monkeypatch):
    async def run():
        async with EngineService(executor(), snapshot(0)) as service:

            def full(snapshot):
                raise MemoryError("RESOURCE_EXHAUSTED")

            monkeypatch.setattr(service, "_weights", full)
            return await asyncio.gather(service.adopt(snapshot(1)), return_exceptions=True)

    (error,) = go(run())
    assert isinstance(error, CompleterFailed) and "RESOURCE_EXHAUSTED" in str(error)


def test_leaving_before_anything_ran_resolves_what_is_open():
    """The loop's task is cancelled before its first step."""

    async def leave():
        async with EngineService(executor(), snapshot(0)) as service:
            early = asyncio.create_task(service.complete(prompt(0), sampling(0)))
        for waiting in (early, service.complete(prompt(0), sampling(0))):
            with pytest.raises(CompleterFailed, match="was left"):
                await waiting

    go(leave())


def test_leaving_resolves_what_is_open():
    async def run():
        service = EngineService(executor(), snapshot(0))
        async with service:
            open_ones = [
                asyncio.ensure_future(service.complete(prompt(i), sampling(i))) for i in range(9)
            ]
            stream = service.stream(prompt(), sampling(3))
            await anext(stream)
            open_ones.append(asyncio.ensure_future(anext(stream)))
            open_ones.append(asyncio.ensure_future(service.adopt(snapshot(1), drain=True)))
            await asyncio.sleep(0)
        told = await asyncio.gather(*open_ones, return_exceptions=True)
        with pytest.raises(CompleterFailed, match="was left"):
            await service.complete(prompt(), sampling(0))
        return told

    told = go(run())
    assert all(isinstance(e, CompleterFailed) and "was left" in str(e) for e in told)


def test_nobody_completes_before_the_service_runs():
    with pytest.raises(RuntimeError, match="async with"):
        go(EngineService(executor(), snapshot(0)).complete(prompt(), sampling(0)))


# ---------------------------------------------------------------- streams and cancellation


def test_a_stream_is_the_completion_in_pieces():
    async def run():
        async with EngineService(executor(), snapshot(4)) as service:
            others = [service.complete(prompt(i), sampling(i)) for i in range(6)]
            waiting = asyncio.gather(*others)
            pieces = [piece async for piece in service.stream(prompt(), sampling(50))]
            await waiting
            return pieces, await service.complete(prompt(), sampling(50))

    pieces, whole = go(run())
    assert len(pieces) > 3
    asked = prompt(), sampling(50)
    for completion in (slots.together(pieces, {4: snapshot(4).params}, *asked), whole):
        assert is_right(completion, *asked) and completion.policy_version == 4
    assert [p.finish for p in pieces] == [None] * (len(pieces) - 1) + [whole.finish]


@pytest.mark.parametrize("seed", range(4))
def test_who_listens_has_the_place_in_the_queue_of_who_waits(seed):
    """They asked for their next turns in the order of the first pieces, not in that of ends."""

    async def run(streams):
        runner = executor()

        async def reader(service, number):
            rng = np.random.default_rng(100 * seed + number)
            for turn in range(4):
                ask = prompt(number), sampling(10 * number + turn, int(rng.integers(1, 13)))
                if streams:
                    async for _ in service.stream(*ask):
                        pass
                else:
                    await service.complete(*ask)

        async with EngineService(runner, snapshot(0)) as service:
            await asyncio.gather(*[reader(service, number) for number in range(7)])
        return runner.launches

    assert go(run(True)) == go(run(False))


def test_a_stream_that_is_closed_and_a_call_that_is_cancelled_free_everything():
    async def run():
        async with EngineService(executor(), snapshot(0)) as service:
            calls = [
                asyncio.ensure_future(service.complete(prompt(i), sampling(i))) for i in range(6)
            ]
            stream = service.stream(prompt(), sampling(0))
            for call in calls:  # four run, two wait
                await asyncio.sleep(0)
                call.cancel()
            await anext(stream)
            await stream.aclose()
            await asyncio.gather(*calls, return_exceptions=True)
            scheduler = service.scheduler
            assert scheduler.idle
            assert scheduler.pool.free + scheduler.prefixes.unused == SMALL.pages
            assert is_right(await service.complete(prompt(), sampling(1)), prompt(), sampling(1))

    go(run())


# ---------------------------------------------------------------- versions


def test_new_turns_start_on_the_new_version_while_old_ones_end_on_theirs():
    async def run():
        async with EngineService(executor(), snapshot(0)) as service:
            stream = service.stream(prompt(), sampling(0))
            pieces = [await anext(stream)]
            await service.adopt(snapshot(1))  # at once: nobody waits for the stream
            assert service.scheduler.resident == {0, 1}
            new = await service.complete(prompt(), sampling(1, length=2))
            assert service.scheduler.resident == {0, 1}
            third = asyncio.ensure_future(service.adopt(snapshot(2)))
            await asyncio.sleep(0)
            assert not third.done()  # two are resident
            pieces += [piece async for piece in stream]
            await third
            return pieces, new, await service.complete(prompt(), sampling(5))

    pieces, new, newest = go(run())
    assert {p.policy_version for p in pieces} == {0} and sum(len(p.tokens) for p in pieces) == 12
    assert is_right(new, prompt(), sampling(1, 2)) and new.policy_version == 1
    assert is_right(newest, prompt(), sampling(5)) and newest.policy_version == 2


def test_draining_waits_for_the_old_version_and_lets_its_arrays_go():
    async def run():
        old = snapshot(0)
        gone = weakref.ref(old.params)
        async with EngineService(executor(), old) as service:
            del old
            call = asyncio.ensure_future(service.complete(prompt(), sampling(0)))
            while not service.scheduler.running:
                await asyncio.sleep(0)
            await service.adopt(snapshot(1))
            assert gone() is not None
            await service.adopt(snapshot(2), drain=True)
            gc.collect()
            assert gone() is None and service.scheduler.resident == {2}
            assert (await call).policy_version == 0

    go(run())


def test_an_engine_rests_when_nobody_is_served_and_then_reads_prefixes_again():
    async def scene():
        runner = executor()
        async with EngineService(runner, snapshot(0)) as service:
            open_one = asyncio.ensure_future(service.complete(prompt(), sampling(1)))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="let them end"):
                service.rest()
            assert is_right(await open_one, prompt(), sampling(1))
            read = service.take_stats().prefix_tokens
            await service.complete(prompt(), sampling(2))
            assert read and service.take_stats().prefix_tokens == 0  # it was there
            service.rest()
            assert service.scheduler.pool.free == runner.settings.pages and runner.rests == 1
            assert is_right(await service.complete(prompt(), sampling(3)), prompt(), sampling(3))
            assert service.take_stats().prefix_tokens == read

    go(scene())


def test_a_version_that_is_resident_is_not_adopted_again():
    async def run():
        async with EngineService(executor(), snapshot(3)) as service:
            with pytest.raises(ValueError, match="version 3 is resident"):
                await service.adopt(snapshot(3))

    go(run())


@pytest.mark.parametrize("then", [3, 4])
def test_an_engine_that_gives_its_weights_back_adopts_its_own_version_or_another(then):
    async def run():
        first = snapshot(3)
        gone = weakref.ref(first.params)
        async with EngineService(executor(), first) as service:
            del first
            assert is_right(await service.complete(prompt(), sampling(1)), prompt(), sampling(1))
            service.rest()
            assert gone() is not None
            service.rest(weights=True)
            gc.collect()
            assert gone() is None
            with pytest.raises(RuntimeError, match="gave its weights back; let it adopt"):
                await service.complete(prompt(), sampling(2))
            await service.adopt(snapshot(then), drain=True)
            after = await service.complete(prompt(), sampling(2))
            assert is_right(after, prompt(), sampling(2)) and after.policy_version == then

    go(run())


# ---------------------------------------------------------------- any course of events


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), fail=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_call_is_settled_exactly_once(seed, fail):
    """Readings, streams, cancellations, adoptions, and in every other course a failing launch."""
    rng = np.random.default_rng(seed)

    async def reader(service, number):
        for turn in range(rng.integers(1, 4)):
            length = int(rng.integers(1, 13))
            ask = prompt(int(rng.integers(0, 3))), sampling(10 * number + turn, length)
            if rng.random() < 0.3:
                pieces = [piece async for piece in service.stream(*ask)]
                assert sum(len(piece.tokens) for piece in pieces) == length
                assert len({piece.policy_version for piece in pieces}) == 1
            else:
                assert is_right(await service.complete(*ask), *ask)
        return "read"

    async def run():
        fails = {int(rng.integers(0, 25))} if fail else set()
        runner = executor(fails)
        async with EngineService(runner, snapshot(0)) as service:
            tasks = [asyncio.ensure_future(reader(service, n)) for n in range(10)]
            for version in range(1, 4):
                for _ in range(rng.integers(0, 12)):
                    await asyncio.sleep(0)
                tasks[rng.integers(0, 10)].cancel()
                adopt = service.adopt(snapshot(version), drain=bool(rng.random() < 0.5))
                tasks.append(asyncio.ensure_future(adopt))
            told = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [one for one in told if isinstance(one, CompleterFailed)]
            others = [one for one in told if not isinstance(one, CompleterFailed)]
            assert all(one in ("read", None) or isinstance(one, asyncio.CancelledError)
                       for one in others)  # fmt: skip
            assert not failed or fails == {len(runner.launches)}
            if not failed:
                scheduler = service.scheduler
                assert scheduler.idle and scheduler.version == 3
                assert scheduler.pool.free + scheduler.prefixes.unused == SMALL.pages

    go(run())
