"""What went wrong in other stacks of this kind, by the numbers of their issues, and does not here.

docs/fleet.md lists all of them, and which test would see each; here are those that no other has.
"""

import collections
import contextlib
import errno
import os
import shutil
import signal
import threading
import time

import pytest

from notepad_jax.checkpoint.objects import Objects
from notepad_jax.cli import main
from notepad_jax.training import fleet, fleet_claims, fleet_reader
from tests.checkpoint.fake_bucket import cloud
from tests.runs import SMALL
from tests.support import same_run
from tests.training.test_fleet import APART, alone, learnt
from tests.training.test_pod import ended, reading, started

__all__ = ["alone"]  # a fixture


@pytest.mark.slow
def test_a_reader_that_hangs_in_a_turn_holds_no_step(alone, tmp_path, monkeypatch):
    """NeMo-RL #3238."""
    monkeypatch.setattr(fleet_claims, "SLOWER", 0.02)  # a claim stands for 0.2 s
    bundle, begun, hung = fleet_reader.PinnedReader._bundle, [], threading.Event()

    async def hanging(self, wanted):
        if self.claims.me == "one" and not begun:
            begun.append(wanted)
            hung.set()
            while not self.claims.objects.get("ended") and not self.alone():
                await fleet_reader.asyncio.sleep(self.look)
        while not hung.is_set():
            await fleet_reader.asyncio.sleep(self.look)
        return await bundle(self, wanted)

    monkeypatch.setattr(fleet_reader.PinnedReader, "_bundle", hanging)
    found = learnt(tmp_path / "run", "--config.fleet.lead=0", names=("one", "two"))
    assert hung.is_set() and found["two"].bundles == 3
    assert same_run.differences(alone, tmp_path / "run") == []


@pytest.mark.slow
def test_a_reader_without_room_ends_and_another_reads_what_it_had(alone, tmp_path, monkeypatch):
    put, full = Objects.put, []

    def without_room(self, name, content):
        if name.startswith("spool/") and not full:
            full.append(name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(self, name, content)

    monkeypatch.setattr(fleet_claims, "SLOWER", 0.02)
    monkeypatch.setattr(Objects, "put", without_room)
    with pytest.raises(OSError) as ended:
        learnt(tmp_path / "run", "--config.fleet.lead=0", names=("one", "two"))
    assert ended.value.errno == errno.ENOSPC
    assert same_run.differences(alone, tmp_path / "run") == []


@pytest.mark.parametrize("twice", [b"other", b""])
def test_what_is_put_twice_stands_as_it_was_put_first(tmp_path, twice):
    """A thief's bundle that comes after its owner's was learnt from."""
    objects = Objects(tmp_path)
    assert objects.put("spool/1-0", b"first") and not objects.put("spool/1-0", twice)
    assert objects.get("spool/1-0") == b"first"


@pytest.mark.slow  # a client waits a second before it asks again
def test_a_bucket_that_stumbles_changes_nothing(alone, tmp_path, monkeypatch):
    """Calls are refused for the moment (503), or done and their answers lost, or cut short."""
    monkeypatch.setattr(fleet, "FAR", fleet.NEAR)
    asked, hit = collections.Counter(), collections.Counter()
    every = {"refused read": 11, "refused write": 4, "lost read": 13, "lost write": 3}

    def stumbles(how):
        def one(verb, name):
            kind = f"{how} {verb}"
            asked[kind] += "/fleet/" in name
            if found := "/fleet/" in name and asked[kind] % every.get(kind, 2**30) == 0:
                hit[kind] += 1
            return 503 if found else 0

        return one

    words = ("--config.fleet.lead=0", "--config.checkpoint.folder=gs://bucket/runs")
    with cloud() as there:
        for name, value in there.environment.items():
            monkeypatch.setenv(name, value)
        there.refuse, there.lose = stumbles("refused"), stumbles("lost")
        learnt(tmp_path / "run", *words, place="gs://bucket/runs/run")
        left = {name for name in there.objects if name.startswith("runs/run/fleet")}
    assert left == {"runs/run/fleet/terms", "runs/run/fleet/ended"} and set(hit) == set(every)
    for name in same_run.WRITTEN:
        assert (tmp_path / "run" / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.slow
def test_a_trainer_that_was_frozen_ends_when_it_finds_its_successor(alone, tmp_path, monkeypatch):
    """Cut off in the middle of a run in a bucket, and back when another machine has ended it."""
    words = ("--name", "run", *SMALL, *APART, "--config.fleet.lead=0")
    words += ("--config.checkpoint.folder=gs://bucket/runs",)
    first, second = tmp_path / "first", tmp_path / "second"
    with cloud() as there, contextlib.ExitStack() as running:
        for name, value in there.environment.items():
            monkeypatch.setenv(name, value)
        running.callback((older := started(first, 1, *words)).kill)
        reader = running.enter_context(reading(tmp_path / "reader", "gs://bucket/runs/run"))
        while not any("checkpoints/2/" in name for name in list(there.objects)):
            assert older.poll() is None
            time.sleep(0.01)
        older.send_signal(signal.SIGSTOP)
        shutil.copytree(first / "runs", second / "runs")  # as launch/ does, by way of the bucket
        running.callback((newer := started(second, 1, *words, "--resume")).kill)
        code, said = ended(newer)
        assert code == 0 == reader.wait(60), said
        older.send_signal(signal.SIGCONT)
        code, said = ended(older)
        # Frozen while it saved, it wrote on; what its successor saved of that step is whole.
        assert main(["check", str(second / "runs" / "run")]) == 0
    assert code == 1 and "Traceback" not in said
    assert "life 2 of the trainer" in said.splitlines()[-1]
    for name in same_run.WRITTEN:
        assert (second / "runs" / "run" / name).read_bytes() == (alone / name).read_bytes()
