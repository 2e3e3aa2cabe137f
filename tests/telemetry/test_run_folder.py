"""A run's folder: one of many starts gets it, one process holds it, no failed start leaves it."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.run_folder import Exists, numbered, opened, plain_name

ROOT = Path(__file__).parents[2]


def elsewhere(work):
    """Runs `work` as another holder: a thread of its own, as a process is."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def enter(folder, resume=True):
    with opened(folder, resume):
        return folder


def test_of_many_starts_at_once_one_gets_the_name_and_numbered_ones_differ(tmp_path):
    """Threads are holders of their own, and faster than processes; 30 rounds of 8."""
    barrier, leave = threading.Barrier(8, timeout=60), threading.Barrier(8, timeout=60)

    def start(make):
        barrier.wait()
        try:
            with make() as folder:
                leave.wait()
                return folder.name
        except Exists:
            leave.wait()
            return None

    with ThreadPoolExecutor(8) as pool:
        for turn in range(30):
            mine = tmp_path / str(turn) / "mine"
            names = list(pool.map(start, [lambda at=mine: opened(at, resume=False)] * 8))
            assert sorted(map(str, names)) == sorted(["mine"] + ["None"] * 7)
            names = list(pool.map(start, [lambda at=mine: numbered(at)] * 8))
            assert sorted(names) == [f"mine-{n}" for n in range(2, 10)]


def test_a_held_folder_names_its_holder_and_a_crash_lets_go(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from notepad_jax.telemetry import run_folder\n"
        "with run_folder.opened(Path(sys.argv[1]), resume=False):\n"
        "    print('held', flush=True); time.sleep(600)"
    )
    folder = tmp_path / "runs" / "mine"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError) as refused:
            enter(folder)
        who = f"process {holder.pid} on {socket.gethostname()}"
        assert str(refused.value) == f"{folder} is in use by {who}; wait for it, or stop it"
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    enter(folder)  # nothing to clear away


def test_the_holder_may_open_what_it_holds_and_nobody_else(tmp_path):
    with opened(tmp_path / "run", resume=False) as folder:
        with opened(folder, resume=False), opened(folder / ".." / "run", resume=True):
            with pytest.raises(ValueError, match="in use by process"):
                elsewhere(lambda: enter(folder))
        with pytest.raises(
            ValueError, match="in use by process"
        ):  # the inner ones let go of nothing
            elsewhere(lambda: enter(folder))
        with opened(folder / "below", resume=False):
            pass
    assert elsewhere(lambda: enter(folder)) == folder


def test_a_folder_that_is_there_is_refused_and_one_to_resume_must_be(tmp_path):
    with pytest.raises(Exists, match=r"exists; choose another name .*--resume"):
        enter(tmp_path, resume=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="there is no run .*nowhere to resume"):
        enter(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(Exists):
        enter(tmp_path / "file", resume=False)
    with pytest.raises(OSError, match="file"):
        enter(tmp_path / "file" / "run", resume=False)
    with pytest.raises(OSError, match="file"):
        with numbered(tmp_path / "file" / "run"):
            raise AssertionError


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_start_that_failed_leaves_no_folder_of_its_own(tmp_path, error):
    with contextlib.suppress(error), opened(tmp_path / "runs" / "mine", resume=False) as folder:
        (folder / "config.json").write_text("{}")
        (folder / "checkpoints" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
        (folder / "metrics.jsonl").touch()
        raise error
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "other").mkdir(parents=True)
    with contextlib.suppress(error), opened(tmp_path / "runs" / "mine", resume=False):
        raise error
    with contextlib.suppress(error), opened(tmp_path / "runs" / "other", resume=True):
        raise error
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_a_process_that_ends_at_once_leaves_no_start_that_came_to_nothing(tmp_path):
    with opened(tmp_path / "runs" / "mine", resume=False) as folder:
        (folder / "config.json").write_text("{}")
        run_folder.abandon()
        assert list(tmp_path.iterdir()) == []
    with opened(tmp_path / "runs" / "mine", resume=False) as folder:
        (folder / "metrics.jsonl").write_text("{}")
        run_folder.abandon()
        assert folder.exists()
    run_folder.abandon()  # nobody begins anything
    assert folder.exists()


@pytest.mark.parametrize(
    "kept", ["checkpoints/0", "metrics.jsonl", "readings/step_0/readings.jsonl"]
)
def test_what_a_run_can_go_on_from_is_kept(tmp_path, kept):
    with contextlib.suppress(KeyError), opened(tmp_path / "run", resume=False) as folder:
        path = folder / kept
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{") if path.suffix else path.mkdir()
        raise KeyError
    assert path.exists()
    enter(folder)


def test_ctrl_c_at_any_moment_of_a_start_leaves_nothing(tmp_path):
    """After each call of it in turn, which is where Python looks for signals."""
    began = False
    for moment in itertools.count(1):
        calls = 0

        def interrupt(frame, event, _, moment=moment):
            nonlocal calls
            calls += event in ("return", "c_return")
            if calls == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            sys.setprofile(interrupt)
            with opened(tmp_path / "runs" / "mine", resume=False):
                sys.setprofile(None)
                began = True
                raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == [], moment
        if began:
            break
    assert moment > 100


def test_a_folder_that_a_failed_start_takes_away_is_not_held_by_name_alone(tmp_path, monkeypatch):
    """Between opening the lock of a start and having it, that start fails."""
    folder, lock = tmp_path / "run", run_folder.fcntl.flock
    folder.mkdir()

    def removed_before(descriptor, operation):
        run_folder.shutil.rmtree(folder)
        lock(descriptor, operation)

    monkeypatch.setattr(run_folder.fcntl, "flock", removed_before)
    with pytest.raises(ValueError, match="was just removed by a start that failed"):
        enter(folder)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", unsupported)
    with pytest.raises(ValueError, match="cannot be locked .*Function not implemented"):
        enter(tmp_path / "run", resume=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "-x", "a/b", "../up", "/tmp/x", "a\\b", "a\0b", "a\nb", "a\x7fb",
     "a\x85b", "a\u2028b", "a\udcffb", "a/" * 400, "x" * 256, "\u00e9" * 128],
)  # fmt: skip
def test_a_name_names_a_folder_in_runs_and_nothing_else(name):
    with pytest.raises(ValueError) as refused:
        plain_name(name)
    told = str(refused.value)
    assert told.isprintable() and len(told) < 200


@pytest.mark.parametrize(
    "name", ["mine", "a-b_c.d", "x" * 255, "\u00e9" * 127, "two words", "7", "a..b"]
)
def test_names_that_people_choose(name, tmp_path):
    assert plain_name(name) == name
    (tmp_path / name).mkdir()
