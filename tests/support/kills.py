"""Ends runs at random moments by SIGKILL or SIGTERM: once resumed, each equals one that was not.

    python -m tests.support.kills                                   # 100 kills, half an hour
    python -m tests.support.kills --kills 6 --settings plain,files  # a few minutes
    python -m tests.support.kills --kills 40 --settings plain,bucket,pod --jobs 2

For each setting (`kill_settings`: plain; LoRA with KL, bfloat16 and hand-off in memory; task
files with groups that wait; the guards of tasks; checkpoints in a bucket; two processes) it makes
an undisturbed run, as users start it, in a folder of its own, and the same once more: both
must be equal, and the second says how long a run takes when its programs are compiled. Then it
starts runs and kills them, process group and all, at moments drawn from the clock or aimed at
critical places (`kill_moments`), or asks them to stop (SIGTERM), goes on with each by `--resume`
after every kill until it ends, and begins another while kills are left. Of several processes one
is ended, and the others have `WITH_IT` seconds (where they had not met, to say that they wait).
Every run that ends is compared with the undisturbed one (`same_run`): metrics, ledger and
trajectories byte for byte, params and optimizer state bit for bit, the account of draws and the
step's meta, the steps that were timed and those on disk, with nothing left over beside them.

A difference, a resume that fails and one that never ends are told with the run, its kills and
the first differing place; the run's folder stays, and the exit code is 1. The moments are drawn
from --seed; where on disk they hit depends on the machine, and the second table counts that.
Compiled programs are kept in the folder (or in NOTEPAD_JAX_CACHE), so a restart costs seconds.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.parallel.peers import WAITS
from notepad_jax.setup.compiled import SWITCH
from notepad_jax.telemetry.metrics import METRICS
from tests.checkpoint.fake_bucket import cloud
from tests.support import kill_moments, same_run
from tests.support.kill_moments import AIMS, PLACES, Moment, Watch
from tests.support.kill_settings import ROOT, SETTINGS, Setting, write_tasks

WITH_IT = 20.0  # seconds for the other processes of a run to end with the one that was killed
WHOLE, AGAIN = "whole", "again"  # names of the undisturbed runs
LONGEST, LONGEST_COLD = 20, 1200.0  # times what a run takes, and seconds for the first one
LET_LIVE = 0.2  # of the processes: or the last steps of a run would be killed over and over
# What a kill leaves: SIGTERM ends the process while it imports, and the run itself later.
STRUCK = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
GIVE_UP = 3  # runs of a setting that went wrong, after which no more are begun


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill that came before the process had ended."""

    run: str
    aim: str
    moment: str
    place: str  # one of kill_moments.PLACES
    saved: int | None  # the newest step on disk
    lines: int  # of metrics.jsonl

    def __str__(self) -> str:
        return (
            f"{self.run}, {self.moment}: {self.place} (step {self.saved} saved, "
            f"{self.lines} lines of metrics)"
        )


@dataclasses.dataclass
class Outcome:
    """The result of a setting: seconds, equal runs, kills, and what went wrong."""

    setting: str
    seconds: float = 0.0  # of an undisturbed run
    took: float = 0.0  # seconds, all in all
    equal: int = 0  # runs that ended as the undisturbed one
    resumes: int = 0
    kills: list[Kill] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


class Group:
    """The processes of one run: they have ended when all have."""

    def __init__(self, name: str, processes: Sequence[subprocess.Popen]) -> None:
        self.name, self.processes = name, processes

    def poll(self) -> int | None:
        """Returns an exit code that says what came of all, once all have ended."""
        codes = [process.poll() for process in self.processes]
        return None if None in codes else self.returncode

    @property
    def returncode(self) -> int | None:
        codes = [process.returncode for process in self.processes]
        return next((code for code in codes if code in STRUCK), max(codes, key=lambda c: c or 0))

    @property
    def wrong(self) -> list[int]:
        """Exit codes of those that ended, and not as a stop or a kill ends them."""
        codes = [process.poll() for process in self.processes]
        return [code for code in codes if code not in (*STRUCK, 0, None)]

    def send_signal(self, number: int, index: int) -> None:
        """Sends one process a signal; the others are to end with it."""
        self.processes[index].send_signal(number)

    def kill(self) -> None:
        """Ends all that are left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Desk:
    """One setting's folder, in which runs are started and killed."""

    def __init__(self, setting: Setting, folder: Path, seed: int, stop: threading.Event):
        self.setting, self.folder, self.stop = setting, folder / setting.name, stop
        self.folder.mkdir(parents=True)
        write_tasks(self.folder)
        self.chance = random.Random(f"{seed} {setting.name}")
        # jax's own variable would win over ours, and killed writers belong in no common cache.
        inherited = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self.closing = contextlib.ExitStack()
        self.cloud = self.closing.enter_context(cloud()) if setting.bucket else None
        self.environment = {
            **(self.cloud.environment if self.cloud else {}),
            "JAX_PLATFORMS": "cpu",
            SWITCH: str(folder / "cache"),
            **inherited,
            "PYTHONPATH": str(ROOT),
        }
        self.outcome = Outcome(setting.name)
        self.wanted = self.left = 0  # kills

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / name

    def seen(self, name: str) -> Path:
        """The run's folder with its checkpoints in it, wherever they lie."""
        if self.cloud is None or not self.run(name).is_dir():
            return self.run(name)
        copy = self.folder / "seen" / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.run(name), copy)
        with self.cloud.lock:
            objects = dict(self.cloud.objects)
        for place, content in objects.items():
            if place.startswith(f"runs/{name}/"):
                path = copy / place.removeprefix(f"runs/{name}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return copy

    def undisturbed(self, name: str, longest: float) -> float:
        """Makes a run and leaves it alone; returns its seconds. Raises ValueError."""
        began = time.monotonic()
        with self.started(name) as process:
            kill_moments.arrives(process, Watch(self.run(name)), None, longest, self.stop)
        if process.returncode:
            raise ValueError(f"{self.setting.name}: {self.ended(name, process)}")
        return time.monotonic() - began

    @contextlib.contextmanager
    def started(self, name: str, moment: Moment | None = None) -> Iterator[Group]:
        """The processes that begin the run, or go on with it as a user would; then they are gone.

        The words of its config are said again only where a kill came before config.json.
        """
        words = ["train", "--name", name]
        if self.run(name).is_dir():
            words.append("--resume")
        if not (self.run(name) / "config.json").is_file():
            words += ["--config", "quickstart", *self.setting.command]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            where = f"localhost:{free.getsockname()[1]},{self.setting.processes}"
        processes = []
        with (self.folder / f"{name}.log").open("a") as log:
            for index in range(self.setting.processes):
                begun = ["-m", "notepad_jax"]
                if moment and moment.aim == kill_moments.COLLECTION and moment.process == index:
                    call = f"in_a_collection({moment.seconds})"
                    begun = ["-c", f"from tests.support import kill_moments as k; k.{call}"]
                of_several = [f"--hosts={where},{index}"] if self.setting.processes > 1 else []
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *begun, *words, *of_several],
                        cwd=self.folder, env=self.environment, stdout=log, stderr=log,
                        start_new_session=True,
                    )
                )  # fmt: skip
        group = Group(name, processes)
        try:
            yield group
        finally:
            group.kill()

    def ended(self, name: str, process: Group) -> str:
        """Says how a process ended that should not have ended so."""
        said = self.said(name).strip().splitlines()
        return f"{name}: exit code {process.returncode}: {said[-1] if said else 'no word'}"

    def said(self, name: str) -> str:
        """All that a run's processes have printed."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def all_end(self, process: Group, said: int, watch: Watch, longest: float) -> None:
        """Waits until all have ended, of which one was; TimeoutError if they do not.

        Where they had not met, that one is to the others one that is late, and the last that they
        have said, after `said` characters, is that they wait: they are told to stop, as by a
        launcher.
        """
        try:
            kill_moments.arrives(process, watch, None, min(longest, WITH_IT), self.stop)
        except TimeoutError:
            last = self.said(process.name)[said:].strip().rpartition("\n")[2]
            if WAITS in last:
                for index, one in enumerate(process.processes):
                    if one.poll() is None:
                        process.send_signal(signal.SIGTERM, index)
            elif longest <= WITH_IT:
                raise
            kill_moments.arrives(process, watch, None, longest, self.stop)

    def one_kill(self, name: str) -> Kill | Group:
        """Starts the run or goes on with it; returns the kill, or the processes that had ended."""
        before, watch = kill_moments.see(self.seen(name)), Watch(self.run(name))
        left = self.setting.steps - (before.saved[-1] if before.saved else 0)
        moment: Moment | None = None
        if self.left > 0 and self.chance.random() > LET_LIVE:
            logged, every = before.lines[METRICS] > 0, self.setting.every
            moment = kill_moments.draw(
                self.chance, self.outcome.seconds, left, every, logged,
                not self.setting.bucket, self.setting.processes,
            )  # fmt: skip
        said = len(self.said(name))
        with self.started(name, moment) as process:
            longest = LONGEST * self.outcome.seconds + 60
            if moment and moment.aim == kill_moments.COLLECTION:
                kill_moments.arrives(process, watch, None, longest, self.stop)
                came = True
            else:
                came = kill_moments.arrives(process, watch, moment, longest, self.stop)
            if came and moment.aim in kill_moments.ASKED:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM, moment.process)
                self.all_end(process, said, watch, longest)
            elif came and self.setting.processes > 1:
                process.send_signal(signal.SIGKILL, moment.process)
                self.all_end(process, said, watch, WITH_IT)
            if came and any(process.wrong):
                return process
        if moment is None or not came or process.returncode not in STRUCK:
            return process
        after = kill_moments.see(self.seen(name))
        newest = after.saved[-1] if after.saved else None
        place = kill_moments.place(before, after)
        return Kill(name, moment.aim, str(moment), place, newest, after.lines[METRICS])

    def killed_run(self, name: str) -> list[str]:
        """Kills and resumes a run until it has ended; returns what is wrong with it."""
        while True:
            self.outcome.resumes += self.run(name).is_dir()
            try:
                hit = self.one_kill(name)
            except TimeoutError as problem:
                return [f"{name}: {problem}"]
            if isinstance(hit, Group):
                if hit.returncode:
                    return [self.ended(name, hit)]
                found = same_run.differences(self.seen(WHOLE), self.seen(name))
                if "Traceback" in self.said(name):
                    found.append(f"a traceback in {name}.log")
                return [f"{name}: {one}" for one in found]
            self.left -= 1
            self.outcome.kills.append(hit)
            self.say(f"kill {len(self.outcome.kills)}/{self.wanted}: {hit}")

    def work(self, kills: int) -> Outcome:
        """Makes the undisturbed runs, then kills others `kills` times."""
        began, outcome = time.monotonic(), self.outcome
        self.wanted = self.left = kills
        self.say(f"{self.setting.about}; the undisturbed run compiles its programs")
        self.undisturbed(WHOLE, LONGEST_COLD)
        missing = list(self.setting.unexercised(self.seen(WHOLE)))
        if missing:
            raise ValueError(f"{self.setting.name} tries nothing: {'; '.join(missing)}")
        outcome.seconds = self.undisturbed(AGAIN, LONGEST_COLD)
        self.say(f"a run takes {outcome.seconds:.1f} s")
        outcome.wrong += [
            f"undisturbed, and yet {AGAIN}: {one}"
            for one in same_run.differences(self.seen(WHOLE), self.seen(AGAIN))
        ]
        bad, number = bool(outcome.wrong), 0
        while self.left > 0 and bad < GIVE_UP:
            number += 1
            name = f"killed-{number}"
            if found := self.killed_run(name):
                bad += 1
                struck = "; ".join(str(kill) for kill in outcome.kills if kill.run == name)
                outcome.wrong += found + [f"  its kills: {struck}"]
                for one in found:
                    self.say(f"WRONG {one}")
            else:
                outcome.equal += 1
                self.say(f"{name} ended, equal to the undisturbed run")
                shutil.rmtree(self.run(name))
        outcome.took = time.monotonic() - began
        self.closing.close()
        return outcome

    def say(self, text: str) -> None:
        """Tells how it goes, on standard error."""
        print(f"{self.setting.name}: {text}", file=sys.stderr, flush=True)


def kill_all(
    settings: Sequence[Setting], kills: int, seed: int, folder: Path, jobs: int = 1
) -> list[Outcome]:
    """Kills `kills` times in all, spread evenly over the settings, `jobs` of them side by side.

    Raises ValueError for a setting whose undisturbed run fails or does not try what it should.
    """
    stop = threading.Event()
    desks = [Desk(setting, folder, seed, stop) for setting in settings]
    share, more = divmod(kills, len(desks))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        under_way = [
            pool.submit(desk.work, share + (number < more)) for number, desk in enumerate(desks)
        ]
        try:
            return [one.result() for one in under_way]
        except BaseException:  # no process outlives us, however we are stopped
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


# ---------------------------------------------------------------- what is shown


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns all that was found as JSON values."""
    return {
        "kills": sum(len(outcome.kills) for outcome in outcomes),
        "equal_runs": sum(outcome.equal for outcome in outcomes),
        "wrong": [f"{o.setting}: {one}" for o in outcomes for one in o.wrong],
        "settings": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns what was found as text: runs by setting, then kills by place and by aim."""
    lines = [f"{'setting':<10}{'kills':>7}{'resumes':>9}{'equal runs':>12}{'wrong':>7}"
             f"{'s a run':>9}{'minutes':>9}"]  # fmt: skip
    for o in outcomes:
        wrong = sum(not one.startswith(" ") for one in o.wrong)
        lines.append(f"{o.setting:<10}{len(o.kills):7}{o.resumes:9}{o.equal:12}{wrong:7}"
                     f"{o.seconds:9.1f}{o.took / 60:9.1f}")  # fmt: skip
    lines += _counts("what a kill hit", PLACES, {p: p for p in PLACES}, outcomes, "place")
    said = {aim: f"{aim}: {about}" for aim, (_, _, about) in AIMS.items()}
    lines += _counts("what it was aimed at", tuple(AIMS), said, outcomes, "aim")
    return "\n".join(lines + [f"{o.setting}: {one}" for o in outcomes for one in o.wrong])


def _counts(
    title: str, kinds: Sequence[str], said: Mapping[str, str], outcomes: Sequence[Outcome],
    field: str,
) -> list[str]:  # fmt: skip
    counted = [collections.Counter(getattr(kill, field) for kill in o.kills) for o in outcomes]
    lines = ["", f"{title:<54}" + "".join(f"{o.setting:>8}" for o in outcomes)]
    for kind in kinds:
        lines.append(f"{said[kind]:<54}" + "".join(f"{count[kind]:8}" for count in counted))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="settings:\n" + "\n".join(f"  {s.name}: {s.about}" for s in SETTINGS.values()),
    )  # fmt: skip
    parser.add_argument("--kills", type=int, default=100, help="in all (100)")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="some of them (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--jobs", type=int, default=1, help="settings side by side (1)")
    parser.add_argument("--folder", help="a new folder, which stays (a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object, every kill in it")
    options = parser.parse_args()
    names = options.settings.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"there is no setting {unknown[0]!r}; there are {', '.join(SETTINGS)}")
    if options.kills < 0 or options.jobs < 1:
        parser.error("--kills must be at least 0 and --jobs at least 1")
    folder = Path(options.folder or tempfile.mkdtemp(prefix="kills-")).absolute()
    if options.folder and folder.exists():
        parser.error(f"{folder} exists; name a new folder")
    # What stops us stops the runs, too, which are in process groups of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [SETTINGS[name] for name in names]
    try:
        outcomes = kill_all(chosen, options.kills, options.seed, folder, options.jobs)
    except (ValueError, OSError) as problem:
        sys.exit(f"{problem}; the runs are in {folder}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; the runs are in {folder}")
    print(json.dumps(report(outcomes), indent=1) if options.json else table(outcomes))
    if any(outcome.wrong for outcome in outcomes):
        sys.exit(f"something is wrong; the runs are in {folder}")
    if not options.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
