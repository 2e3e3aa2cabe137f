"""Ctrl-C and SIGTERM: a run that was stopped anywhere goes on to the same bits."""

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from notepad_jax import cli, waiting
from notepad_jax.checkpoint.steps import steps_in
from notepad_jax.engine import journal
from notepad_jax.engine.replay import Given, Replay
from notepad_jax.reading.trace import TraceFile
from notepad_jax.rollout import archive
from notepad_jax.setup import builders, learner, stopping
from notepad_jax.setup.stopping import Stop, Stopped
from notepad_jax.telemetry.metrics import TIMINGS, read_metrics
from notepad_jax.training import partial_rollout
from tests.runs import ROOT, SMALL, run
from tests.support import same_run

TWO = "--config.steps=2"


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """A process begun in the background inherits that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def at_launch(monkeypatch):
    """Has a signal come after the n-th launch in the rollout of a step, made or replayed."""
    coming, launched = [], Replay._launched

    def counted(self, launch, params, contexts):
        sampled = launched(self, launch, params, contexts)
        for one in coming:
            one["left"] -= any(context.version == one["step"] - 1 for context in contexts)
            if one["left"] == 0:
                coming.remove(one)
                signal.raise_signal(one["number"])
        return sampled

    monkeypatch.setattr(Replay, "_launched", counted)
    return lambda step, nth, number=signal.SIGINT: coming.append(
        {"step": step, "left": nth, "number": number}
    )


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    """A run of two steps that nobody stops."""
    folder = tmp_path_factory.mktemp("brief") / "run"
    run(folder, TWO)
    return folder


def kept(folder: Path) -> int:
    """Turns in the file."""
    return len(journal.read(folder / partial_rollout.FILE)[1])


def saved_in(folder: Path) -> list[str]:
    """Steps in the run's checkpoints."""
    return [str(step) for step in steps_in(folder / "checkpoints")]


@pytest.mark.slow
def test_a_run_stopped_several_times_is_the_run_that_was_not(
    uninterrupted, tmp_path, at_launch, capsys
):
    """In the first rollout, and twice in the third, the second time farther on."""
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (uninterrupted / TIMINGS).open()]
    assert not any(line["replayed_turns"] for line in lines)
    at_launch(1, 5)
    with pytest.raises(Stopped, match="in the rollout of step 1, of which .* turns are kept"):
        run(folder)
    first = kept(folder)
    assert first > 0
    at_launch(3, 4, signal.SIGTERM)
    with pytest.raises(Stopped, match="stopped in the rollout of step 3") as stopped:
        run(folder, resume=True)
    assert stopped.value.exit_code == 143
    at_launch(3, 8)
    with pytest.raises(Stopped, match="in the rollout of step 3") as stopped:
        run(folder, resume=True)
    assert stopped.value.exit_code == 130
    assert read_metrics(folder, TIMINGS)[0]["replayed_turns"] == first
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
    run(folder, resume=True)
    assert same_run.differences(uninterrupted, folder) == []
    assert not (folder / partial_rollout.FILE).exists()
    assert f"step 1 goes on with the {first} turns" in capsys.readouterr().err


@pytest.mark.slow
def test_several_rounds_and_groups_that_wait_are_gone_on_with(tmp_path, at_launch):
    """Few slots, small launches, a save every second step; answers are notes, in contexts."""
    asked = "<|question|>{question}<|memory|>{memory}<|write|>"
    (template := tmp_path / "noted.txt").write_text(
        f"[update]\n{{chunk}}{asked}\n[answer]\n{asked}\n[no_memory]\nnothing\n[keep]\n"
    )
    contexts = f"template={template} max_answer=2 answer_chunks=4 carry=1".split()
    words = (
        *[f"--config.reading.{word}" for word in contexts],
        "--config.tasks.reward=sub_em",
        "--config.data.two_hop=0.0",  # of which every answer takes several contexts
        "--config.steps=3",
        "--config.rollout.documents=4",
        "--config.rollout.max_rounds=3",
        "--config.rollout.max_staleness=1",
        "--config.checkpoint.handoff=memory",
        "--config.checkpoint.every=2",
    )
    lines = run(tmp_path / "whole", *words)
    assert any(line["groups/rounds"] > 1 for line in lines)
    assert all(line["rollout/answer_turns"] > 2 for line in lines)
    with TraceFile(tmp_path / "whole" / archive.FILE) as trajectories:
        read = [reading for _, reading in trajectories.readings()]
    waited = {reading["step"] for reading in read if reading["staleness"]}
    assert waited and len(waited) < len(lines)
    # What the policy of the step before wrote, the trainer's own policy gives other logprobs.
    for line in lines:
        assert (line["logprob_gap_max"] < 1e-4) == (line["step"] not in waited)
    at_launch(2, 9)
    with pytest.raises(Stopped, match="rollout of step 2"):
        run(tmp_path / "run", *words)
    assert saved_in(tmp_path / "run") == ["0", "1"]  # the second was not due
    turns = kept(tmp_path / "run")
    run(tmp_path / "run", *words, resume=True)
    assert read_metrics(tmp_path / "run", TIMINGS)[1]["replayed_turns"] == turns > 0
    assert same_run.differences(tmp_path / "whole", tmp_path / "run") == []
    assert not (tmp_path / "run" / partial_rollout.FILE).exists()


@pytest.mark.slow
def test_a_signal_in_the_update_lets_the_step_end(brief, tmp_path, monkeypatch):
    """Should the process not be given the time, the rollout is on disk."""
    folder, learn, found = tmp_path / "run", learner.learn, []

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        found.append(kept(folder))
        shutil.copytree(folder, tmp_path / "killed")
        return learn(*arguments)

    monkeypatch.setattr(learner, "learn", interrupted)
    with pytest.raises(Stopped, match="stopped after step 1"):
        run(folder, TWO)
    assert found and not (folder / partial_rollout.FILE).exists()
    monkeypatch.setattr(learner, "learn", learn)
    run(tmp_path / "killed", TWO, resume=True)
    assert read_metrics(tmp_path / "killed", TIMINGS)[0]["replayed_turns"] == found[0]
    assert same_run.differences(brief, tmp_path / "killed") == []


@pytest.mark.slow
def test_what_was_learnt_since_the_last_checkpoint_is_saved_before_a_run_stops(
    tmp_path, monkeypatch
):
    folder, learn = tmp_path / "run", learner.learn

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return learn(*arguments)

    monkeypatch.setattr(learner, "learn", interrupted)
    with pytest.raises(Stopped, match="stopped after step 1"):
        run(folder, "--config.checkpoint.handoff=memory", "--config.checkpoint.every=9")
    assert saved_in(folder) == ["0", "1"] and not (folder / partial_rollout.FILE).exists()


# ---------------------------------------------------------------- what fits, and what does not


SETTINGS = {"steps": 4, "seed": 0, "rollout": {"temperature": 1.0, "stops": ["a"]}}
TURNS = {7: Given("asked", np.array([1, 2], np.int32), np.zeros(2, np.float32), (1, 1))}


class Nothing:
    """An executor that is never asked."""

    settings = None


def kept_in(folder, header=(), settings=SETTINGS):
    """What a process that was stopped in step 3 left."""
    mine = partial_rollout.UnderWay(folder, settings, Stop(), pytest.fail)
    mine.around(Nothing())
    mine.stop.number = signal.SIGTERM
    step = {"step": 3, "version": 2, "draw": 8} | dict(header)

    async def rollout():
        mine.replays.each[0].turns = TURNS

    with pytest.raises(Stopped, match=f"in the rollout of step {step['step']}, of which 1 turns"):
        asyncio.run(mine.rolled(*step.values(), rollout()))
    return folder / partial_rollout.FILE


def gone_on(folder, settings=SETTINGS, step=3):
    """What a process that goes on there knows at the beginning of `step`, and says."""
    said: list[str] = []
    mine = partial_rollout.UnderWay(folder, settings, Stop(), said.append)
    mine.around(Nothing())
    mine.take_up(step - 1)

    async def rollout():
        return len(mine.replays.turns)

    known = asyncio.run(mine.rolled(step, step - 1, 8, rollout()))
    mine.done(step - 1)
    there = (folder / partial_rollout.FILE).exists()
    mine.done(step)
    return known, said, there, (folder / partial_rollout.FILE).exists()


def test_turns_wait_for_their_step_and_leave_with_it(tmp_path):
    kept_in(tmp_path)
    assert gone_on(tmp_path, step=2) == (0, [], True, True)
    more = SETTINGS | {"steps": 9, "policy": "a/copy"}
    said = ["step 3 goes on with the 1 turns that had ended"]
    assert gone_on(tmp_path, more) == (1, said, True, False)
    assert gone_on(tmp_path) == (0, [], False, False)
    kept_in(tmp_path)
    assert gone_on(tmp_path, step=4) == (0, [], False, False)  # of a step that was saved after all


@pytest.mark.parametrize(
    ("header", "now", "cut", "says"),
    [
        ({}, {}, 9, "under_way.jsonl is cut off, or has other bytes than were saved; its rollout"),
        ({}, {"seed": 1}, 0, "was kept with seed = 0, and now it is 1; its rollout is made anew"),
        ({}, {"more": 1}, 0, "was kept with more = None, and now it is 1; its rollout is made"),
        ({"draw": 7}, {}, 0, "begins with draw 7, and this step with 8; its rollout is made anew"),
        ({"version": 1}, {}, 0, "begins with version 1, and this step with 2; its rollout is"),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(tmp_path, header, now, cut, says):
    path = kept_in(tmp_path, header)
    path.write_bytes(path.read_bytes()[cut:])
    known, (said,), _, there = gone_on(tmp_path, SETTINGS | now)
    assert says in said and "\n" not in said
    assert known == 0 and not there


def test_what_was_kept_of_a_step_that_is_saved_leaves_at_once(tmp_path):
    """Of the last step nothing follows that would remove it."""
    path = kept_in(tmp_path)
    for saved, there in ((2, True), (3, False)):
        partial_rollout.UnderWay(tmp_path, SETTINGS, Stop(), pytest.fail).take_up(saved)
        assert path.exists() == there


@pytest.mark.slow
def test_a_damaged_file_makes_the_rollout_anew(brief, tmp_path, at_launch, capsys):
    folder = tmp_path / "run"
    at_launch(1, 5)
    with pytest.raises(Stopped):
        run(folder, TWO)
    path = folder / partial_rollout.FILE
    path.write_bytes(path.read_bytes()[9:])
    run(folder, TWO, resume=True)
    (said,) = capsys.readouterr().err.splitlines()
    assert "under_way.jsonl is cut off" in said
    assert same_run.differences(brief, folder) == []


def test_engines_side_by_side_keep_their_turns_together(tmp_path):
    """All know what either had; fewer engines have other launches, and begin anew."""
    said: list[str] = []

    def began(count: int) -> partial_rollout.UnderWay:
        mine = partial_rollout.UnderWay(tmp_path, SETTINGS, Stop(), said.append)
        for _ in range(count):
            mine.around(Nothing())
        mine.take_up(2)
        return mine

    async def rollout(mine, *seeds):
        for one, seed in zip(mine.replays.each, seeds, strict=False):
            one.turns[seed] = TURNS[7]
        return [len(one.turns) for one in mine.replays.each]

    mine = began(2)
    mine.stop.number = signal.SIGTERM
    with pytest.raises(Stopped, match="of which 2 turns are kept"):
        asyncio.run(mine.rolled(3, 2, 8, rollout(mine, 7, 9)))
    mine = began(2)
    assert asyncio.run(mine.rolled(3, 2, 8, rollout(mine))) == [2, 2]
    assert set(mine.replays.turns) == {7, 9}
    mine = began(1)
    assert asyncio.run(mine.rolled(3, 2, 8, rollout(mine))) == [0]
    assert "begins with engines 2, and this step with 1; its rollout is made anew" in said[-1]


def test_what_has_ended_is_kept_when_another_process_is_gone(tmp_path):
    """From a thread, in the middle of a rollout: the main one may wait for who is gone."""
    mine = partial_rollout.UnderWay(tmp_path, SETTINGS, Stop(), pytest.fail)
    mine.around(Nothing())
    mine.keep()  # of no step
    assert list(tmp_path.iterdir()) == []

    async def rollout():
        mine.replays.each[0].turns = TURNS
        await asyncio.to_thread(mine.keep)

    asyncio.run(mine.rolled(3, 2, 8, rollout()))
    said = ["step 3 goes on with the 1 turns that had ended"]
    assert gone_on(tmp_path) == (1, said, True, False)
    mine.done(3)
    mine.keep()
    assert list(tmp_path.iterdir()) == []


def test_a_rollout_that_fails_is_not_kept(tmp_path):
    mine = partial_rollout.UnderWay(tmp_path, SETTINGS, Stop(), pytest.fail)
    mine.around(Nothing())

    async def fails():
        mine.stop.number = signal.SIGINT
        mine.stop.noticed.set()
        raise ValueError("more readings failed than may")

    with pytest.raises(ValueError, match="more readings failed"):
        asyncio.run(mine.rolled(3, 2, 8, fails()))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_without_patience_a_signal_ends_the_block_at_once(number):
    with pytest.raises(Stopped) as stopped, Stop().watching():
        signal.raise_signal(number)
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped", 128 + number)


def test_with_patience_the_second_does():
    stop, seen = Stop(), []

    async def patient():
        stop.keep = lambda: seen.append("kept")
        with stop.patiently():
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stop.noticed.wait(), 20)
            seen.append("noticed")
            signal.raise_signal(signal.SIGINT)
            seen.append("never")

    with pytest.raises(Stopped) as stopped, stop.watching():
        asyncio.run(patient())
    assert seen == ["kept", "noticed"] and stopped.value.exit_code == 130
    with pytest.raises(Stopped, match="stopped after step 3"):
        stop.check("after step 3")


def test_other_commands_are_ended_by_both_alike(tmp_path, monkeypatch, capsys):
    """In the middle of something asynchronous, as a measurement is."""
    monkeypatch.chdir(tmp_path)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):

        async def measuring(number=number):
            signal.raise_signal(number)
            await asyncio.sleep(20)

        monkeypatch.setattr(
            "notepad_jax.programs.subjects.named",
            lambda *_, measuring=measuring: waiting.run(measuring()),
        )
        words = ["eval", "--json", "--name", "x", "--policy", str(ROOT / "data" / "starter")]
        assert cli.main(words) == code
        assert capsys.readouterr().err == "notepad-jax: stopped\n"
        assert list(tmp_path.iterdir()) == []


class Dying:
    """Something that Python takes away while a signal comes."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def collected() -> None:
    """A collection in which a signal comes: in a callback as jax has one, and in a `__del__`."""
    one = Dying()
    one.itself = one
    del one
    gc.collect()


def at_a_collection() -> None:
    def comes(phase: str, _: dict) -> None:
        if phase == "start":
            gc.callbacks.remove(comes)
            signal.raise_signal(signal.SIGTERM)

    gc.callbacks.append(comes)
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("when", [collected, at_a_collection])
def test_a_signal_within_a_garbage_collection_is_not_lost(when):
    """Python swallows what is raised there, so nothing is."""

    async def measures():
        when()
        await asyncio.sleep(60)

    def loads():
        when()
        waiting.look()

    for work in (lambda: waiting.run(measures()), loads):
        with pytest.raises(Stopped) as stopped, stopping.told_apart():
            work()
            pytest.fail("the run went on")
        assert stopped.value.exit_code == 143


@pytest.mark.slow
def test_a_run_that_is_stopped_within_a_collection_is_the_run_that_was_not(
    brief, tmp_path, monkeypatch
):
    """While it is made ready, and in a rollout."""
    folder, load = tmp_path / "run", builders.load_policy
    monkeypatch.setattr(builders, "load_policy", lambda *a: [load(*a), at_a_collection()][0])
    with pytest.raises(Stopped, match="^stopped$"):
        run(folder, TWO)
    assert not folder.exists()
    monkeypatch.setattr(builders, "load_policy", load)
    launched, first = Replay._launched, iter([at_a_collection])

    def once(*given):  # those that end with the run must not find the process without a handler
        made = launched(*given)
        next(first, lambda: None)()
        return made

    monkeypatch.setattr(Replay, "_launched", once)
    with pytest.raises(Stopped, match="in the rollout of step 1"):
        run(folder, TWO)
    monkeypatch.setattr(Replay, "_launched", launched)
    run(folder, TWO, resume=True)
    assert same_run.differences(brief, folder) == []


def test_what_does_not_look_is_ended_by_who_watches(monkeypatch):
    monkeypatch.setattr(stopping, "GRACE", 0.05)
    told, came = [], threading.Event()

    def ends(number: int) -> None:
        told.append(number)
        came.set()

    with pytest.raises(Stopped), stopping.told_apart(ends):
        signal.raise_signal(signal.SIGTERM)
        assert came.wait(20)  # it compiles something, say
    assert told == [signal.SIGTERM]


def test_a_second_signal_waits_for_nothing(monkeypatch):
    told, came = [], threading.Event()

    def ends(number: int) -> None:
        told.append(number)
        came.set()

    async def patient():
        with Stop().watching(), (stop := Stop()).watching(), stop.patiently():
            signal.raise_signal(signal.SIGTERM)
            assert not came.wait(0.2)  # it lets a step end
            signal.raise_signal(signal.SIGINT)
            assert await asyncio.to_thread(came.wait, 20)

    with stopping.told_apart(ends):
        monkeypatch.setattr(stopping, "GRACE", 0.05)
        waiting.run(patient())
    assert told == [signal.SIGINT]


def test_sigterm_that_timeout_sends_twice_is_one(monkeypatch):
    """To the process, and to its group."""
    monkeypatch.setattr(stopping, "TOGETHER", 60.0)
    told, stop = [], Stop()

    async def patient():
        with stop.patiently():
            for number in (signal.SIGTERM, signal.SIGTERM):
                signal.raise_signal(number)
                await asyncio.to_thread(threading.Event().wait, 0.05)
            assert stop.number == signal.SIGTERM and not told

    with stopping.told_apart(told.append), stop.watching():
        waiting.run(patient())
    with stop.watching():
        waiting.run(patient())  # in somebody else's program
    assert told == []


def test_work_under_way_is_cancelled_and_nothing_else_raises():
    """A bar that moves in another task meets nothing: that task is cancelled with the rest."""
    seen = []

    async def moves():
        try:
            while True:
                waiting.look()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def reads():
        moving = asyncio.gather(moves(), moves())
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        await moving

    with pytest.raises(Stopped), stopping.told_apart():
        waiting.run(reads())
    assert seen == ["cancelled", "cancelled"]


def test_ctrl_c_while_jax_is_imported_ends_the_process_without_a_word():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "notepad_jax", "train", "--help"],
        env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while "jax._src" not in (line := process.stderr.readline()):
        assert line, "it ended before it had begun"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert all(line.startswith("import time:") for line in rest.splitlines()[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_process_that_is_stopped_says_one_line_and_goes_on(uninterrupted, tmp_path, number):
    """As a user does it: no traceback, the exit code, the words to go on with."""
    words = [sys.executable, "-m", "notepad_jax", "train", "--name", "mine"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [*words, *SMALL], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while "reinforcement learning" not in (line := process.stderr.readline()):
        assert line, "it ended before it had begun"
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said and "never retrieved" not in said
    last = said.splitlines()[-1]
    assert last.startswith("notepad-jax: stopped ")
    assert last.endswith("; go on with: notepad-jax train --name mine --resume")
    subprocess.run([*words, "--resume"], cwd=tmp_path, env=environment, check=True, timeout=300)
    assert same_run.differences(uninterrupted, tmp_path / "runs" / "mine") == []
