"""What hangs, drops, fails for a while or is done twice does not end a run, nor leave it unwatched.

The fake gcloud drops connections (`drops`), never answers (`hangs`), refuses (`fail`) and lets
somebody else be faster (`race`).
"""

import threading

import pytest

from tests.launch.conftest import kill_run, run_of, trained
from tests.launch.test_run import until

GROUP = {"WAY": "group", "TPU": "v6e:2x2"}


# ---------------------------------------------------------------- connections


def test_dropped_connections_end_nothing(world, host):
    world.put("drops", "host_setup|||2", "host_run|||2")
    done = world.call("run.sh")
    assert done.returncode == 0, done.stderr
    assert world.state() == "done" and len(trained(world)) == 1


def test_code_whose_copy_is_dropped_is_copied_again(world, host):
    world.put("drops", "code.tar.gz|||2")
    assert world.call("setup.sh", "--code-only").returncode == 0
    assert (world.bucket / "note" / "code.tar.gz").exists()


def test_connections_that_are_dropped_for_ever_end_it_with_what_was_said(world, host):
    world.put("fail", "ssh|||kex_exchange_identification: reset")
    done = world.call("run.sh")
    assert done.returncode == 1 and "kex_exchange_identification" in done.stdout
    assert len(world.calls("ssh")) == 3  # TRIES


def test_what_a_host_answers_is_not_asked_again(world, host):
    world.put("pip_fails")
    assert world.call("run.sh").returncode == 1
    assert len(world.calls("ssh")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["host_setup", "host_run"])
def test_ssh_that_never_answers_is_given_up(world, host, verb):
    world.put("hangs", f"ssh .*{verb}")
    done = world.call("run.sh", ANSWER_SECONDS="3" if verb == "host_run" else "1", TRIES="1")
    assert done.returncode == 1 and "no answer within" in done.stdout


@pytest.mark.slow
def test_a_slice_that_vanishes_while_it_is_watched_is_noticed(world):
    world.queued(*["ACTIVE"] * 4, "SUSPENDED")
    world.put("hangs", "host_run.sh keep")
    done = world.call("run.sh", ANSWER_SECONDS="4", TRIES="9", RECREATIONS="0")
    assert done.returncode == 1 and "was lost (dead: SUSPENDED)" in done.stderr


def test_a_gcloud_that_hangs_is_no_answer(world):
    world.queued("ACTIVE")
    world.put("hangs", "queued-resources describe")
    done = world.call("create.sh", ANSWER_SECONDS="1")
    assert done.returncode == 1 and "no answer within 1 s" in done.stderr


# ---------------------------------------------------------------- the first boot


def boot(world, lock):
    """A host whose Python cannot make an environment before apt has installed what that needs, and
    whose apt is locked `lock` times."""
    (world.folder / "bin" / "python3.13").rename(world.folder / "python")
    for python in ("python3.12", "python3.11", "python3"):
        file = world.folder / "bin" / python
        file.write_text(
            "#!/usr/bin/env bash\n"
            '[[ "$1 $2" != "-m venv" || -e $WORLD/venv_there ]] && exec "$WORLD/python" "$@"\n'
        )
        file.chmod(0o755)
    apt = world.folder / "bin" / "apt-get"
    apt.write_text(
        "#!/usr/bin/env bash\n"
        'n=$(cat "$WORLD/apt" 2>/dev/null || echo 0); echo $((n + 1)) >"$WORLD/apt"\n'
        f"if ((n < {lock})); then\n"
        "echo 'E: Could not get lock /var/lib/apt/lists/lock' >&2; exit 100; fi\n"
        '[[ " $* " != *" install "* ]] || touch "$WORLD/venv_there"\n'
    )
    apt.chmod(0o755)
    sudo = world.folder / "bin" / "sudo"
    sudo.write_text('#!/usr/bin/env bash\nexec "$@"\n')
    sudo.chmod(0o755)


def test_apts_lock_at_first_boot_is_waited_for(world, host):
    boot(world, lock=3)
    done = world.call("run.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Could not get lock" in done.stdout and world.state() == "done"


# ---------------------------------------------------------------- requests


@pytest.mark.slow
def test_requests_that_fail_after_a_reclaim_are_made_again(world):
    world.queued(*["ACTIVE"] * 3, "SUSPENDED")
    world.put("on_create", "ACTIVE", "SUSPENDED")
    world.put("drops", "queued-resources create|||2")
    done = world.call("run.sh", RECREATIONS="4")
    assert done.returncode == 1 and "RECREATIONS=4 are used up" in done.stderr
    assert world.changes() == ["delete note", *["create note"] * 3, "delete note", "create note"]


@pytest.mark.slow
def test_a_request_that_fails_while_it_waits_is_made_again_after_a_reclaim(world):
    world.queued(*["ACTIVE"] * 3, "SUSPENDED")
    world.put("on_create", "WAITING_FOR_RESOURCES", "FAILED")
    done = world.call("run.sh", RECREATIONS="3")
    assert done.returncode == 1 and world.changes() == ["delete note", "create note"] * 3


@pytest.mark.slow
def test_what_somebody_else_makes_again_is_waited_for(world):
    world.queued(*["ACTIVE"] * 4, "PROVISIONING", "PROVISIONING", "ACTIVE", "ACTIVE", "SUSPENDED")
    done = world.call("run.sh", RECREATIONS="1")
    assert done.returncode == 1 and "was lost (coming: PROVISIONING)" in done.stderr
    assert "note is there" in done.stderr and world.changes() == []


def test_a_group_whose_time_is_over_is_made_again(world):
    world.groups("RUNNING")
    world.put("group/note-0.size", "0")
    world.put("on_create", "RUNNING")
    assert world.call("create.sh", **GROUP, CAPACITY="flex-start").returncode == 0
    assert world.changes()[-2:] == ["create note", "create note-0"] and len(world.changes()) == 4


def test_a_first_request_that_fails_is_for_whoever_asked(world):
    world.put("fail", "queued-resources create|||QUOTA_EXCEEDED")
    assert world.call("run.sh").returncode == 1 and world.changes() == ["create note"]


# ---------------------------------------------------------------- which code


@pytest.mark.parametrize("script", ["run.sh", "create.sh"])
def test_a_new_tpu_gets_the_code_of_today(world, host, script):
    """Deleted at once, mended, run again: nothing told the bucket that the run ended."""
    world.put("training", "waits")
    assert world.call("run.sh", "--detach").returncode == 0
    until(lambda: world.has("hosts/0/notepad/runs/first/checkpoints/.9.writing"))
    assert world.state() == "running"
    kill_run(host)
    until(lambda: run_of(host) is None)
    assert world.call("delete.sh", "--now").returncode == 0
    (host / "notepad").rename(world.folder / "lost")
    world.put("training", "ends")
    world.environment["CODE_VERSION"] = "2"
    if script == "create.sh":
        assert world.call("create.sh").returncode == 0
    assert world.call("run.sh").returncode == 0
    assert (host / "notepad" / "code" / "pyproject.toml").read_text() == "name = notepad 2\n"


# ---------------------------------------------------------------- two at once


def test_a_tpu_that_somebody_else_asks_for_at_the_same_moment_is_waited_for(world):
    world.put("race/note", "PROVISIONING", "ACTIVE")
    done = world.call("create.sh")
    assert done.returncode == 0 and "is there" in done.stderr


def test_a_group_that_somebody_else_makes_at_the_same_moment(world):
    world.put("race/note-0", "RUNNING")
    world.put("group/note-0.size", "1")
    assert world.call("create.sh", **GROUP).returncode == 0


def test_two_at_once_are_one_run(world, host):
    world.put("on_create", "PROVISIONING", "PROVISIONING", "ACTIVE")
    ends = []
    callers = [threading.Thread(target=lambda: ends.append(world.call("run.sh"))) for _ in "ab"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(150)
    said = "\n".join(done.stdout + done.stderr for done in ends)
    assert [done.returncode for done in ends] == [0, 0], said
    assert len(trained(world)) == 1 and world.state() == "done"
