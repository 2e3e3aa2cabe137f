"""What went wrong in other stacks of this kind, by the numbers of their issues, and does not here.

docs/fleet.md lists all of them, and which test would see each; here are those that no other has.
"""

import errno
import os
import threading

import pytest

from notepad_jax.checkpoint.objects import Objects
from notepad_jax.training import fleet_claims, fleet_reader
from tests.support import same_run
from tests.training.test_fleet import alone, learnt

__all__ = ["alone"]  # a fixture


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
    assert hung.is_set() and found["two"].bundles == 4
    assert same_run.differences(alone, tmp_path / "run") == []


def test_a_reader_without_room_ends_and_another_reads_what_it_had(alone, tmp_path, monkeypatch):
    put, full = Objects.put, []

    def without_room(self, name, content):
        if name.startswith("spool/") and not full:
            full.append(name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(self, name, content)

    monkeypatch.setattr(fleet_claims, "SLOWER", 0.02)
    monkeypatch.setattr(Objects, "put", without_room)
    found = learnt(tmp_path / "run", "--config.fleet.lead=0", names=("one", "two"))
    (ended,) = [one for one in found.values() if isinstance(one, OSError)]
    assert ended.errno == errno.ENOSPC
    assert same_run.differences(alone, tmp_path / "run") == []


@pytest.mark.parametrize("twice", [b"other", b""])
def test_what_is_put_twice_stands_as_it_was_put_first(tmp_path, twice):
    """A thief's bundle that comes after its owner's was learnt from."""
    objects = Objects(tmp_path)
    assert objects.put("spool/1-0", b"first") and not objects.put("spool/1-0", twice)
    assert objects.get("spool/1-0") == b"first"
