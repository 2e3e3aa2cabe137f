"""What gke.sh prints for Kubernetes: every field is JobSet's, and its lines do what they should."""

import pytest

from tests.launch.conftest import ROOT, called, says_what_is_called, steps, trained

yaml = pytest.importorskip("yaml")

FLAGS = {"FLAGS": "--config.steps=20 --config.seed=1"}
WORDS = "train --config quickstart --name first"
PLAIN = f"{WORDS} --config.checkpoint.folder="
SCHEMA = yaml.safe_load((ROOT / "tests" / "launch" / "jobset_v1alpha2.yaml").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def fits(value, schema, where="the manifest"):
    """Asserts that all of a value is what a CustomResourceDefinition lets be: no field more."""
    if schema.get("x-kubernetes-int-or-string"):
        assert type(value) in (int, str), f"{where} is {value!r}"
        return
    assert type(value) is TYPES[schema["type"]], f"{where} is {value!r}"
    assert value in schema.get("enum", [value]), f"{where} is {value!r}"
    if schema["type"] == "array":
        for one in value:
            fits(one, schema["items"], where)
    elif (
        schema["type"] == "object" and where != "the manifest.metadata"
    ):  # that is the API server's
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        assert set(schema.get("required", ())) <= set(value), f"{where} lacks a field"
        for key, below in value.items():
            assert key in known or others, f"{where} has {key}"
            fits(below, known.get(key, others), f"{where}.{key}")


def manifests(text):
    """What a script printed, each held against JobSet's schema."""
    found = list(yaml.safe_load_all(text))
    for one in found:
        assert (one["apiVersion"], one["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert set(one["metadata"]) <= {"name", "labels", "annotations"}
        fits(one, SCHEMA)
    return found


def jobs(manifest):
    """The jobs of a manifest, and the containers of their pods."""
    replicated = manifest["spec"]["replicatedJobs"]
    made = [one["template"]["spec"] for one in replicated]
    return made, [job["template"]["spec"]["containers"][0] for job in made]


def test_the_schema_finds_what_is_not_jobsets(world):
    text = world.call("gke.sh").stdout
    for old, new in (
        ("maxRestarts", "maxRestart"),
        ("backoffLimit: 0", "backoffLimit: none"),
        ("restartPolicy: Never", "restartPolicies: Never"),
        ("fieldPath:", "path:"),
        ("      replicas: 1", "      replicas: '1'"),
    ):
        assert old in text
        with pytest.raises(AssertionError, match="the manifest.spec"):
            manifests(text.replace(old, new))


def test_the_pod_of_a_jobset_does_what_a_host_does(world, host):
    """The manifest's own lines, run as the container would run them."""
    assert world.call("setup.sh", "--code-only").returncode == 0
    (manifest,) = manifests(world.call("gke.sh", **FLAGS, CAPACITY="spot").stdout)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert manifest["metadata"]["name"] == "note" and job["parallelism"] == 1
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x1",
        "cloud.google.com/gke-spot": "true",
    }
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    world.environment |= {"SLICE": "0", "JOB_COMPLETION_INDEX": "0"}
    done = world.command(*container["command"], *container["args"])
    assert done.returncode == 0, done.stderr
    assert trained(world) == [f"{PLAIN} --config.steps=20 --config.seed=1"]
    assert world.state() == "done" and steps(world) == (["1", "2"], [1, 2])
    assert "exit code 0" in done.stdout


def test_slices_of_a_jobset(world):
    flexible = world.call("gke.sh", CAPACITY="flex-start").stdout
    assert 'cloud.google.com/gke-flex-start: "true"' in flexible
    reserved = {"CAPACITY": "reserved", "RESERVATION": "mine"}
    for tpu, hosts, chips in (("v6e:4x4", 4, 4), ("v5e:2x4", 1, 8), ("tpu7x:4x4x4", 16, 4)):
        slices = "2" if hosts > 1 else "1"
        text = world.call("gke.sh", TPU=tpu, SLICES=slices, **reserved).stdout
        replicated = manifests(text)[0]["spec"]["replicatedJobs"][0]
        job = replicated["template"]["spec"]
        pod = job["template"]["spec"]
        assert (
            str(replicated["replicas"]) == slices
            and job["completions"] == job["parallelism"] == hosts
        )
        assert pod["containers"][0]["resources"]["requests"] == {"google.com/tpu": chips}
        assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "mine"
        lines = pod["containers"][0]["args"][0]
        assert f"SLICE * {hosts} + JOB_COMPLETION_INDEX" in lines
        assert f"HOSTS={hosts} ALL_HOSTS={hosts * int(slices)}" in lines


ROLLOUTS = {
    "ROLLOUTS": "3", "TRAINER_IMAGE": "me/trainer:2", "TRAINER": "python3 -m learn --steps=20",
    "FLAGS": "--policy=gs://my-bucket/policy",
}  # fmt: skip


def test_a_trainer_stands_beside_its_rollouts(world, host):
    assert world.call("setup.sh", "--code-only").returncode == 0
    (manifest,) = manifests(world.call("gke.sh", **ROLLOUTS, TRAINER_POOL="gpus").stdout)
    rollout, trainer = manifest["spec"]["replicatedJobs"]
    assert (rollout["name"], rollout["replicas"], trainer["replicas"]) == ("rollout", 3, 1)
    assert trainer["dependsOn"] == [{"name": "rollout", "status": "Ready"}]
    assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"]
    pods = [job["template"]["spec"]["template"]["spec"] for job in (rollout, trainer)]
    assert pods[1]["nodeSelector"] == {"cloud.google.com/gke-nodepool": "gpus"}
    server, learner = (pod["containers"][0] for pod in pods)
    assert server["resources"]["limits"] == {"google.com/tpu": 4}
    assert all(one["envFrom"] == [{"secretRef": {"name": "note"}}] for one in (server, learner))
    assert learner["args"] == ["exec python3 -m learn --steps=20"]
    told = {one["name"]: one["value"] for one in learner["env"]}
    assert told["ROLLOUTS"].split() == [f"http://note-rollout-{n}-0.note:8000" for n in range(3)]
    # The server's own lines, run as the container would run them.
    says_what_is_called(world)
    done = world.command(*server["command"], *server["args"])
    assert done.returncode == 0, done.stderr
    said = called(world)
    assert "--editable code[tpu,serve]" in said[0]
    assert said[-1] == (
        "notepad-jax serve --rl --host 0.0.0.0 --port 8000 --config quickstart "
        "--policy=gs://my-bucket/policy"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"TRAINER": ""}, "ROLLOUTS=3 needs somebody who trains: TRAINER_IMAGE, and TRAINER"),
        ({"TRAINER_IMAGE": ""}, "needs somebody who trains"),
        ({"TRAINER": 'sh -c "reboot"'}, "a command line, with letters, digits"),
        ({"TRAINER_IMAGE": "me trainer"}, "the name of a container image"),
        ({"TRAINER_POOL": "My Pool"}, "the name of a node pool"),
        ({"ROLLOUTS": "many"}, "a whole number"),
        ({"TPU": "v6e:4x4"}, "a server is one host, and TPU=v6e:4x4 has 4; take v6e:2x4"),
        ({"SLICES": "2"}, "counts the servers; set SLICES=1"),
    ],
)
def test_rollouts_that_cannot_be_are_one_line(world, change, said):
    done = world.call("gke.sh", **ROLLOUTS | change)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert said in done.stderr


# ---------------------------------------------------------------- readers apart from the trainer

APART = "--config.fleet.apart=true --config.fleet.bundles=3 --config.rollout.max_rounds=1"


def test_readers_stand_beside_the_run_each_alone(world):
    run, apart = manifests(world.call("gke.sh", READERS="3", TPU="v6e:4x4", **FLAGS).stdout)
    assert [one["metadata"]["name"] for one in (run, apart)] == ["note", "note-readers"]
    assert run["metadata"]["labels"] == apart["metadata"]["labels"] == {"notepad": "note"}
    (slice_,), _ = jobs(run)  # restarted whole
    assert (slice_["backoffLimit"], run["spec"]["failurePolicy"]["maxRestarts"]) == (0, 10)
    (reader,), (container,) = jobs(apart)
    assert apart["spec"]["replicatedJobs"][0]["replicas"] == 3
    # Of one indexed job GKE would make one slice of several hosts.
    assert reader["parallelism"] == reader["completions"] == 1 and "completionMode" not in reader
    assert reader["backoffLimit"] == 10
    (rule,) = reader["podFailurePolicy"]["rules"]  # wants pods that are not restarted in place
    assert rule["action"] == "Ignore" and reader["template"]["spec"]["restartPolicy"] == "Never"
    assert container["resources"]["limits"] == {"google.com/tpu": 8}
    assert host_of(reader) == ("tpu-v6e-slice", "2x4")


def host_of(job):
    where = job["template"]["spec"]["nodeSelector"]
    return where[f"{LABEL}-accelerator"], where[f"{LABEL}-topology"]


LABEL = "cloud.google.com/gke-tpu"


def test_readers_may_be_of_another_generation(world):
    settings = {"READERS": "1", "READERS_TPU": "v5e:2x2", "CAPACITY": "spot"}
    run, apart = manifests(world.call("gke.sh", **settings).stdout)
    assert host_of(jobs(run)[0][0]) == ("tpu-v5p-slice", "2x2x1")
    (reader,), (container,) = jobs(apart)
    assert host_of(reader) == ("tpu-v5-lite-podslice", "2x2")
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert reader["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"


def test_trainer_and_readers_name_one_place(world, host):
    """Both pods' own lines, run as their containers would run them."""
    assert world.call("setup.sh", "--code-only").returncode == 0
    run, apart = manifests(world.call("gke.sh", READERS="3", **FLAGS).stdout)
    (_, (trainer,)), (_, (reader,)) = jobs(run), jobs(apart)
    world.environment |= {"SLICE": "0", "JOB_COMPLETION_INDEX": "0"}
    done = world.command(*trainer["command"], *trainer["args"])
    assert done.returncode == 0, done.stderr
    place = "gs://my-bucket/note/runs"
    flags = FLAGS["FLAGS"]
    assert trained(world) == [f"{WORDS} --config.checkpoint.folder={place} {APART} {flags}"]
    says_what_is_called(world)
    world.environment |= {"READER": "2", "HOME": str(world.folder / "another")}
    (world.folder / "another").mkdir()
    done = world.command(*reader["command"], *reader["args"])
    assert done.returncode == 0, done.stderr
    assert called(world)[-1] == f"notepad-jax rollout {place}/first --as reader-2"


def test_a_copy_leaves_in_the_bucket_what_readers_and_steps_wrote(world, host):
    assert world.call("setup.sh", "--code-only").returncode == 0
    (run, _) = manifests(world.call("gke.sh", READERS="3").stdout)
    _, (trainer,) = jobs(run)
    there = ("fleet/plan/4", "policy/3/manifest", "checkpoints/3/params")
    for name in there:
        world.put(f"bucket/my-bucket/note/runs/first/{name}", "whole")
    world.put("bucket/my-bucket/note/runs/first/history.jsonl", "line")
    world.environment |= {"SLICE": "0", "JOB_COMPLETION_INDEX": "0"}
    done = world.command(*trainer["command"], *trainer["args"])
    assert done.returncode == 0, done.stderr
    assert all(world.has(f"bucket/my-bucket/note/runs/first/{name}") for name in there)
    here = world.folder / "home" / "notepad" / "runs" / "first"
    assert (here / "history.jsonl").exists() and "--resume" in trained(world)[0].split()
    assert [name for name in there if (here / name).exists()] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"READERS": "some"}, "a whole number"),
        ({**ROLLOUTS}, "ROLLOUTS=3 serve somebody else's; set one of them to 0"),
        ({"READERS_TPU": "v6e:4x4"}, "a reader is one host, and that has 4; take v6e:2x4"),
        ({"READERS_TPU": "v5p:2x2"}, "READERS_TPU=v5p:2x2: there is no topology 2x2 of v5p"),
        ({"READERS_TPU": "v9:2x2"}, "READERS_TPU=v9:2x2: there is no generation v9"),
        ({"READERS_TPU": "v5e"}, "READERS_TPU='v5e' cannot be: a generation and a topology"),
        ({"READERS": "0", "READERS_TPU": "v5e:2x4"}, "is for READERS above 0; leave it empty"),
        ({"COMMAND": "eval"}, "COMMAND=eval reads by itself; set READERS=0"),
        ({"BUCKET": ""}, "BUCKET is empty"),
        ({"FLAGS": "--config.fleet.apart=false"}, "READERS=2 says that; leave it out"),
        ({"FLAGS": "--config.fleet.readers=2"}, "READERS=2 says that; leave it out"),
    ],
)
def test_readers_that_cannot_be_are_one_line(world, change, said):
    done = world.call("gke.sh", **{"READERS": "2"} | change)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert said in done.stderr
