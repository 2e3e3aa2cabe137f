"""Nothing burns unwatched: --delete-when-done, and hosts that give themselves back."""

import pytest

from tests.launch.conftest import LAUNCH, trained

DELETE = ["compute", "tpus", "queued-resources", "delete", "note", "--project=my-project-123",
          "--zone=us-east5-a", "--force", "--quiet", "--async"]  # fmt: skip


# ---------------------------------------------------------------- --delete-when-done


@pytest.mark.parametrize("training, code", [("ends", 0), ("fails", 1), ("stops", 130)])
def test_delete_when_done_deletes_whatever_the_end_was(world, host, training, code):
    world.put("training", training)
    done = world.call("run.sh", "--delete-when-done")
    assert done.returncode == code and not world.has("queued/note"), done.stderr
    assert "nothing of note is paid for" in done.stderr and len(trained(world)) == 1
    assert world.has("bucket/my-bucket/note/runs/first/metrics.jsonl")


@pytest.mark.parametrize(
    "training, state",
    [
        ("ends", "failed to copy the run to the bucket"),
        ("fails", "failed with exit code 1, failed to copy the run to the bucket"),
        ("stops", "failed to copy the run to the bucket"),
    ],
)
def test_delete_when_done_leaves_what_is_on_the_host_alone(world, host, training, state):
    """Whatever the end was."""
    world.put("training", training)
    world.put("fail", "storage rsync|||HTTPError 503")
    done = world.call("run.sh", "--delete-when-done")
    assert done.returncode == 1 and world.has("queued/note") and "still paid for" in done.stderr
    assert world.state() == state


def test_nobody_watches_a_detached_run(world):
    done = world.call("run.sh", "--detach", "--delete-when-done")
    assert done.returncode == 2 and "IDLE_MINUTES" in done.stderr and world.calls() == []


def test_what_is_stopped_is_deleted_by_another_script(world):
    done = world.call("run.sh", "--stop", "--delete-when-done")
    assert done.returncode == 2 and "launch/delete.sh stops the run" in done.stderr
    assert world.calls() == []


# ---------------------------------------------------------------- hosts that are idle


@pytest.fixture
def idle(world, host):
    """Runs host_idle.sh with these attributes of the host, in minutes that take no time: the tenth
    ends whatever holds a lock."""
    lock = world.folder / "homes" / "ann" / "notepad" / "run.lock"
    lock.parent.mkdir(parents=True)
    for name, lines in {
        "sleep": 'echo x >>"$WORLD/slept"; [[ $(wc -l <"$WORLD/slept") != 10 ]] || '
                 f'{{ touch "$WORLD/release"; flock {lock} true; }}',
        "poweroff": 'wc -l <"$WORLD/slept" >"$WORLD/off"',
        "who": 'cat "$WORLD/who" 2>/dev/null',
    }.items():  # fmt: skip
        (world.folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (world.folder / "bin" / name).chmod(0o755)
    world.environment["HOMES"] = str(world.folder / "homes")

    def run(held=False, **attributes):
        for key, value in attributes.items():
            world.put(f"home/notepad-{key}", value)
        before = ""
        if held:
            wait = "while [[ ! -e $WORLD/release ]]; do /bin/sleep 0.01; done"
            before = f"flock {lock} bash -c '{wait}' & while flock -n {lock} true; do :; done; "
        command = f"{before} bash {LAUNCH / 'host_idle.sh'}"
        done = world.command("bash", "-c", command)
        assert done.returncode == 0, done.stderr
        file = world.folder / "off"
        return int(file.read_text()) if file.exists() else None

    return run


def test_an_idle_host_switches_itself_off(idle):
    assert idle(**{"idle-minutes": "3"}) == 3


def test_a_run_and_a_login_are_no_idleness(world, idle):
    assert idle(held=True, **{"idle-minutes": "3"}) == 12  # the tenth minute was the first idle one


def test_without_a_limit_it_stays(idle, world):
    assert idle() is None and idle(**{"idle-minutes": "0"}) is None
    assert not world.has("slept")


def test_an_idle_queued_resource_is_deleted_and_if_that_is_forbidden_switched_off(world, idle):
    world.queued("ACTIVE")
    attributes = {"idle-minutes": "2", "queued": "my-project-123/us-east5-a/note"}
    assert idle(**attributes) is None and world.calls("delete") == [DELETE]
    (world.folder / "slept").unlink()
    world.put("fail", "delete|||PERMISSION_DENIED")
    assert idle(**attributes) == 2


@pytest.mark.parametrize(
    "settings, metadata",
    [
        ({}, "--metadata=notepad-idle-minutes=60,notepad-queued=my-project-123/us-east5-a/note"),
        ({"WAY": "group", "TPU": "v6e:2x2"}, "--metadata=notepad-idle-minutes=60"),
    ],
)
def test_every_host_is_told_from_its_boot_on(world, settings, metadata):
    world.settings.pop("IDLE_MINUTES")  # it is the default
    world.put("on_create", "RUNNING" if settings else "ACTIVE")
    assert world.call("create.sh", **settings).returncode == 0
    call = world.calls("create")[0]
    script = f"--metadata-from-file=startup-script={LAUNCH / 'host_idle.sh'}"
    assert call[call.index(metadata) + 1] == script
