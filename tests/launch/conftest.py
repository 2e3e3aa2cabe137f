"""Launch scripts in a small world: a fake gcloud that records, a bucket and hosts in folders.

No test here reaches the network: `gcloud` on the path is fake_gcloud.sh, and everything else that
a script could call is what a bare machine has.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SETTINGS = {
    "NAME": "note", "PROJECT": "my-project-123", "ZONE": "us-east5-a", "BUCKET": "gs://my-bucket",
    "WAY": "queued", "POLL_SECONDS": "0.1", "TRIES": "3", "IDLE_MINUTES": "0",
}  # fmt: skip


class World:
    def __init__(self, folder: Path):
        self.folder = folder
        self.bucket = folder / "bucket" / "my-bucket"
        self.settings = dict(SETTINGS)
        self.environment = {}
        self.bucket.mkdir(parents=True)
        (folder / "bin").mkdir()
        (folder / "bin" / "gcloud").symlink_to(ROOT / "tests" / "launch" / "fake_gcloud.sh")
        self.put("on_create", "ACTIVE")

    def put(self, path: str, *lines: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))

    def has(self, path: str) -> bool:
        return (self.folder / path).exists()

    def state(self, run: str = "first") -> str:
        return (self.bucket / "note" / "state" / run).read_text().strip()

    def queued(self, *states: str, kind: str = "v5p-8") -> None:
        """A queued resource that stands so, look after look."""
        self.put("queued/note", *states)
        self.put("queued/note.type", kind)

    def groups(self, *states: str, count: int = 1, machine: str = "ct6e-standard-4t") -> None:
        """Managed instance groups whose hosts stand so, look after look."""
        for number in range(count):
            self.put(f"group/note-{number}", *states)
            self.put(f"group/note-{number}.size", str(len(states[0].split())))
        self.put("template/note", machine)

    def call(self, script: str, *options: str, **settings: str) -> subprocess.CompletedProcess:
        lines = [f"{key}={value}" for key, value in {**self.settings, **settings}.items()]
        self.put("settings.env", *lines)
        return self.command(LAUNCH / script, "--settings", self.folder / "settings.env", *options)

    def command(self, *words: object, **options: object) -> subprocess.CompletedProcess:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.defpath}", "WORLD": str(self.folder),
            "HOME": str(home), "PAUSE": "0", **self.environment,
        }  # fmt: skip
        process = subprocess.Popen(
            [str(word) for word in words], env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options,
        )  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # all that it started, too
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def calls(self, verb: str = "") -> list[list[str]]:
        """The arguments of all calls of gcloud that have the word `verb`."""
        file = self.folder / "calls"
        text = file.read_text() if file.exists() else ""
        calls = [call.split("\0")[:-1] for call in text.split("\n\0")[:-1]]
        return [call for call in calls if not verb or verb in call]

    def changes(self) -> list[str]:
        """What was created and deleted, in order: 'create note-0'."""
        return [
            " ".join(word for word in call[-20:] if word in ("create", "delete")) + " " + name(call)
            for call in self.calls()
            if {"create", "delete"} & set(call)
        ]


def name(call: list[str]) -> str:
    """The first word after the verb that is not an option, nor a kind of policy."""
    rest = call[next(i for i, word in enumerate(call) if word in ("create", "delete")) + 1 :]
    return next(word for word in rest if word != "workload-policy")


def trained(world):
    """The command lines of the trainings so far."""
    file = world.folder / "trained"
    return file.read_text().splitlines() if file.exists() else []


def says_what_is_called(world):
    """Python makes environments here whose programs only say how they were called."""
    (world.folder / "bin" / "python3.13").write_text(
        '#!/usr/bin/env bash\n[[ $1 == -c ]] && exit\nmkdir -p "$3/bin"\n'
        'for name in python notepad-jax; do\n'
        'echo "echo \\"$name \\$*\\" >>$WORLD/said" >"$3/bin/$name"\n'
        'chmod +x "$3/bin/$name"\ndone\n'
    )  # fmt: skip


def called(world):
    return (world.folder / "said").read_text().splitlines()


def steps(world, run="first"):
    """The steps whose checkpoints and lines are in the bucket."""
    folder = world.bucket / "note" / "runs" / run
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return sorted(names), [json.loads(line)["step"] for line in lines]


def run_of(home: Path) -> int | None:
    """The process of the run on this host; only one that is host_run.sh, leads its group and runs
    in this test's folder. Groups are signalled through Python: /bin/kill of procps 4.0.2 takes
    `-KILL -123` for the group of everybody."""
    file = home / "notepad" / "run.pid"
    pid = int(file.read_text() or 0) if file.exists() else 0
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        ours = Path(f"/proc/{pid}/cwd").readlink().is_relative_to(home)
        return pid if ours and b"host_run.sh" in command and os.getpgid(pid) == pid else None
    except OSError:
        return None


def kill_run(home: Path) -> None:
    """Takes a host's run away, with all it started, as when the host is lost."""
    pid = run_of(home)
    if pid is not None:
        os.killpg(pid, signal.SIGKILL)


VERSION = subprocess.run(["bash", "-c", "echo $BASH_VERSION"], env={"PATH": os.defpath},
                         capture_output=True, text=True, timeout=10).stdout  # fmt: skip


@pytest.fixture
def world(tmp_path):
    if VERSION < "5.1" or shutil.which("flock", path=os.defpath) is None:
        pytest.skip("the launch scripts need bash 5.1, and their hosts are Linux")
    return World(tmp_path)


@pytest.fixture
def host(world):
    """A world with one host, whose Python makes environments that hold a fake notepad-jax."""
    home = world.folder / "hosts" / "0"
    home.mkdir(parents=True)
    for fake in ("python3.13", "git"):
        shutil.copy(ROOT / "tests" / "launch" / f"fake_{fake.partition('3')[0]}.sh",
                    world.folder / "bin" / fake)  # fmt: skip
    curl = world.folder / "bin" / "curl"  # what the metadata server says, where there is one
    curl.write_text('#!/usr/bin/env bash\nurl=${!#}\ncat "$HOME/${url##*/}" 2>/dev/null\n')
    curl.chmod(0o755)
    world.environment["LAUNCH"] = str(LAUNCH)
    yield home
    for each in (world.folder / "hosts").iterdir():
        kill_run(each)  # what a test left running
