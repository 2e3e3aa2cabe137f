"""What is paid for is said at every exit, of all zones and in dollars; delete.sh ends all of it."""

import os
import re
import signal
import subprocess
import time

import pytest

from notepad_jax.planner import fastest
from tests.launch.conftest import LAUNCH, ROOT
from tests.launch.test_slices import AT, GROUPS, MULTI, QUEUED

PAID = "note is still paid for: $16.80 an hour (4 chips of v5p in us-east5-a)"


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({}, ("fail", "ssh|||connection refused")),  # no host can be reached
        ({"ANSWER_SECONDS": "1", "TRIES": "1"}, ("hangs", "host_setup")),
        ({}, ("fail", "storage cp - gs://my-bucket/note/code|||403")),
        ({"RECREATIONS": "0"}, ("bucket/my-bucket/note/state/first", "failed with exit code 1")),
    ],
)
def test_a_run_that_ends_badly_says_what_is_paid_for(world, settings, problem):
    world.queued("ACTIVE")
    world.put(*problem)
    if problem[0].endswith("first"):
        world.put("fail", "host_run|||no")
    done = world.call("run.sh", **settings)
    assert done.returncode == 1 and PAID in done.stderr.splitlines()[-1]


def interrupted(world, script, ready, **settings):
    """Calls a script, sends it what Ctrl-C sends when `ready()`, and returns what it said."""
    settings = world.settings | settings
    world.put("settings.env", *(f"{key}={value}" for key, value in settings.items()))
    environment = {"PATH": f"{world.folder}/bin:{os.defpath}", "WORLD": str(world.folder),
                   "HOME": str(world.folder)}  # fmt: skip
    process = subprocess.Popen(
        [LAUNCH / script, "--settings", world.folder / "settings.env"], text=True,
        env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while not ready():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    return said


def test_a_run_that_is_interrupted_says_what_is_paid_for(world):
    world.queued("ACTIVE")
    assert PAID in interrupted(world, "run.sh", lambda: len(world.calls("ssh")) >= 3)  # it watches


def test_a_deletion_that_is_interrupted_says_what_is_paid_for(world):
    world.queued("ACTIVE")
    world.put("hangs", "queued-resources describe")
    said = interrupted(world, "delete.sh", lambda: world.calls("describe"), ANSWER_SECONDS="2")
    assert said.splitlines()[-1].endswith(f"{PAID}; launch/delete.sh ends that")
    assert world.calls("delete") == []


def test_whoever_looks_at_a_host_is_told_that_it_is_paid_for(world):
    world.queued("ACTIVE")
    assert PAID in world.call("logs.sh", "--follow").stderr


@pytest.mark.parametrize("script", ["create.sh", "setup.sh", "status.sh"])
def test_other_scripts_say_it_too(world, script):
    world.queued("ACTIVE")
    done = world.call(script)
    assert done.returncode == 0 and PAID in done.stderr + done.stdout


def test_what_other_settings_made_is_paid_for_too(world):
    world.queued("ACTIVE")
    done = world.call("status.sh", TPU="v6e:2x4")
    assert done.returncode == 1 and "is there with TPU of v5p-8" in done.stderr
    assert PAID in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"CAPACITY": "spot"}, "$6.72 an hour"),
        ({"PRICE": "1.5"}, "$6.00 an hour"),
        ({"CAPACITY": "reserved"}, "$16.80 an hour, which the reservation costs"),
    ],
)
def test_what_an_hour_costs(world, settings, said):
    world.queued("ACTIVE")
    assert said in world.call("status.sh", **settings).stdout


def test_a_price_that_nobody_knows_is_said_to_be_unknown(world):
    world.queued("ACTIVE", kind="v5litepod-8")
    said = world.call("status.sh", TPU="v5e:2x4").stdout
    assert "(8 chips of v5e in us-east5-a)" in said and "what v5e costs (PRICE" in said


def test_prices_are_those_that_plan_knows(world):
    world.queued("ACTIVE")
    assert f"${4 * fastest.PRICES['v5p']:.2f} an hour" in world.call("status.sh").stdout
    guide = (LAUNCH / "README.md").read_text()
    rows = dict(re.findall(r"^\| (v\w+) \| ([0-9.]+) \|", guide, re.M))
    assert {chip: float(price) for chip, price in rows.items()} == fastest.PRICES
    file = (ROOT / "notepad_jax" / "planner" / "prices.txt").read_text()
    spot = dict(re.findall(r"^\| (v\w+) \| [0-9.]+ \| ([0-9.]+) \|", guide, re.M))
    assert all(re.search(rf"^{chip} \S+ {price}$", file, re.M) for chip, price in spot.items())


# ---------------------------------------------------------------- all zones, both ways


def elsewhere(world):
    """Left behind: a queued resource in another zone, and the groups of another."""
    world.put("elsewhere/us-west4-a/queued/note", "ACTIVE")
    world.put("elsewhere/us-west4-a/queued/note.type", "v6e-8")
    world.put("elsewhere/europe-west4-b/group/note-0", "RUNNING RUNNING")
    world.put("elsewhere/europe-west4-b/group/note-0.size", "2")
    world.put("template/note", "ct6e-standard-4t")


@pytest.mark.parametrize("settings", [{}, MULTI])
def test_what_is_paid_for_elsewhere_is_seen_and_deleted(world, settings):
    elsewhere(world)
    said = world.call("status.sh", **settings).stdout
    assert "8 chips of v6e in us-west4-a" in said and "8 chips of v6e in europe-west4-b" in said
    assert "paid for: $43.20 an hour" in said
    done = world.call("delete.sh", "--now", **settings)
    assert done.returncode == 0 and "nothing of note is paid for by the hour, in any" in done.stderr
    at = ["--project=my-project-123", "--zone=us-west4-a", "--force", "--quiet"]
    assert QUEUED + ["delete", "note", *at] in world.calls("delete")
    assert not any(world.has(f"elsewhere/{path}") for path in
                   ("us-west4-a/queued/note", "europe-west4-b/group/note-0"))  # fmt: skip


def test_other_launches_are_mentioned_and_left_alone(world):
    world.put("group/other-0", "RUNNING")
    world.put("template/other", "ct5p-hightpu-4t")
    said = world.call("status.sh").stdout
    assert "other launches of my-project-123 are paid for: $16.80 an hour" in said
    assert "nothing of note is paid for" in said
    assert world.call("delete.sh").returncode == 0 and world.has("group/other-0")


@pytest.mark.parametrize("message", ["INTERNAL: try again", "Zone not found", ""])
def test_groups_that_cannot_be_listed_are_no_group_of_the_name_absent(world, message):
    world.groups("RUNNING RUNNING RUNNING RUNNING", count=2)
    world.put("fail", f"managed list |||{message}")
    done = world.call("delete.sh", **MULTI)
    assert done.returncode == 1 and "did not list the groups" in done.stderr
    deleted = [call[4] for call in world.calls("delete") if call[:3] == GROUPS]
    assert deleted == ["note-0", "note-1"]  # those of the settings; a group in doubt is deleted


def test_a_list_that_fails_leaves_nobody_sure_that_nothing_is_paid_for(world):
    world.queued("ACTIVE")
    world.put("fail", "queued-resources list|||UNAVAILABLE: try again")
    done = world.call("status.sh")
    assert "did not say what is paid for" in done.stdout
    done = world.call("delete.sh", "--now")
    assert done.returncode == 1 and not world.has("queued/note")
    assert world.calls("delete") == [QUEUED + ["delete", "note", *AT, "--force", "--quiet"]]


def test_an_api_that_is_switched_off_has_nothing(world):
    world.put("fail", "queued-resources|||Cloud TPU API has not been used in project 1 before")
    done = world.call("delete.sh", **MULTI)
    assert done.returncode == 0 and "nothing of note is paid for" in done.stderr


def test_one_deletion_that_fails_does_not_keep_the_others(world):
    elsewhere(world)
    world.put("fail", "delete note --project=my-project-123 --zone|||INTERNAL")
    done = world.call("delete.sh", "--now")
    assert done.returncode == 1 and "8 chips of v6e in us-west4-a" in done.stderr
    assert not world.has("elsewhere/europe-west4-b/group/note-0")
