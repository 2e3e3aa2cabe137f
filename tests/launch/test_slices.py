"""create.sh, status.sh, delete.sh: the exact commands, what is there, failures half-way."""

import pytest

QUEUED = ["compute", "tpus", "queued-resources"]
GROUPS = ["compute", "instance-groups", "managed"]
AT = ["--project=my-project-123", "--zone=us-east5-a"]
SCOPES = "--scopes=https://www.googleapis.com/auth/cloud-platform"
END = [SCOPES, "--labels=notepad=note", "--quiet"]
MULTI = {"WAY": "group", "TPU": "v6e:4x4", "SLICES": "2"}


def test_a_queued_resource_argument_by_argument(world):
    done = world.call("create.sh")
    assert done.returncode == 0 and "4 chips of v5p on 1 host(s)" in done.stderr
    assert world.calls("create") == [
        QUEUED + ["create", "note", *AT, "--accelerator-type=v5p-8",
                  "--runtime-version=v2-alpha-tpuv5", "--node-id=note", *END]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"CAPACITY": "spot"}, ["--node-id=note", "--spot"]),
        ({"CAPACITY": "reserved"}, ["--node-id=note", "--reserved"]),
        (
            {"CAPACITY": "flex-start", "RUN_FOR": "12h"},
            ["--node-id=note", "--provisioning-model=flex-start", "--max-run-duration=12h"],
        ),
        ({"SLICES": "3"}, ["--node-count=3", "--node-prefix=note"]),
        (
            {"VALID_FOR": "6h", "NETWORK": "net", "SUBNETWORK": "sub", "IAP": "yes",
             "SERVICE_ACCOUNT": "t@my-project-123.iam.gserviceaccount.com"},
            ["--node-id=note", "--valid-until-duration=6h", "--network=net", "--subnetwork=sub",
             "--internal-ips", "--service-account=t@my-project-123.iam.gserviceaccount.com"],
        ),
    ],
)  # fmt: skip
def test_queued_resources_of_all_kinds(world, settings, words):
    assert world.call("create.sh", **settings).returncode == 0
    (call,) = world.calls("create")
    assert call[call.index("--runtime-version=v2-alpha-tpuv5") + 1 :] == [*words, *END]
    assert (call[0] == "alpha") == (settings.get("CAPACITY") == "flex-start")


def test_a_single_host_of_compute_engine(world):
    world.put("on_create", "RUNNING")
    assert world.call("create.sh", WAY="group", TPU="tpu7x:2x2x1").returncode == 0
    assert world.calls("create") == [
        ["compute", "instance-templates", "create", "note", "--project=my-project-123",
         "--machine-type=tpu7x-standard-4t", "--image-family=ubuntu-accel-2404-amd64-tpu-tpu7x",
         "--image-project=ubuntu-os-accelerator-images", "--maintenance-policy=TERMINATE",
         "--boot-disk-size=200GB", *END],
        GROUPS + ["create", "note-0", *AT, "--template=note", "--size=1",
                  "--default-action-on-vm-failure=do-nothing", "--quiet"],
    ]  # fmt: skip


def test_slices_of_compute_engine_have_a_topology_and_come_whole(world):
    world.put("on_create", "RUNNING RUNNING RUNNING RUNNING")
    assert world.call("create.sh", **MULTI).returncode == 0
    template, policy, first, second = world.calls("create")
    assert policy == [
        "compute", "resource-policies", "create", "workload-policy", "note",
        "--project=my-project-123", "--region=us-east5", "--type=HIGH_THROUGHPUT",
        "--accelerator-topology=4x4", "--quiet",
    ]  # fmt: skip
    assert first == GROUPS + [
        "create", "note-0", *AT, "--template=note", "--size=4",
        "--workload-policy=projects/my-project-123/regions/us-east5/resourcePolicies/note",
        "--target-size-policy-mode=bulk", "--default-action-on-vm-failure=do-nothing", "--quiet",
    ]  # fmt: skip
    assert second == ["note-1" if word == "note-0" else word for word in first]


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"CAPACITY": "spot"}, ["--provisioning-model=SPOT", "--instance-termination-action=STOP"]),
        (
            {"CAPACITY": "flex-start"},
            ["--provisioning-model=FLEX_START", "--max-run-duration=1d",
             "--instance-termination-action=DELETE", "--reservation-affinity=none"],
        ),
        (
            {"CAPACITY": "reserved", "RESERVATION": "mine"},
            ["--provisioning-model=RESERVATION_BOUND", "--reservation-affinity=specific",
             "--reservation=mine"],
        ),
        (
            {"NETWORK": "net", "SUBNETWORK": "sub", "IAP": "yes", "SERVICE_ACCOUNT": "t@x.com"},
            ["--network=net", "--subnet=sub", "--region=us-east5", "--no-address",
             "--service-account=t@x.com"],
        ),
    ],
)  # fmt: skip
def test_templates_of_all_kinds(world, settings, words):
    world.put("on_create", "RUNNING")
    assert world.call("create.sh", WAY="group", TPU="v6e:2x4", **settings).returncode == 0
    call, group = world.calls("create")
    assert call[call.index("--boot-disk-size=200GB") + 1 :] == [*words, *END]
    flexible = settings.get("CAPACITY") == "flex-start"  # such a group comes whole or waits
    assert ("--target-size-policy-mode=bulk" in group) == flexible


# ---------------------------------------------------------------- before it costs anything


def test_the_bucket_and_the_zone_are_asked_first(world):
    assert world.call("create.sh").returncode == 0
    verbs = [[word for word in ("cp", "accelerator-types", "create") if word in call]
             for call in world.calls()]  # fmt: skip
    assert [verb for (verb,) in filter(None, verbs)] == ["cp", "accelerator-types", "create"]
    assert (world.bucket / "note" / "writable").exists()


@pytest.mark.parametrize("script", ["create.sh", "run.sh"])
@pytest.mark.parametrize("settings", [{}, MULTI | {"SLICES": "1"}])
def test_a_bucket_that_cannot_be_written_is_one_line(world, script, settings):
    world.put("fail", "storage cp|||HTTPError 403: no storage.objects.create access")
    done = world.call(script, **settings)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "BUCKET=gs://my-bucket" in done.stderr and "403" in done.stderr
    assert world.changes() == []


def test_a_bucket_that_does_not_exist_comes_with_the_command_that_makes_it(world):
    done = world.call("create.sh", BUCKET="gs://other/folder")
    assert done.returncode == 1 and world.changes() == []
    assert "gcloud storage buckets create gs://other --project=my-project-123 " in done.stderr


@pytest.mark.parametrize(
    "settings, kind", [({}, "v5p-8"), ({"WAY": "group", "TPU": "v6e:2x4"}, "ct6e-standard-8t")]
)
def test_a_zone_that_does_not_have_it_is_one_line(world, settings, kind):
    world.put(f"no/{kind}")
    done = world.call("create.sh", **settings)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "ZONE=us-east5-a has no TPU=" in done.stderr and world.changes() == []


def test_a_gcloud_that_does_not_answer_is_not_an_absent_slice(world):
    world.put("fail", "describe|||PERMISSION_DENIED: the API is not enabled")
    done = world.call("create.sh")
    assert done.returncode == 1 and "API is not enabled" in done.stderr and world.changes() == []


# ---------------------------------------------------------------- what is there already


def test_what_is_there_is_left_alone(world):
    world.queued("ACTIVE")
    done = world.call("create.sh")
    assert done.returncode == 0 and "is there" in done.stderr
    assert world.changes() == [] and world.calls("cp") == []


def test_what_is_in_the_queue_is_waited_for(world):
    world.queued("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    done = world.call("create.sh")
    assert done.returncode == 0 and world.changes() == []
    assert "coming (PROVISIONING)" in done.stderr


def test_no_wait_returns_at_once(world):
    world.put("on_create", "WAITING_FOR_RESOURCES", "ACTIVE")
    done = world.call("create.sh", "--no-wait")
    assert done.returncode == 0 and "status.sh" in done.stderr
    assert (world.folder / "queued" / "note").read_text().startswith("WAITING")


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_what_was_taken_away_is_deleted_and_asked_for_anew(world, state):
    world.queued(state)
    assert world.call("create.sh").returncode == 0
    assert world.changes() == ["delete note", "create note"]
    assert world.calls("delete") == [QUEUED + ["delete", "note", *AT, "--force", "--quiet"]]


def test_what_is_being_deleted_is_waited_for(world):
    world.queued("SUSPENDING", "DELETING", "SUSPENDED")
    assert world.call("create.sh").returncode == 0
    assert world.changes() == ["delete note", "create note"]


def test_a_request_that_fails_while_it_waits(world):
    world.put("on_create", "WAITING_FOR_RESOURCES", "FAILED")
    done = world.call("create.sh")
    assert done.returncode == 1 and "could not be had (FAILED)" in done.stderr


@pytest.mark.parametrize(
    "there, asked",
    [
        (lambda world: world.queued("ACTIVE", kind="v6e-4"), {}),
        (lambda world: world.groups("RUNNING"), {"WAY": "group", "TPU": "v6e:2x4"}),
        (lambda world: world.groups("RUNNING RUNNING"), MULTI | {"SLICES": "1"}),
    ],
)
def test_another_tpu_under_the_same_name_is_refused(world, there, asked):
    there(world)
    done = world.call("create.sh", **asked)
    assert done.returncode == 1 and "delete it first" in done.stderr and world.changes() == []


@pytest.mark.parametrize("lost", ["TERMINATED", "STOPPING"])
def test_a_group_that_lost_a_host_is_made_again(world, lost):
    world.groups(f"RUNNING {lost} RUNNING RUNNING")
    world.put("policy/note", "note")
    world.put("on_create", "RUNNING RUNNING RUNNING RUNNING")
    assert world.call("create.sh", **MULTI | {"SLICES": "1"}).returncode == 0
    assert world.changes() == [
        *("delete note-0", "delete note", "delete note"),
        *("create note", "create note", "create note-0"),
    ]


def test_hosts_that_come_one_by_one_are_waited_for(world):
    world.groups("STAGING RUNNING STAGING STAGING", "RUNNING RUNNING RUNNING RUNNING")
    done = world.call("create.sh", **MULTI | {"SLICES": "1"})
    assert done.returncode == 0 and world.changes() == []


# ---------------------------------------------------------------- failures half-way


@pytest.mark.parametrize(
    "piece", ["create note ", "workload-policy", "create note-0", "create note-1"]
)
def test_a_creation_that_was_cut_short_is_finished_by_the_next_call(world, piece):
    world.put("on_create", "RUNNING RUNNING RUNNING RUNNING")
    world.put("fail", f"{piece}|||QUOTA_EXCEEDED: no more of these")
    done = world.call("create.sh", **MULTI)
    assert done.returncode == 1 and "QUOTA_EXCEEDED" in done.stderr and "goes on" in done.stderr
    made = len(world.changes()) - 1  # all but the one that failed
    (world.folder / "fail").unlink()
    assert world.call("create.sh", **MULTI).returncode == 0
    assert len(world.changes()) - 1 == 4 and 0 <= made < 4
    assert world.has("group/note-1") and world.has("policy/note")


def test_a_gcloud_that_fails_now_and_then_does_not_end_the_waiting(world):
    world.queued("PROVISIONING", *["PROVISIONING"] * 3, "ACTIVE")
    gcloud = world.folder / "bin" / "gcloud"
    fake = gcloud.resolve()
    gcloud.unlink()
    gcloud.write_text(
        "#!/usr/bin/env bash\n"
        'n=$(cat "$WORLD/n" 2>/dev/null || echo 0); echo $((n + 1)) >"$WORLD/n"\n'
        f'if ((n > 4 && n % 2)); then echo "connection reset" >&2; exit 1; fi\nexec {fake} "$@"\n'
    )
    gcloud.chmod(0o755)
    assert world.call("create.sh").returncode == 0 and world.changes() == []


def test_a_gcloud_that_stays_silent_ends_it_with_a_line(world):
    world.queued("PROVISIONING")
    world.put("fail", "queued-resources describe|||connection reset")
    done = world.call("create.sh")
    assert done.returncode == 1 and "connection reset" in done.stderr


# ---------------------------------------------------------------- delete.sh, status.sh


def test_delete_argument_by_argument(world):
    world.queued("ACTIVE")
    done = world.call("delete.sh")
    assert done.returncode == 0 and "nothing of note is paid for" in done.stderr
    assert world.calls("delete") == [QUEUED + ["delete", "note", *AT, "--force", "--quiet"]]
    assert not world.has("queued/note")


def test_delete_of_groups_takes_all_there_are(world):
    world.groups("RUNNING RUNNING RUNNING RUNNING", count=3)  # the settings say 2 today
    world.put("policy/note", "note")
    assert world.call("delete.sh", **MULTI).returncode == 0
    region = ["--project=my-project-123", "--region=us-east5", "--quiet"]
    assert world.calls("delete") == [
        *(GROUPS + ["delete", f"note-{slice}", *AT, "--quiet"] for slice in range(3)),
        ["compute", "resource-policies", "delete", "note", *region],
        ["compute", "instance-templates", "delete", "note", "--project=my-project-123", "--quiet"],
    ]


@pytest.mark.parametrize("settings", [{}, MULTI])
def test_deleting_twice_says_that_nothing_is_there(world, settings):
    done = world.call("delete.sh", **settings)
    assert done.returncode == 0 and "there was no note, in any zone" in done.stderr
    assert world.changes() == []


def test_a_deletion_that_was_cut_short_is_finished_by_the_next_call(world):
    world.groups("RUNNING RUNNING RUNNING RUNNING", count=2)
    world.put("policy/note", "note")
    world.put("fail", "delete note-1|||INTERNAL: try again")
    assert world.call("delete.sh", **MULTI).returncode == 1
    assert world.has("group/note-1") and not world.has("group/note-0")
    (world.folder / "fail").unlink()
    assert world.call("delete.sh", **MULTI).returncode == 0
    assert not any(world.has(path) for path in ("group/note-1", "policy/note", "template/note"))


def test_what_costs_money_is_deleted_even_if_the_bucket_cannot_be_read(world):
    world.queued("ACTIVE")
    world.put("fail", "storage|||403")
    assert world.call("delete.sh").returncode == 0 and not world.has("queued/note")


@pytest.mark.parametrize(
    "states, stands",
    [
        (["ACTIVE"], "ready"), (["WAITING_FOR_RESOURCES"], "coming"), (["SUSPENDED"], "dead"),
        (["SUSPENDING"], "going"), ([], "absent"),
    ],
)  # fmt: skip
def test_status_says_how_it_stands_and_changes_nothing(world, states, stands):
    if states:
        world.queued(*states)
    world.put("bucket/my-bucket/note/state/first", "running")
    world.put("bucket/my-bucket/note/runs/first/metrics.jsonl", '{"step": 1}', '{"step": 2}')
    done = world.call("status.sh")
    assert (
        done.returncode == 0 and f": {stands} ({states[0] if states else 'absent'})" in done.stdout
    )
    assert "run first: running" in done.stdout and 'bucket: {"step": 2}' in done.stdout
    paid = "still paid for: $16.80" if stands in ("ready", "going") else "nothing of note is paid"
    assert paid in done.stdout
    assert all(set(call) & {"describe", "cat", "list"} for call in world.calls())


def test_status_of_groups_that_are_not_all_there(world):
    world.groups("RUNNING RUNNING RUNNING RUNNING")
    assert ": partial" in world.call("status.sh", **MULTI).stdout
