"""Named objects: a name is given away once, and what has one is whole, whoever was killed.

Each test is run on a disk and in a bucket, which is a server of this machine (fake_bucket).
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from notepad_jax.checkpoint.objects import Objects
from tests.checkpoint.fake_bucket import cloud

NAMES = [f"claim/{number}" for number in range(150)]

RACER = """
import sys
from notepad_jax.checkpoint.objects import Objects
objects, ours = Objects(sys.argv[1]), sys.argv[2].encode()
print("ready", flush=True)
input()
names = [f"claim/{number}" for number in range(150)]
print(",".join(name for name in names if objects.put(name, ours)))
"""

KILLED = """
import os, signal, sys
from notepad_jax.checkpoint.objects import Objects
objects = Objects(sys.argv[1])
objects.put("spool/whole", b"here")
print("ready", flush=True)
for number in range(10**6):
    objects.put(f"spool/{number}", b"x" * 2**20)
    objects.replace("spool/again", bytes([number % 256]) * 2**20)
"""


class Killed(BaseException):
    pass


def killed(*_):
    raise Killed


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "disk":
        yield str(tmp_path / "run" / "objects")
        return
    with cloud() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield "gs://bucket/run/objects"


def begun(program, *words):
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_of_two_processes_that_want_a_name_exactly_one_gets_it(folder):
    racers = {who: begun(RACER, folder, who) for who in ("one", "other")}
    for racer in racers.values():
        racer.stdin.write("\n")
        racer.stdin.flush()
    said = {who: racer.communicate(timeout=60)[0].strip() for who, racer in racers.items()}
    won = {who: names.split(",") if names else [] for who, names in said.items()}
    assert sorted(won["one"] + won["other"]) == sorted(NAMES)
    objects = Objects(folder)
    assert objects.names("claim") == sorted(NAMES)
    for who, names in won.items():
        assert all(objects.get(name) == who.encode() for name in names)


def test_what_was_put_stands_until_it_is_replaced_or_removed(folder):
    objects = Objects(folder)
    assert (objects.names(), objects.get("plan/0")) == ([], None)
    assert objects.put("plan/0", b"first")
    assert not objects.put("plan/0", b"second")
    assert not objects.put("plan/0", b"first")  # a name is given once, whatever the content
    assert objects.get("plan/0") == b"first"
    objects.replace("plan/0", b"")
    assert objects.get("plan/0") == b""
    objects.remove("plan/0")
    objects.remove("plan/0")
    assert objects.get("plan/0") is None
    assert objects.put("plan/0", b"third")


def test_names_are_sorted_and_listed_by_what_they_lie_under(folder):
    objects = Objects(folder)
    for name in ("spool/10", "spool/9-0", "spoolx/1", "plan/3", "alone"):
        objects.put(name, b"")
    assert objects.names() == ["alone", "plan/3", "spool/10", "spool/9-0", "spoolx/1"]
    assert objects.names("spool") == ["spool/10", "spool/9-0"]
    assert objects.names("nothing") == objects.names("alone") == []


@pytest.mark.parametrize("name", ["", "/a", "a/", "a/b/c", ".a", "a/.b", "a b", "../a", "\u00e4"])
def test_what_is_no_name_is_refused(folder, name):
    with pytest.raises(ValueError, match="is no name of an object"):
        Objects(folder).put(name, b"")


def test_a_killed_writer_leaves_whole_objects_and_names_that_can_be_had(tmp_path):
    folder = tmp_path / "objects"
    for after in (1, 7, 40):
        writer = begun(KILLED, str(folder))
        objects = Objects(folder)
        while len(objects.names("spool")) < after:
            pass
        writer.kill()
        writer.communicate(timeout=60)
        names = objects.names("spool")
        assert objects.get("spool/whole") == b"here"
        for name in names:
            content = objects.get(name)
            assert name == "spool/whole" or content == content[:1] * 2**20
        following = f"spool/{len(names)}"
        assert objects.put(following, b"next") and objects.get(following) == b"next"
        for name in objects.names():
            objects.remove(name)


def test_half_an_object_of_a_killed_writer_is_not_there(tmp_path, monkeypatch):
    """Killed between writing and naming: as if the name had never been asked for."""
    objects = Objects(tmp_path)
    for name, instead in (("link", objects.put), ("replace", objects.replace)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, killed)
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            with pytest.raises(Killed):
                instead("claim/0", b"longer than what comes next")
        assert list((tmp_path / "claim").iterdir())  # what it left
        assert (objects.names(), objects.names("claim"), objects.get("claim/0")) == ([], [], None)
    assert objects.put("claim/0", b"ours") and objects.get("claim/0") == b"ours"
    assert objects.names() == ["claim/0"]


def test_a_place_that_refuses_is_one_line(monkeypatch, tmp_path):
    with cloud() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        objects = Objects("gs://bucket/run")
        objects.put("plan/0", b"")
        server.refuse = lambda verb, name: True
        asked = (
            lambda: objects.put("plan/1", b""),
            lambda: objects.replace("plan/1", b""),
            lambda: objects.get("plan/0"),
            lambda: objects.remove("plan/0"),
            lambda: Objects("gs://another/run").names(),
            lambda: Objects("gs://another/run").put("plan/1", b""),
        )
        for ask in asked:
            with pytest.raises(OSError, match=r"^gs://.* cannot be \w+: .+$") as found:
                ask()
            assert "\n" not in str(found.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"^{tmp_path}/file/x/plan/1 cannot be written: .+$"):
        Objects(tmp_path / "file" / "x").put("plan/1", b"")


def test_a_file_system_without_hard_links_is_named_with_what_helps(monkeypatch, tmp_path):
    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(OSError, match=r"/claim/1 cannot be written: its file system has no hard "):
        Objects(tmp_path).put("claim/1", b"ours")
    assert Objects(tmp_path).names() == []


def test_a_bucket_that_is_away_is_one_line_and_no_wait_for_ever(monkeypatch):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://localhost:9")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "nobody")
    with pytest.raises(OSError, match=r"gs://bucket/run/plan/1 cannot be written: no answer in 0"):
        Objects("gs://bucket/run", seconds=0.5).put("plan/1", b"")
