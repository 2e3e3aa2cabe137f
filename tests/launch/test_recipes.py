"""Recipes for other engines: each starts the same two commands with one place."""

import shutil
import subprocess

import pytest

from tests.launch.conftest import LAUNCH, called, says_what_is_called

RECIPES = LAUNCH / "recipes"


def test_a_job_group_of_skypilot_has_one_trainer_and_readers_of_one_place():
    yaml = pytest.importorskip("yaml")
    head, *tasks = yaml.safe_load_all((RECIPES / "skypilot.yaml").read_text())
    assert head["execution"] == "parallel" and head["primary_tasks"] == ["trainer"]
    names = [task["name"] for task in tasks]
    assert names == ["trainer", "reader-0", "reader-1"]
    assert len({str(task["envs"]) for task in tasks}) == 1
    assert "--config.fleet.apart=true --config.fleet.bundles=2" in tasks[0]["run"]
    assert '--config.checkpoint.folder="$RUNS"' in tasks[0]["run"]
    for name, task in zip(names[1:], tasks[1:], strict=True):
        assert task["run"].strip().endswith(f'rollout "$RUNS/$NAME" --as {name}')
    for task in tasks:
        subprocess.run(["bash", "-n", "-c", task["run"]], check=True, timeout=10)


def test_slurm_is_asked_for_a_trainer_and_an_array_of_readers(world):
    """An `sbatch` that runs at once what it is given, twice: the second time the run goes on."""
    bin_ = world.folder / "bin"
    (bin_ / "sbatch").write_text(
        '#!/bin/sh\necho "sbatch $*" >>"$WORLD/said"\n'
        'for word; do case $word in --wrap=*) exec sh -c "${word#--wrap=}";; esac; done\n'
    )
    (bin_ / "notepad-jax").write_text(
        '#!/bin/sh\necho "notepad-jax $*" >>"$WORLD/said"\nmkdir -p "runs/my run"\n'
    )
    for name in ("sbatch", "notepad-jax"):
        (bin_ / name).chmod(0o755)
    shared = world.folder / "shared runs"
    world.environment |= {
        "RUNS": str(shared), "NAME": "my run", "READERS": "3", "NODE": "--gres=gpu:1 -p fast",
        "SLURM_ARRAY_TASK_ID": "2",
    }  # fmt: skip
    for again in ("", " --resume"):
        done = world.command(RECIPES / "slurm.sh", "--config=chat", cwd=world.folder)
        assert done.returncode == 0, done.stderr
        said = called(world)[-4:]
        assert "--requeue" in said[0] and "--gres=gpu:1 -p fast" in said[0]
        assert said[1] == (
            f"notepad-jax train --config=chat --name my run --config.checkpoint.folder={shared} "
            f"--config.fleet.apart=true --config.fleet.bundles=3 "
            f"--config.rollout.max_rounds=1{again}"
        )
        assert "--array=0-2" in said[2] and "--gres=gpu:1 -p fast" in said[2]
        assert said[3] == f"notepad-jax rollout {shared}/my run --as reader-2"


def test_a_run_of_slurm_without_a_place_is_one_line(world):
    done = world.command(RECIPES / "slurm.sh", cwd=world.folder)
    assert done.returncode and "say RUNS, a folder that all nodes see" in done.stderr


def test_a_host_of_a_group_reads_until_the_run_has_ended(world, host):
    """Told by the metadata server where; a reader that fails is begun again."""
    assert world.call("setup.sh", "--code-only").returncode == 0
    home = world.folder / "home"
    for key, value in (("notepad-root", "gs://my-bucket/note"), ("notepad-run", "first")):
        (home / key).write_text(value)
    says_what_is_called(world)
    script = (RECIPES / "group_host.sh").read_text()
    assert "export HOME=/root\n" in script and "sleep 30" in script
    script = script.replace("export HOME=/root\n", "").replace("sleep 30", "sleep 0")
    done = world.command("bash", "-c", script)
    assert done.returncode == 0, done.stderr
    name = subprocess.run(["hostname"], capture_output=True, text=True, timeout=10).stdout.strip()
    assert called(world)[-1] == f"notepad-jax rollout gs://my-bucket/note/runs/first --as {name}"


@pytest.mark.parametrize("name", ["slurm.sh", "group_host.sh"])
def test_a_recipe_is_bash(name):
    bash = shutil.which("bash")
    subprocess.run([bash, "-n", RECIPES / name], check=True, timeout=10)
