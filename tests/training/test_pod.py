"""One run of two processes with four devices each is the run of one process with eight.

Either of the two has two engines side by side; the one process has one.

The processes are programs of their own, found by --hosts, each in a folder of its own, as hosts
have disks of their own: what they share is a bucket (tests/checkpoint/fake_bucket.py), where the
checkpoints lie and through which the weights go. A kill of one ends the others in a line, and the
same command goes on.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from notepad_jax import cli
from notepad_jax.parallel import hosts
from notepad_jax.telemetry.metrics import read_metrics
from tests.checkpoint.fake_bucket import cloud

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 600  # of a process, on a machine that does other things, too
SMALL = (
    f"--config.policy={ROOT / 'data' / 'starter'}", "--config.steps=3", "--config.data.tokens=512",
    "--config.parallel.devices=0", "--config.checkpoint.handoff=memory",
    "--config.rollout.documents=3", "--config.rollout.group_size=4",
    "--config.rollout.max_rounds=2", "--config.engine.slots=16", "--config.engine.pages=128",
    "--config.grpo.micro_batch_rows=8", "--config.rollout.local.samples=4",
    "--config.rollout.local.share=1.0",
)  # fmt: skip

VALIDATED = tuple(
    f"--config.validation.{word}"
    for word in ("every=3", "suite=synthetic", "lengths=512", "samples=5")
)


def started(work: Path, devices: int, *words: str, **more: str) -> subprocess.Popen:
    flags = os.environ.get("XLA_FLAGS", "")
    env = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "NOTEPAD_JAX_CACHE": str(work.parent / "cache"),  # what goes on compiles nothing
        "PYTHONPATH": str(ROOT),
        **more,
    }
    work.mkdir(exist_ok=True)
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "notepad_jax.cli", "train", "--json", *words]
    return subprocess.Popen(
        command, cwd=work, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@contextlib.contextmanager
def two(work: Path, *words: str, of_first: tuple[str, ...] = (), **more: str):
    """Two processes of one run; whatever happens, none is left."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    pair = [
        started(work / f"host-{i}", 4, "--hosts", f"{where},2,{i}", "--name", "two", *words,
                *(() if i else of_first), **more)
        for i in range(2)
    ]  # fmt: skip
    try:
        yield pair
    finally:
        for process in pair:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen) -> tuple[int, str]:
    _, said = process.communicate(timeout=MOST_SECONDS)
    return process.returncode, said


def metrics(work: Path, name: str) -> list[dict]:
    return read_metrics(work / "runs" / name)


@pytest.mark.slow
def test_two_processes_are_one_also_after_one_was_killed(tmp_path):
    assert ended(started(tmp_path / "alone", 8, "--name", "one", *SMALL, *VALIDATED))[0] == 0
    shared = (
        "--config.checkpoint.folder=gs://bucket/runs", "--config.checkpoint.handoff=storage",
        "--config.engine.replicas=2",
    )  # fmt: skip
    with cloud() as there:
        with two(tmp_path, *SMALL, *VALIDATED, *shared, **there.environment) as pair:
            until = time.monotonic() + MOST_SECONDS
            while "runs/two/checkpoints/1/life-1/manifest.json" not in there.objects:
                assert all(process.poll() is None for process in pair) and time.monotonic() < until
                time.sleep(0.05)
            pair[1].send_signal(signal.SIGKILL)
            pair[1].wait()
            code, said = ended(pair[0])
            assert code == 128 + signal.SIGTERM and "Traceback" not in said and "***" not in said
            (line,) = [line for line in said.splitlines() if line.startswith("notepad-jax")]
            assert line.startswith("notepad-jax: process 1 of 2 is gone; go on with, on every host")
            assert "--name two --resume --hosts=localhost:" in line
        assert max(line["step"] for line in metrics(tmp_path / "host-0", "two")) < 3
        # The first has the run's folder, and knows that and how it goes on.
        with two(tmp_path, of_first=("--resume",), **there.environment) as pair:
            for code, said in map(ended, pair):
                assert code == 0 and "notepad-jax" not in said, said
        steps = {name.split("/")[3] for name in there.objects}
        written = {name for name in there.objects if "/ocdbt.process_1/" in name}
    # The newest two, the best, and what their adapters lie on.
    assert {"2", "3", "base", "run.json", "trainer"} <= steps
    assert steps <= {"0", "2", "3", "base", "run.json", "best.json", "trainer"}
    assert written  # each writes its part
    assert not (tmp_path / "host-0" / "runs" / "two" / "checkpoints").exists()
    assert not (tmp_path / "host-1" / "runs" / "two").exists()
    one, many = metrics(tmp_path / "alone", "one"), metrics(tmp_path / "host-0", "two")
    assert [line["step"] for line in one] == [0, 1, 2, 3, 3]  # two of them validations
    assert len(one) == len(many) and any(line.get("groups/kept") for line in one)
    assert any(line.get("local/informative_share") for line in one)
    for a, b in zip(one, many, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            # Losses are sums around 0 of numbers around 1; counts and rewards are exact.
            loose = 1e-5 if "/" not in name or name.startswith("update/") else 0
            assert b[name] == pytest.approx(value, rel=loose, abs=loose), name


@contextlib.contextmanager
def reading(work: Path, run: str, **more: str):
    """A reader of a run, on a host of its own; whatever happens, it is gone in the end."""
    work.mkdir()
    command = [sys.executable, "-m", "notepad_jax.cli", "rollout", run, "--as", "reader"]
    with (work / "said").open("wb") as said:
        one = subprocess.Popen(
            command,
            cwd=work,
            stdout=said,
            stderr=said,
            env=os.environ | {"PYTHONPATH": str(ROOT), **more},
        )
    try:
        yield one
    finally:
        one.kill()
        one.wait()


@pytest.mark.slow
def test_a_gang_with_a_reader_apart_goes_on_when_one_of_it_was_killed(tmp_path):
    """The reader reads on meanwhile, and the end is that of a gang that nobody disturbed."""
    apart = (
        *SMALL, "--config.rollout.max_rounds=1", "--config.rollout.local.samples=0",
        "--config.checkpoint.folder=gs://bucket/runs", "--config.fleet.apart=true",
    )  # fmt: skip
    told = []
    for killed in (False, True):
        work = tmp_path / f"killed-{killed}"
        work.mkdir()
        with cloud() as there, reading(work / "reader", "gs://bucket/runs/two",
                                       **there.environment) as reader:  # fmt: skip
            with two(work, *apart, **there.environment) as pair:
                if killed:
                    until = time.monotonic() + MOST_SECONDS
                    while "runs/two/policy/1/life-1/manifest.json" not in there.objects:
                        assert pair[0].poll() is None and time.monotonic() < until
                        time.sleep(0.05)
                    pair[1].kill()
                    assert ended(pair[0])[0] == 128 + signal.SIGTERM
                    assert max(line["step"] for line in metrics(work / "host-0", "two")) < 3
                else:
                    for code, said in map(ended, pair):
                        assert code == 0, said
            if killed:
                with two(work, of_first=("--resume",), **there.environment) as pair:
                    for code, said in map(ended, pair):
                        assert code == 0, said
            assert reader.wait(60) == 0, (work / "reader" / "said").read_text()
        told.append((work / "host-0" / "runs" / "two" / "metrics.jsonl").read_bytes())
    assert told[0].count(b"\n") == 3 and told[0] == told[1]


@pytest.mark.slow
def test_a_folder_that_not_all_see_is_refused_by_all(tmp_path):
    """Before anything is loaded, and nothing is left of the start."""
    with two(tmp_path, *SMALL) as pair:
        for code, said in map(ended, pair):
            assert code == 1 and said.count("\n") == 1, said
            assert "not one place for all processes" in said and "checkpoint.folder" in said
    assert not (tmp_path / "host-0" / "runs" / "two").exists()


def test_a_port_that_is_taken_is_one_line_at_once(tmp_path, monkeypatch, capsys):
    """For the first process, and for one that finds another program there."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("localhost", 0)) as taken:
        where = f"localhost:{taken.getsockname()[1]}"
        threading.Thread(target=lambda: taken.accept()[0].sendall(b"HTTP/1.0 400\n")).start()
        for index, words in ((1, "is not the first process of a run"), (0, "cannot be had")):
            assert cli.main(["train", "--hosts", f"{where},2,{index}", "--name", "x"]) == 1
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and words in said and "choose another one" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("where", ["nowhere", "host:1,2", "host:1,2,2", "host,2,0"])
def test_hosts_that_cannot_be_are_one_line(tmp_path, monkeypatch, capsys, where):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--hosts", where, "--name", "x"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "HOST:PORT,COUNT,INDEX" in said
    assert not (tmp_path / "runs").exists()


def test_auto_asks_jax_where_the_first_process_is(monkeypatch):
    """As under SLURM; here, where there is nothing of the kind, it says so in a line."""
    with (
        pytest.raises(ValueError, match=r"cannot be joined: .*\S"),
        hosts.joined("auto", print, print),
    ):
        pass
    known = {"JOB_ID": 4000, "STEP_NODELIST": "node7", "NTASKS": 4, "PROCID": 2, "LOCALID": 1,
             "STEP_NUM_NODES": 2}  # fmt: skip
    for name, value in known.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    host, port, count, index, devices = hosts._found_by_jax()
    assert (host, count, index, devices) == ("node7", 4, 2, [1]) and port > 1024


@pytest.mark.slow
def test_a_gang_learns_from_what_its_first_process_chose(tmp_path):
    """The second finds the choice in the bucket, and reads the same objects."""
    apart = (
        *SMALL, "--config.rollout.max_rounds=1", "--config.rollout.local.samples=0",
        "--config.checkpoint.folder=gs://bucket/runs", "--config.fleet.apart=true",
        "--config.fleet.live=true", "--config.fleet.slack=1",
    )  # fmt: skip
    with cloud() as there, reading(tmp_path / "reader", "gs://bucket/runs/two",
                                   **there.environment) as reader:  # fmt: skip
        with two(tmp_path, *apart, **there.environment) as pair:
            for code, said in map(ended, pair):
                assert code == 0, said
        assert reader.wait(60) == 0, (tmp_path / "reader" / "said").read_text()
    assert max(line["rollout/age_max"] for line in metrics(tmp_path / "host-0", "two")
               if "rollout/age_max" in line) <= 2  # fmt: skip
