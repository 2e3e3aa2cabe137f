"""Futures, streams, versions and failures: the service over an executor made of arithmetic."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.engine.executor import Sampled
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import CompleterFailed, PolicySnapshot, Prompt, SamplingParams, tokens

SMALL = EngineSettings(
    slots=4, page_size=8, pages=40, max_prompt=96, max_new_tokens=12, steps_per_launch=2,
    row_tokens=256,
)  # fmt: skip


class Weights:
    """Params that tell which version they are, and can be watched being let go."""

    def __init__(self, version: int):
        self.version = version


class Arithmetic:
    """An executor: the n-th token of a completion is 10 + seed + n, its logprob -version.

    `fail_at` names the launch that raises, counted from 0.
    """

    def __init__(self, fail_at: int = -1, settings: EngineSettings = SMALL):
        self.settings, self.fail_at, self.launches, self.rests = settings, fail_at, 0, 0

    def rest(self):
        self.rests += 1

    def weights(self, params):
        return params

    def read(self, params, prefixes):
        self._launch()

    def start(self, params, contexts):
        self._launch()
        return [self._tokens(params, context, 1) for context in contexts]

    def decode(self, params, contexts):
        if contexts:
            self._launch()
        steps = self.settings.steps_per_launch
        return [self._tokens(params, c, min(steps, c.remaining)) for c in contexts]

    def _tokens(self, params, context, count):
        assert params.version == context.version
        new = [10 + context.sampling.seed + context.made + n for n in range(count)]
        return Sampled(new, [-float(params.version)] * count)

    def _launch(self):
        self.launches += 1
        if self.launches - 1 == self.fail_at:
            raise ZeroDivisionError("the device is on fire")


def prompt(which: int = 0) -> Prompt:
    return Prompt(tokens(range(which, which + 16)), tokens([5, 6, 7]))


def sampling(seed: int, length: int = 12) -> SamplingParams:
    return SamplingParams(1.0, 1.0, length, (2,), seed)


def snapshot(version: int) -> PolicySnapshot:
    return PolicySnapshot(version, Weights(version))


def go(coroutine):
    async def limited():
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


def is_right(completion, seed: int, length: int = 12) -> bool:
    exact = [10 + seed + n for n in range(length)]
    same = completion.behaviour_logprobs == -completion.policy_version
    return completion.tokens.tolist() == exact and bool(same.all())


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("fail_at", [0, 1, 2, 4], ids=["read", "start", "decode", "later"])
def test_a_failed_launch_reaches_everybody(fail_at):
    """Those who run, those who wait behind them, later calls and later adoptions."""

    async def run():
        async with EngineService(Arithmetic(fail_at), snapshot(0)) as service:
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
        executor = Arithmetic()
        async with EngineService(executor, snapshot(0)) as service:
            calls = [asyncio.ensure_future(service.complete(prompt(), sampling(0)))]
            while not service.scheduler.running:
                await asyncio.sleep(0)
            calls.append(asyncio.ensure_future(service.adopt(snapshot(1), drain=True)))
            calls.append(asyncio.ensure_future(service.complete(prompt(), sampling(1))))
            while len(service.scheduler.running) < 2:
                await asyncio.sleep(0)
            calls.append(asyncio.ensure_future(service.adopt(snapshot(2))))
            executor.fail_at = executor.launches + 1
            return await asyncio.gather(*calls, return_exceptions=True)

    for error in go(run()):
        assert isinstance(error, CompleterFailed) and "on fire" in str(error)


def test_leaving_before_anything_ran_resolves_what_is_open():
    """The loop's task is cancelled before its first step."""

    async def leave():
        async with EngineService(Arithmetic(), snapshot(0)) as service:
            early = asyncio.create_task(service.complete(prompt(0), sampling(0)))
        for waiting in (early, service.complete(prompt(0), sampling(0))):
            with pytest.raises(CompleterFailed, match="was left"):
                await waiting

    go(leave())


def test_leaving_resolves_what_is_open():
    async def run():
        service = EngineService(Arithmetic(), snapshot(0))
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
        go(EngineService(Arithmetic(), snapshot(0)).complete(prompt(), sampling(0)))


# ---------------------------------------------------------------- streams and cancellation


def test_a_stream_is_the_completion_in_pieces():
    async def run():
        async with EngineService(Arithmetic(), snapshot(4)) as service:
            others = [service.complete(prompt(i), sampling(i)) for i in range(6)]
            waiting = asyncio.gather(*others)
            pieces = [piece async for piece in service.stream(prompt(), sampling(50))]
            await waiting
            return pieces, await service.complete(prompt(), sampling(50))

    pieces, whole = go(run())
    assert len(pieces) > 3
    assert np.concatenate([p.tokens for p in pieces]).tolist() == whole.tokens.tolist()
    logprobs = np.concatenate([p.behaviour_logprobs for p in pieces])
    assert logprobs.tolist() == whole.behaviour_logprobs.tolist()
    assert [p.finish for p in pieces] == [None] * (len(pieces) - 1) + [whole.finish]
    assert {p.policy_version for p in pieces} == {4}


def test_a_stream_that_is_closed_and_a_call_that_is_cancelled_free_everything():
    async def run():
        async with EngineService(Arithmetic(), snapshot(0)) as service:
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
            assert is_right(await service.complete(prompt(), sampling(1)), 1)

    go(run())


# ---------------------------------------------------------------- versions


def test_new_turns_start_on_the_new_version_while_old_ones_end_on_theirs():
    async def run():
        async with EngineService(Arithmetic(), snapshot(0)) as service:
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
    assert is_right(new, 1, 2) and new.policy_version == 1
    assert is_right(newest, 5) and newest.policy_version == 2


def test_draining_waits_for_the_old_version_and_lets_its_arrays_go():
    async def run():
        old = snapshot(0)
        gone = weakref.ref(old.params)
        async with EngineService(Arithmetic(), old) as service:
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
        runner = Arithmetic()
        async with EngineService(runner, snapshot(0)) as service:
            open_one = asyncio.ensure_future(service.complete(prompt(), sampling(1)))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="let them end"):
                service.rest()
            assert is_right(await open_one, 1)
            read = service.take_stats().prefix_tokens
            await service.complete(prompt(), sampling(2))
            assert read and service.take_stats().prefix_tokens == 0  # it was there
            service.rest()
            assert service.scheduler.pool.free == runner.settings.pages and runner.rests == 1
            assert is_right(await service.complete(prompt(), sampling(3)), 3)
            assert service.take_stats().prefix_tokens == read

    go(scene())


def test_a_version_that_is_resident_is_not_adopted_again():
    async def run():
        async with EngineService(Arithmetic(), snapshot(3)) as service:
            with pytest.raises(ValueError, match="version 3 is resident"):
                await service.adopt(snapshot(3))

    go(run())


# ---------------------------------------------------------------- any course of events


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
                assert is_right(await service.complete(*ask), 10 * number + turn, length)
        return "read"

    async def run():
        executor = Arithmetic(int(rng.integers(0, 25)) if fail else -1)
        async with EngineService(executor, snapshot(0)) as service:
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
            assert not failed or executor.launches > executor.fail_at >= 0
            if not failed:
                scheduler = service.scheduler
                assert scheduler.idle and scheduler.version == 3
                assert scheduler.pool.free + scheduler.prefixes.unused == SMALL.pages

    go(run())
