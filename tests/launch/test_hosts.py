"""One run of several hosts: who is who, who writes what, and what comes back after a loss.

The programs are stand-ins (fake_python.sh) that do on the disk and in the bucket what training
does there; two real processes are one run in tests/training/test_pod.py.
"""

import os
import signal

import pytest

from tests.launch.conftest import run_of, steps, trained
from tests.launch.test_run import lose, until

TWO = {"SLICES": "2"}  # of one host each
WORDS = (
    "train --config quickstart --name first --hosts=auto "
    "--config.checkpoint.folder=gs://my-bucket/note/runs"
)


@pytest.fixture
def hosts(world, host):
    (world.folder / "hosts" / "1").mkdir()
    return [host, world.folder / "hosts" / "1"]


@pytest.mark.parametrize(
    "script, settings, words",
    [
        ("run.sh", {"TPU": "v5p:2x2x2", "COMMAND": "quickstart"}, ["one host", "v5p:2x2x1"]),
        ("gke.sh", {"TPU": "v5p:2x2x2", "COMMAND": "eval"}, ["one host", "COMMAND=train"]),
        ("gke.sh", {"TPU": "v5e:2x4", "SLICES": "2"}, ["slices of several hosts only"]),
        ("run.sh", {"FLAGS": "--hosts=auto"}, ["FLAGS has --hosts=auto"]),
        ("run.sh", {"FLAGS": "--config.checkpoint.folder=/x"}, ["FLAGS has --config.checkpoint"]),
    ],
)
def test_what_several_hosts_cannot_do_is_one_line(world, script, settings, words):
    done = world.call(script, **settings)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and world.calls() == []
    assert all(word in done.stderr for word in words) and done.stdout == ""


def test_a_run_of_two_hosts_from_nothing_to_done(world, hosts):
    done = world.call("run.sh", **TWO, FLAGS="--config.steps=20")
    assert done.returncode == 0, done.stderr
    until(lambda: len(trained(world)) == 2)  # the stand-ins do not wait for one another
    assert trained(world) == [f"{WORDS} --config.steps=20"] * 2
    assert "host 1: first started" in done.stdout and world.state() == "done"
    # Its checkpoints are where training put them, whatever was copied beside them.
    assert steps(world) == ([".9.writing", "1", "2"], [1, 2])
    assert not world.has("hosts/0/notepad/runs/first/checkpoints")
    assert not world.has("hosts/1/notepad/runs/first")
    until(lambda: len(list((world.bucket / "note" / "logs" / "first").iterdir())) == 2)
    assert all("--delete-unmatched" not in " ".join(call) for call in world.calls("rsync"))


def test_what_one_host_saved_before_is_not_copied_over_what_two_have_saved(world, hosts):
    old = hosts[0] / "notepad" / "runs" / "first" / "checkpoints" / "0"
    old.mkdir(parents=True)
    (old / "params").write_text("weights 0")
    done = world.call("run.sh", **TWO)
    assert done.returncode == 0, done.stderr
    assert f"{WORDS} --resume" in trained(world)
    assert steps(world) == ([".9.writing", "1", "2"], [1, 2])


def test_slices_of_groups_are_told_of_one_another(world, hosts):
    """Nobody else does: who is first, how many there are, which one this is."""
    (hosts[0] / "worker-network-endpoints").write_text("10.0.0.7,10.0.0.8")
    world.put("on_create", "RUNNING")
    python = world.folder / "bin" / "python3.13"
    text = python.read_text().replace(
        "said=", 'env | grep ^MEGASCALE | sort >"$WORLD/slice-$HOST_INDEX"\nsaid=', 1
    )
    python.write_text(text)
    done = world.call("run.sh", **TWO, WAY="group", TPU="v6e:2x4")
    assert done.returncode == 0, done.stderr
    until(lambda: len(trained(world)) == 2)
    line = WORDS.replace("--hosts=auto", "--hosts=10.0.0.7:8482,2,{}")
    assert sorted(trained(world)) == [line.format(0), line.format(1)]
    for slice in range(2):
        assert (world.folder / f"slice-{slice}").read_text().splitlines() == [
            "MEGASCALE_COORDINATOR_ADDRESS=10.0.0.7", "MEGASCALE_NUM_SLICES=2",
            f"MEGASCALE_SLICE_ID={slice}",
        ]  # fmt: skip
    assert world.state() == "done" and world.has("group/note-1")


def test_hosts_of_a_group_are_counted_as_their_slice_counts_them(world, hosts):
    for name, worker in zip(hosts, "10", strict=True):
        (name / "agent-worker-number").write_text(worker)
    world.put("on_create", "RUNNING RUNNING")
    done = world.call("run.sh", WAY="group", TPU="v5p:2x2x2")
    assert done.returncode == 0, done.stderr
    assert world.has("hosts/1/notepad/runs/first/metrics.jsonl")  # the first process is there
    assert not world.has("hosts/0/notepad/runs/first") and steps(world)[1] == [1, 2]


def test_two_hosts_that_are_lost_go_on_from_the_bucket_with_their_turns(world, hosts):
    world.put("training", "waits")
    assert world.call("run.sh", "--detach", **TWO).returncode == 0
    until(lambda: world.has("bucket/my-bucket/note/runs/first/checkpoints/.9.writing"))
    until(lambda: run_of(hosts[1]) and len(trained(world)) == 2)
    for name in hosts:  # the slice is about to go
        os.kill(run_of(name), signal.SIGTERM)
    until(lambda: world.state() == "interrupted")
    until(lambda: world.has("bucket/my-bucket/note/turns/first/under_way-1.jsonl"))
    for name in hosts:
        until(lambda name=name: run_of(name) is None)
        (name / "notepad").rename(world.folder / f"lost-{name.name}")
    world.put("training", "ends")
    world.queued("SUSPENDED")
    done = world.call("run.sh", **TWO)
    assert done.returncode == 0, done.stderr
    until(lambda: len(trained(world)) == 4)  # the stand-ins do not wait for one another
    assert sorted(trained(world)) == [WORDS] * 3 + [f"{WORDS} --resume"]
    assert world.state() == "done" and steps(world)[1] == [1, 2, 3, 4]
    assert (world.folder / "turns").read_text() == "turns of 1\n"
    assert list(hosts[0].rglob("params")) == []  # checkpoints are read in the bucket


def test_the_host_that_failed_is_named_and_nothing_is_begun_again(world, hosts):
    world.put("training", "fails on 1")
    done = world.call("run.sh", **TWO)
    assert done.returncode == 1 and "failed with exit code 1 on host 1" in done.stderr
    assert world.state() == "failed with exit code 1 on host 1"
    assert done.stderr.count("\n") > 1 and "launch/logs.sh" in done.stderr


def test_a_run_whose_hosts_are_lost_one_by_one_is_not_taken_for_a_failure(world, hosts):
    """The others' programs end of it, and one of them may say so before the slice is gone."""
    world.put("training", "waits")
    assert world.call("run.sh", "--detach", **TWO).returncode == 0
    until(lambda: world.has("bucket/my-bucket/note/runs/first/metrics.jsonl") or trained(world))
    until(lambda: len(trained(world)) == 2)
    for name in hosts:
        lose(world, name)
        (world.folder / "lost").rename(world.folder / f"lost-{name.name}")
    world.put("bucket/my-bucket/note/state/first", "failed with exit code 1 on host 0")
    world.put("training", "ends")
    world.queued("ACTIVE", "SUSPENDED")  # it is noticed after the word of the host
    done = world.call("run.sh", **TWO)
    assert done.returncode == 0, done.stderr
    assert world.state() == "done"


def test_a_host_that_cannot_be_reached_is_named(world, host):
    done = world.call("run.sh", **TWO)  # host 1 has no home
    assert done.returncode == 1 and "1 of 2 hosts failed" in done.stderr
    assert "host 1: ERROR" in done.stdout
