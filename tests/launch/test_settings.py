"""Settings are read and not executed; what is wrong in them is one line before anything starts."""

import re
import subprocess

import pytest

from tests.launch.conftest import LAUNCH, SETTINGS

SCRIPTS = ["create.sh", "setup.sh", "run.sh", "logs.sh", "status.sh", "delete.sh", "gke.sh"]


def refused(world, done, *named):
    """One line on standard error that names these, and nothing happened."""
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in named)
    assert world.calls() == []


@pytest.mark.parametrize(
    "setting, value, mend",
    [
        ("NAME", "", "empty"),
        ("PROJECT", "", "empty"),
        ("ZONE", "", "empty"),
        ("BUCKET", "", "empty"),
        ("NAME", "Note", "small letters"),
        ("NAME", "9note", "beginning with a letter"),
        ("NAME", "note-", "small letters"),
        ("NAME", "a b", "small letters"),
        ("NAME", "note;reboot", "small letters"),
        ("NAME", "$(reboot)", "small letters"),
        ("NAME", "n" * 41, "at most 40"),
        ("NAME", "nöte", "small letters"),
        ("PROJECT", "my project", "project id"),
        ("PROJECT", "--quiet", "project id"),
        ("ZONE", "us-east5", "us-east5-a"),
        ("ZONE", "us-east5-a --async", "us-east5-a"),
        ("BUCKET", "my-bucket", "gs://bucket"),
        ("BUCKET", "gs://my-bucket/", "without a '/'"),
        ("BUCKET", "gs://My-bucket", "gs://bucket"),
        ("BUCKET", "gs://my-bucket/a b", "gs://bucket"),
        ("BUCKET", "gs://my-bucket/../x", "gs://bucket"),
        ("SLICES", "0", "from 1 on"),
        ("SLICES", "two", "from 1 on"),
        ("SLICES", "1+1", "from 1 on"),
        ("WAY", "mig", "queued or group"),
        ("CAPACITY", "preemptible", "on-demand, spot, flex-start or reserved"),
        ("VALID_FOR", "6 hours", "30m"),
        ("RECREATIONS", "-1", "whole number"),
        ("SERVICE_ACCOUNT", "trainer", "address"),
        ("NETWORK", "a/b", "network"),
        ("IAP", "true", "yes or no"),
        ("COMMAND", "serve", "train, quickstart or eval"),
        ("CONFIG", "../../etc/passwd;x", "config"),
        ("RUN", "../first", "letters, digits"),
        ("RUN", ".first", "letters, digits"),
        ("RUN", "a b", "letters, digits"),
        ("FLAGS", "steps=3", "--key=value"),
        ("FLAGS", "--config.steps 3", "'3'"),
        ("FLAGS", "--config.policy=$HOME", "--key=value"),
        ("FLAGS", "--config.policy='x'", "--key=value"),
        ("FLAGS", "--config.a=1;reboot", "--key=value"),
        ("FLAGS", "--name=other", "RUN, CONFIG"),
        ("FLAGS", "--resume", "RUN, CONFIG"),
        ("SYNC_SECONDS", "0", "from 1 on"),
        ("POLL_SECONDS", "soon", "seconds"),
        ("GKE_IMAGE", "image name", "container image"),
        ("TPU", "v5p", "a generation and a topology"),
        ("TPU", "v5p:8", "a generation and a topology"),
        ("TPU", "v9:2x2", "v5e, v5p, v6e and tpu7x"),
        ("TPU", "v5e:2x2x1", "1x1, 2x2, 2x4"),
        ("TPU", "v6e:4x2", "1x1, 2x2, 2x4"),
        ("TPU", "v6e:32x32", "16x16"),
        ("TPU", "v5p:2x2", "2x2x1, 2x2x2"),
        ("TPU", "v5p:1x1x1", "2x2x1, 2x2x2"),
        ("TPU", "v5p:8x4x4", "A <= B <= C"),
        ("TPU", "v5p:4x4x6", "multiples of 4"),
        ("TPU", "v5p:0x0x0", "multiples of 4"),
        ("TPU", "v5p:4x4x4x4", "multiples of 4"),
        ("TPU", "v5p:08x08x08", "multiples of 4"),
        ("TPU", "v5p:16x20x20", "6144"),
        ("TPU", "v5p:4x4x99999999999999999999", "6144"),
        ("TPU", "v5p:4x4x16", "4x8x8"),
        ("TPU", "tpu7x:2x2x1", "WAY=group"),
        ("RESERVATION", "mine", "CAPACITY=reserved"),
    ],
)
def test_a_bad_setting_is_one_line(world, setting, value, mend):
    refused(world, world.call("create.sh", **{setting: value}), setting, mend)


@pytest.mark.parametrize(
    "settings, mend",
    [
        ({"TPU": "v5e:2x4", "WAY": "group"}, "WAY=queued"),
        ({"CAPACITY": "reserved", "WAY": "group", "TPU": "v6e:2x2"}, "RESERVATION"),
        ({"VALID_FOR": "2h", "WAY": "group", "TPU": "v6e:2x2"}, "VALID_FOR"),
    ],
)
def test_settings_that_do_not_fit_together(world, settings, mend):
    refused(world, world.call("create.sh", **settings), mend)


@pytest.mark.parametrize(
    "tpu, kind, runtime",
    [
        ("v5e:1x1", "v5litepod-1", "v2-alpha-tpuv5-lite"),
        ("v5e:2x4", "v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5e:16x16", "v5litepod-256", "v2-alpha-tpuv5-lite"),
        ("v6e:2x2", "v6e-4", "v2-alpha-tpuv6e"),
        ("v6e:8x16", "v6e-128", "v2-alpha-tpuv6e"),
        ("v5p:2x2x1", "v5p-8", "v2-alpha-tpuv5"),
        ("v5p:2x4x4", "v5p-64", "v2-alpha-tpuv5"),
        ("v5p:4x4x4", "v5p-128", "v2-alpha-tpuv5"),
        ("v5p:4x8x8", "v5p-512", "v2-alpha-tpuv5"),
        ("v5p:8x12x16", "v5p-3072", "v2-alpha-tpuv5"),
        ("v5p:16x16x24", "v5p-12288", "v2-alpha-tpuv5"),
    ],
)
def test_what_google_calls_a_topology(world, tpu, kind, runtime):
    command = world.call("create.sh", "--dry-run", TPU=tpu).stdout.splitlines()[-1]
    assert f" --accelerator-type={kind} --runtime-version={runtime} " in command


@pytest.mark.parametrize(
    "tpu, machine, hosts",
    [
        ("v5p:2x2x1", "ct5p-hightpu-4t", 1),
        ("v5p:4x4x16", "ct5p-hightpu-4t", 64),
        ("v6e:1x1", "ct6e-standard-1t", 1),
        ("v6e:2x4", "ct6e-standard-8t", 1),
        ("v6e:4x4", "ct6e-standard-4t", 4),
        ("tpu7x:2x2x1", "tpu7x-standard-4t", 1),
        ("tpu7x:4x4x4", "tpu7x-standard-4t", 16),
    ],
)
def test_the_machines_of_a_topology(world, tpu, machine, hosts):
    commands = world.call("create.sh", "--dry-run", TPU=tpu, WAY="group").stdout
    assert f" --machine-type={machine} " in commands and f" --size={hosts} " in commands


def test_lines_are_read_as_people_write_them(world):
    text = "# a comment\r\n\n  # another\nNAME=\"quoted\"\r\nPROJECT='my-project-123' \n"
    text += "ZONE=us-east5-a\nBUCKET=gs://my-bucket\nFLAGS=--config.a=1 --config.b=2"  # no end
    file = world.folder / "odd.env"
    file.write_text(text)
    done = world.command(LAUNCH / "gke.sh", "--settings", file)
    assert done.returncode == 0 and "name: quoted\n" in done.stdout
    assert "work --config.a=1 --config.b=2 " in done.stdout


def test_nothing_in_the_file_is_executed(world):
    world.put("settings.env", *(f"{key}={value}" for key, value in SETTINGS.items()),
              f"RUN=$(touch {world.folder}/done)")  # fmt: skip
    done = world.command(LAUNCH / "create.sh", "--settings", world.folder / "settings.env")
    refused(world, done, "RUN")
    assert not world.has("done")


@pytest.mark.parametrize("line", ["TPUS=v5p:2x2x1", "export NAME=note", "name=note", "PATH=/tmp"])
def test_a_key_that_does_not_exist_is_named_with_its_line(world, line):
    world.put("settings.env", "NAME=note", line)
    done = world.command(LAUNCH / "create.sh", "--settings", world.folder / "settings.env")
    refused(world, done, "settings.env, line 2", line.partition("=")[0], "TPU")


def test_a_line_without_a_value(world):
    world.put("settings.env", "NAME")
    done = world.command(LAUNCH / "create.sh", "--settings", world.folder / "settings.env")
    refused(world, done, "line 1", "KEY=VALUE")


def test_without_settings_it_says_where_they_come_from(world):
    done = world.command(LAUNCH / "create.sh", "--settings", world.folder / "none.env")
    refused(world, done, "none.env", "settings.env.example")


def test_set_changes_one_call(world):
    done = world.call("create.sh", "--dry-run", "--set", "CAPACITY=spot", "--set", "TPU=v6e:2x2")
    assert "--accelerator-type=v6e-4" in done.stdout and " --spot " in done.stdout
    refused(world, world.call("create.sh", "--set", "TPU=v6e:3x3"), "3x3")
    refused(world, world.call("create.sh", "--set", "SPOT=yes"), "--set", "SPOT")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("option", ["--dryrun", "now", "--set"])
def test_an_option_that_does_not_exist(world, script, option):
    done = world.call(script, option)
    assert done.returncode == 2 and "--help" in done.stderr and world.calls() == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches_and_needs_no_settings(world, script):
    done = world.command(LAUNCH / script, "--help")
    assert done.returncode == 0 and done.stderr == "" and world.calls() == []
    told = set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    source = (LAUNCH / script).read_text()
    own = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"^    only (.*)$", source, re.M))))
    assert f"launch/{script}" in done.stdout and "set -euo" not in done.stdout
    assert told >= {"--settings", "--set", "--dry-run", "--help"} | (own - {"--"})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_calls_nobody(world, script):
    for settings in ({}, {"TPU": "v6e:4x4", "WAY": "group"}):
        done = world.call(script, "--dry-run", **settings)
        assert done.returncode == 0, done.stderr
        assert done.stdout and world.calls() == []


def test_the_example_holds_every_setting_with_its_default(world):
    example = (LAUNCH / "settings.env.example").read_text()
    source = (LAUNCH / "settings.sh").read_text()
    keys = re.search(r"^KEYS=\((.*?)\)$", source, re.M | re.S)[1].split()
    lines = dict(re.findall(r"^([A-Z_]+)=(.*)$", example, re.M))
    assert set(lines) == set(keys)
    defaults = re.search(r"^NAME=.*?(?=^KEYS)", source, re.M | re.S)[0]
    asked = "; ".join(f'echo "${key}"' for key in lines)
    said = subprocess.run(["bash", "-c", f"{defaults}\n{asked}"], capture_output=True, text=True,
                          timeout=10, check=True).stdout  # fmt: skip
    assert said.splitlines() == list(lines.values())


def test_a_machine_without_gcloud_is_told_so(world):
    (world.folder / "bin" / "gcloud").unlink()
    for tool in ("bash", "dirname", "basename", "mktemp", "sed", "env"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, timeout=10).stdout
        (world.folder / "bin" / tool).symlink_to(found.strip())
    world.environment["PATH"] = str(world.folder / "bin")
    refused(world, world.call("create.sh"), "Google Cloud CLI")
