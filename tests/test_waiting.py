"""Coroutines are waited for with and without a running loop, and can be interrupted."""

import asyncio
import contextvars
import gc
import os
import signal
import threading
from concurrent.futures import CancelledError

import pytest

from notepad_jax import waiting
from notepad_jax.setup.stopping import Stopped


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def fails() -> None:
    raise ValueError("nothing to wait for")


def inside_a_loop(function):
    """What a notebook's cell does: called while the thread's loop runs."""

    async def cell():
        return function()

    return asyncio.run(cell())


async def endless(put_away):
    """Ctrl-C comes while it waits."""
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        put_away.append(True)
        raise


@pytest.fixture
def default_handler():
    """Ctrl-C raises, as Python begins, whatever another test's file has left behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("call", [lambda f: f(), inside_a_loop], ids=["plain", "in a loop"])
def test_results_and_failures_come_back(call):
    assert call(lambda: waiting.run(doubled(4))) == 8
    with pytest.raises(ValueError, match="nothing to wait for"):
        call(lambda: waiting.run(fails()))


def test_what_the_caller_holds_is_held_in_the_thread():
    held = contextvars.ContextVar("held", default="nothing")

    async def seen() -> tuple[str, str]:
        return held.get(), threading.current_thread().name

    def cell():
        held.set("a folder")
        return waiting.run(seen())

    assert inside_a_loop(cell) == ("a folder", "notepad_jax loop")


@pytest.mark.parametrize("call", [lambda f: f(), inside_a_loop], ids=["plain", "in a loop"])
def test_ctrl_c_cancels_and_waits_until_things_are_put_away(call):
    put_away = []

    def cell():
        # As ipykernel does it for every cell; asyncio.run's own handler would ask for a second.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                waiting.run(endless(put_away))
        finally:
            signal.signal(signal.SIGINT, before)

    call(cell)
    assert put_away


def test_ctrl_c_ends_what_a_coroutine_waits_for(default_handler):
    """The handler of `asyncio.run` cancels a task and raises nothing: that task waits here."""
    put_away = []
    with pytest.raises(KeyboardInterrupt):
        inside_a_loop(lambda: waiting.run(endless(put_away)))
    assert put_away


def test_a_run_that_stops_itself_is_a_stop_here_and_the_loop_goes_on():
    async def stops():
        raise Stopped(signal.SIGINT, "in a step")

    with waiting.Loop() as loop:
        with pytest.raises(Stopped, match="in a step"):
            loop.run(stops())
        assert loop.run(doubled(3)) == 6
        assert loop.begun(doubled(5)).result(10) == 10
    loop.close()  # once more does nothing


def test_a_loop_does_not_wait_for_itself():
    async def answer():
        return 1

    with waiting.Loop() as loop:

        async def asks():
            return loop.run(answer())

        future = loop.begun(asks())
        with pytest.raises(RuntimeError, match="cannot wait for the same reader"):
            future.result(timeout=60)
        assert loop.run(answer()) == 1


def test_what_runs_when_a_loop_closes_is_cancelled():
    ended = []

    async def endless():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with waiting.Loop() as loop:
        loop.begun(endless())
        loop.run(doubled(1))
    assert ended


def test_whoever_gives_work_to_a_loop_that_closes_is_told():
    """Before it ends, while it ends, after it: a result, a cancellation, or that it is closed."""
    told = []

    def run(loop: waiting.Loop) -> int:
        return loop.run(doubled(4))

    def begin(loop: waiting.Loop) -> int:
        return loop.begun(doubled(4)).result(20)

    def give(loop: waiting.Loop, begun: threading.Barrier, way) -> None:
        begun.wait()
        try:
            while True:
                assert way(loop) == 8
        except (asyncio.CancelledError, CancelledError, RuntimeError) as problem:
            told.append(type(problem).__name__)

    async def slow() -> None:
        await asyncio.sleep(0.001)

    for _ in range(60):
        begun = threading.Barrier(4)
        with waiting.Loop() as loop:
            givers = [
                threading.Thread(target=give, args=(loop, begun, way), daemon=True)
                for way in (run, begin, run)
            ]
            for giver in givers:
                giver.start()
            begun.wait()
            loop.close(slow())
        for giver in givers:
            giver.join(20)
            assert not giver.is_alive()
    assert len(told) == 180 and set(told) <= {"CancelledError", "RuntimeError"}


def test_a_future_of_work_can_be_cancelled_and_tells_what_came_of_it():
    put_away = threading.Event()

    async def endless():
        try:
            await asyncio.sleep(60)
        finally:
            put_away.set()

    with waiting.Loop() as loop:
        future = loop.begun(endless())
        assert loop.run(doubled(2)) == 4 and not future.done()
        assert future.cancel() and put_away.wait(20)
        with pytest.raises(ValueError, match="nothing to wait for"):
            loop.begun(fails()).result(20)


@pytest.mark.slow
def test_a_failure_whose_caller_left_says_nothing(caplog):
    """Of two engines that fail together, the first is raised; the other was waited for, too."""

    async def fails_when_cancelled():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("on the way out") from None

    async def scene(loop):
        call = asyncio.ensure_future(loop.awaited(fails_when_cancelled()))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    gc.collect()
    caplog.clear()  # of what tests before this one left
    with waiting.Loop() as loop:
        asyncio.run(scene(loop))
    gc.collect()
    assert not caplog.records


def test_where_one_of_several_fails_the_others_have_ended():
    ended = []

    async def rests(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # what is put away may take a while
            ended.append(number)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(waiting.all_of([rests(0), fails(), rests(1)]))
    assert sorted(ended) == [0, 1]
