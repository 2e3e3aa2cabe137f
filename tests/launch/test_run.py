"""run.sh, setup.sh and what they start: a run from nothing to done, whatever happens on the way.

The hosts are folders, ssh runs its command there, and the scripts that travel to a host run for
real; only Python and what it would train are stand-ins (fake_python.sh).
"""

import os
import signal
import threading
import time

import pytest

from tests.launch.conftest import run_of, steps, trained

FLAGS = {"FLAGS": "--config.steps=20 --config.seed=1"}
SSH = "--ssh-flag=-o ConnectTimeout=30 -o ServerAliveInterval=30 -o ServerAliveCountMax=4"
WORDS = "train --config quickstart --name first --config.checkpoint.folder="


def until(condition, seconds=60):
    """Waits until something is so; a test that waits in vain fails here."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# ---------------------------------------------------------------- one host


def test_a_run_from_nothing_to_done(world, host):
    done = world.call("run.sh", **FLAGS)
    assert done.returncode == 0, done.stderr
    assert trained(world) == [f"{WORDS} --config.steps=20 --config.seed=1"]
    assert world.state() == "done" and "still paid for" in done.stderr
    assert steps(world) == (["1", "2"], [1, 2])  # and nothing that was being written
    log = (world.bucket / "note" / "logs" / "first" / "host-0.log").read_text()
    assert f"notepad-jax {WORDS}" in log and "exit code 0" in log
    assert (world.folder / "pip").read_text().splitlines() == [
        "-m pip install --quiet --constraint code/constraints.txt --editable code[tpu]",
        "-m pip install --quiet --no-deps google-jetstream==0.2.2",
    ]


def test_what_is_sent_to_the_host_argument_by_argument(world):
    world.put("fail", "start|||stop here")
    world.call("run.sh", **FLAGS)
    install, start = world.calls("ssh")[:2]
    reach = ["compute", "tpus", "queued-resources", "ssh", "note", "--project=my-project-123",
             "--zone=us-east5-a", "--node=0", "--worker=0", SSH, "--quiet"]  # fmt: skip
    assert install[:-1] == start[:-1] == reach
    assert install[-1] == (
        "--command=HOST_INDEX=0 bash -c 'mkdir -p notepad && exec 8>notepad/setup.lock && "
        "flock 8 && "
        "rm -rf notepad/code.new && mkdir notepad/code.new && "
        "gcloud storage cat gs://my-bucket/note/code.tar.gz | tar -xz -C notepad/code.new && "
        "bash notepad/code.new/launch/host_setup.sh'; echo answered $?"
    )
    assert start[-1] == (
        "--command=HOST_INDEX=0 ROOT=gs://my-bucket/note RUN=first COMMAND=train CONFIG=quickstart "
        "SYNC_SECONDS=300 HOSTS=1 ALL_HOSTS=1 flock --shared --close "
        "notepad/setup.lock bash notepad/code/launch/host_run.sh start "
        "--config.steps=20 --config.seed=1; echo answered $?"
    )


@pytest.mark.slow
def test_hosts_without_an_address_are_reached_through_the_proxy(world):
    world.put("on_create", "RUNNING")
    world.put("fail", "start|||stop here")
    world.call("run.sh", WAY="group", TPU="v6e:2x4", IAP="yes")
    assert world.calls("ssh")[0][:-1] == [
        "compute", "ssh", "note-0-h0", "--project=my-project-123", "--zone=us-east5-a",
        "--tunnel-through-iap", SSH, "--quiet",
    ]  # fmt: skip


def test_a_run_that_is_done_costs_nothing_more(world, host):
    world.call("run.sh")
    world.call("delete.sh")
    before = len(world.changes())
    done = world.call("run.sh")
    assert done.returncode == 0 and "is done" in done.stderr and "paid" not in done.stderr
    assert len(world.changes()) == before
    (host / "notepad").rename(world.folder / "lost")  # the next host knows nothing of it
    assert world.call("run.sh", "--again").returncode == 0
    assert trained(world) == [WORDS, f"{WORDS} --resume"]
    assert steps(world) == (["3", "4"], [1, 2, 3, 4])


def test_a_run_that_fails_says_where_to_look_and_is_not_begun_again(world, host):
    world.put("training", "fails")
    done = world.call("run.sh")
    assert done.returncode == 1 and "launch/logs.sh" in done.stderr
    assert world.state() == "failed with exit code 1" and len(trained(world)) == 1
    (world.folder / "training").unlink()
    assert world.call("run.sh").returncode == 0
    assert trained(world) == [WORDS, f"{WORDS} --resume"]


def test_a_run_of_another_name_waits_for_nobody(world, host):
    world.put("training", "waits")
    assert world.call("run.sh", "--detach").returncode == 0
    until(lambda: trained(world))
    done = world.call("run.sh", "--detach", RUN="second")
    assert done.returncode == 1 and "another run is under way here: first" in done.stdout
    assert len(trained(world)) == 1


def test_starting_twice_starts_once_and_keeps_the_code(world, host):
    world.put("training", "waits")
    assert world.call("run.sh", "--detach").returncode == 0
    until(lambda: trained(world))
    until(lambda: world.state() == "running")
    world.environment["CODE_VERSION"] = "2"
    done = world.call("run.sh", "--detach")
    assert done.returncode == 0 and "first runs" in done.stdout
    assert "the code stays as it is" in done.stdout and len(trained(world)) == 1
    assert (host / "notepad" / "code" / "pyproject.toml").read_text() == "name = notepad 1\n"


def test_stop_saves_and_the_next_call_goes_on(world, host):
    world.put("training", "waits")
    world.call("run.sh", "--detach")
    until(lambda: world.has("hosts/0/notepad/runs/first/checkpoints/.9.writing"))
    done = world.call("run.sh", "--stop")
    assert done.returncode == 0 and "first stopped" in done.stdout
    assert world.state() == "stopped" and steps(world) == (["1", "2"], [1, 2])
    assert "nothing runs" in world.call("run.sh", "--stop").stdout
    (world.folder / "training").unlink()
    assert world.call("run.sh").returncode == 0
    assert trained(world) == [WORDS, f"{WORDS} --resume"] and world.state() == "done"


def test_delete_stops_the_run_first(world, host):
    world.put("training", "waits")
    world.call("run.sh", "--detach")
    until(lambda: world.has("hosts/0/notepad/runs/first/checkpoints/.9.writing"))
    assert world.call("delete.sh").returncode == 0
    assert world.state() == "stopped" and steps(world)[1] == [1, 2]
    assert not world.has("queued/note")


def test_delete_now_asks_nobody(world, host):
    world.call("create.sh")
    world.put("bucket/my-bucket/note/state/first", "running")
    assert world.call("delete.sh", "--now").returncode == 0
    assert world.calls("ssh") == [] and not world.has("queued/note")


def test_delete_goes_on_if_the_run_cannot_be_stopped(world):
    world.queued("ACTIVE")
    world.put("bucket/my-bucket/note/state/first", "running")
    world.put("fail", "ssh|||connection refused")
    done = world.call("delete.sh")
    assert done.returncode == 0 and "deleting all the same" in done.stderr
    assert not world.has("queued/note")


def test_copies_are_made_while_it_runs(world, host):
    world.put("training", "waits")
    world.call("run.sh", "--detach", SYNC_SECONDS="1")
    metrics = world.bucket / "note" / "runs" / "first" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().endswith("\n"))
    until(lambda: (world.bucket / "note" / "logs" / "first" / "host-0.log").exists())
    assert world.state() == "running" and not (metrics.parent / ".lock").exists()
    world.call("run.sh", "--stop")


def test_a_program_that_somebody_stopped_is_not_begun_again(world, host):
    world.put("training", "stops")
    assert world.call("run.sh").returncode == 130
    assert world.state() == "stopped" and len(trained(world)) == 1


# ---------------------------------------------------------------- what is lost


def lose(world, host):
    """Takes the slice away, as a preemption does: processes, disk and all."""
    world.queued("SUSPENDED")
    process = run_of(host)
    # The disk first: a watch that saw the slice ready begins the run again where it finds it.
    (host / "notepad").rename(world.folder / "lost")
    os.killpg(process, signal.SIGKILL)


def test_a_slice_that_is_taken_away_is_made_again_and_the_run_goes_on(world, host):
    world.put("training", "waits")
    ends = []
    caller = threading.Thread(target=lambda: ends.append(
        world.call("run.sh", SYNC_SECONDS="1", POLL_SECONDS="1", CAPACITY="spot")))  # fmt: skip
    caller.start()
    metrics = world.bucket / "note" / "runs" / "first" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().endswith("\n"))  # not while it is made
    world.put("training", "ends")
    lose(world, host)
    caller.join(90)
    assert ends and ends[0].returncode == 0, ends
    assert trained(world) == [WORDS, f"{WORDS} --resume"]
    assert steps(world) == (["2", "3"], [1, 2, 3])
    assert world.changes() == ["create note", "delete note", "create note"]
    assert "making it again, 1 of at most 10" in ends[0].stderr
    assert "could not be had (SUSPENDED)" in ends[0].stderr
    log = (world.bucket / "note" / "logs" / "first" / "host-0.log").read_text()
    assert log.count(f"notepad-jax {WORDS}") == 2 and "went on from" in log
    assert sum("code.tar.gz" in " ".join(call) for call in world.calls("cp")) == 1


@pytest.mark.slow
def test_it_is_not_made_again_for_ever(world):
    world.put("on_create", "ACTIVE", "SUSPENDED")
    done = world.call("run.sh", RECREATIONS="2")
    assert done.returncode == 1 and "RECREATIONS=2 are used up" in done.stderr
    assert world.changes() == ["create note"] + ["delete note", "create note"] * 2


def test_a_host_that_is_restarted_goes_on_by_itself(world, host):
    world.put("training", "waits")
    world.call("run.sh", "--detach")
    until(lambda: world.has("hosts/0/notepad/runs/first/checkpoints/.9.writing"))
    world.put("training", "ends")
    os.kill(run_of(host), signal.SIGTERM)  # the host goes down
    until(lambda: world.state() == "interrupted")
    assert world.call("run.sh").returncode == 0
    assert trained(world) == [WORDS, f"{WORDS} --resume"] and world.state() == "done"


def test_steps_come_along_where_a_run_has_no_readers_any_more(world, host):
    world.put("training", "stops")
    world.call("run.sh", READERS="1")
    assert not world.has("hosts/0/notepad/runs/first/checkpoints/1")
    world.call("run.sh")
    assert trained(world)[-1] == f"{WORDS} --resume"
    assert steps(world) == (["1", "2"], [1, 2])
    assert world.has("hosts/0/notepad/runs/first/checkpoints/1")
    before = world.calls("rsync")
    world.call("run.sh")  # of its own steps none is brought
    assert not [call for call in world.calls("rsync")[len(before) :] if call[3].startswith("gs://")]


def test_a_bucket_that_cannot_be_read_stops_the_run_before_it_begins(world, host):
    world.put("fail", "storage ls|||HTTPError 503")
    done = world.call("run.sh")
    assert done.returncode == 1 and world.state() == "failed to read the bucket"
    assert trained(world) == []


def test_results_that_cannot_be_copied_are_no_success(world, host):
    world.put("fail", "storage rsync|||HTTPError 503")
    done = world.call("run.sh")
    assert done.returncode == 1 and world.state() == "failed to copy the run to the bucket"
    assert world.has("hosts/0/notepad/runs/first/checkpoints/2")


def test_nothing_is_removed_from_the_bucket_before_all_of_the_new_is_there(world, host):
    world.call("run.sh")
    copies = [call for call in world.calls("rsync") if call[3] == "picture/first"]
    remove = "--delete-unmatched-destination-objects"
    assert [remove in call for call in copies] == [False, True]


def test_an_installation_that_fails_is_named_and_mended_by_the_next_call(world, host):
    world.put("pip_fails")
    done = world.call("run.sh")
    assert done.returncode == 1 and "not on all hosts" in done.stderr and trained(world) == []
    (world.folder / "pip_fails").unlink()
    assert world.call("run.sh").returncode == 0
    assert world.changes() == ["create note"]


def test_installed_once_and_again_when_the_requirements_change(world, host):
    world.call("create.sh")
    for version, pips in (("1", 2), ("1", 2), ("2", 4)):
        world.environment["CODE_VERSION"] = version
        assert world.call("setup.sh").returncode == 0
        assert len((world.folder / "pip").read_text().splitlines()) == pips


def test_what_is_not_committed_is_mentioned(world, host):
    world.environment["DIRTY"] = " M x"
    assert "not committed" in world.call("setup.sh", "--code-only").stderr
    assert world.calls("ssh") == [] and (world.bucket / "note" / "code.tar.gz").exists()


def test_outside_of_a_checkout_setup_says_so(world, host):
    world.environment["NO_CHECKOUT"] = "1"
    done = world.call("setup.sh")
    assert done.returncode == 1 and "git" in done.stderr and world.calls("cp") == []
