"""Kills a trainer and two readers at critical moments; each run must end like an undisturbed one.

    python -m tests.support.fleet_kills [--runs 10] [--kills 6] [--seed 0] [--live]

Each run is begun, and a killed process begun again, until the trainer ends; then its folder is
compared with that of an undisturbed run, every byte (`same_run`). No two runs of a live fleet are
the same: of those every draw is settled once, no turn is too old, every turn is as its version says
it, and nothing is left behind. A kill comes a random short time
after something critical happened: a look at the folders every millisecond sees names come and go.
SIGKILL for the most part; a reader is also asked to stop and then killed, frozen for a while, or
killed together with all others.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from notepad_jax.checkpoint.objects import Objects
from notepad_jax.rollout import schedule
from notepad_jax.rollout.ledger import Outcome
from notepad_jax.telemetry.metrics import LEDGER, read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import audit, fleet
from tests import runs
from tests.support import same_run

READERS, STEPS = ("reader-0", "reader-1"), 6
TRAINER = "trainer"
DOCUMENTS, OLDEST = 4, 2  # a step; versions, of a turn in a live fleet
ALL_RUNS = (
    *runs.SMALL, f"--config.steps={STEPS}", "--config.rollout.max_rounds=1",
    f"--config.rollout.documents={DOCUMENTS}", "--config.validation.every=0",
    "--config.checkpoint.every=2", "--config.checkpoint.handoff=memory",
    "--config.checkpoint.keep_turns=8",
)  # fmt: skip
PINNED = (*ALL_RUNS, "--config.fleet.bundles=2")
LIVE = (
    *ALL_RUNS, "--config.fleet.live=true", "--config.fleet.slack=1", "--config.checkpoint.keep=9",
    "--config.rollout.archive=8", "--config.rollout.archive_turns=8",
)  # fmt: skip
# What is killed after which kind of name has come (+) or gone (-), and within how many seconds.
AIMS = {
    "claim +": (READERS, 0.3),
    "progress +": (READERS, 0.05),
    "spool +": (READERS, 0.005),
    "policy +": (READERS, 0.2),
    "plan +": ((TRAINER,), 0.01),
    "choice +": ((TRAINER,), 0.2),
    "spool + (trainer)": ((TRAINER,), 0.1),
    "checkpoints +": ((TRAINER,), 0.1),
    "policy + (trainer)": ((TRAINER,), 0.1),
    "plan -": ((TRAINER,), 0.01),
    "metrics": ((TRAINER,), 0.05),
    "clock": ((TRAINER, *READERS), 3.0),
}
ALL, ASKED, FROZEN = "all at once", "asked, then killed", "frozen"
LONGEST = 300.0  # seconds of a run


@dataclasses.dataclass
class Run:
    """One run's processes."""

    folder: Path  # where it is started
    name: str
    chance: random.Random
    words: Sequence[str] = PINNED
    kills: list[str] = dataclasses.field(default_factory=list)  # what was hit
    alive: dict[str, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "runs" / self.name

    def begin(self, who: str) -> None:
        """Starts a process, or starts it again."""
        if who == TRAINER:
            begun = ["--resume"] if self.path.is_dir() else []
            words = ["train", "--name", self.name, *self.words, "--config.fleet.apart=true", *begun]
        else:
            words = ["rollout", str(self.path), "--as", who]
        with (self.folder / f"{self.name}-{who}.log").open("ab") as said:
            self.alive[who] = subprocess.Popen(
                [sys.executable, "-m", "notepad_jax", *words], cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip

    def kill(self, who: str, how: str) -> None:
        """Kills a process, or several, and begins them again."""
        every = [TRAINER, *READERS] if how == ALL else [who]
        for one in every:
            process = self.alive[one]
            if how == ASKED:
                process.send_signal(signal.SIGTERM)
                time.sleep(self.chance.uniform(0, 0.5))
            if how == FROZEN:
                process.send_signal(signal.SIGSTOP)
                time.sleep(self.chance.uniform(0.5, 3))
                process.send_signal(signal.SIGCONT)
                return
            process.kill()
        for one in every:
            self.alive[one].wait()
            self.begin(one)

    def to_the_end(self, count: int) -> None:
        """Runs until the trainer has ended, with so many kills at most."""
        self.begin(TRAINER)
        while not self.path.is_dir():
            self._look()
        for who in READERS:
            self.begin(who)
        watch, due, began = Watch(self.path), None, time.monotonic()
        aim, nth = self._aim()
        while self._look():
            now = time.monotonic()
            if now - began > LONGEST:
                raise TimeoutError(f"{self.path} had not ended after {LONGEST:.0f} s")
            for happened in watch.look():
                nth -= happened == aim.partition(" (")[0]
            if due is None and len(self.kills) < count and (aim == "clock" or nth <= 0):
                due = now + self.chance.uniform(0, AIMS[aim][1])
            if due is not None and now >= due:
                who = self.chance.choice(AIMS[aim][0])
                how = self._how(who)
                self.kill(who, how)
                what = f"{who.partition('-')[0]}: {aim.partition(' (')[0]}"
                self.kills.append(f"{what}, {how}" if how else what)
                due, (aim, nth) = None, self._aim()
            time.sleep(0.001)
        self.end()

    def end(self) -> None:
        """Waits for readers, which see that the run has ended."""
        for process in self.alive.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _aim(self) -> tuple[str, int]:
        aims = [one for one in AIMS if self.words is LIVE or one != "choice +"]
        return self.chance.choice(aims), self.chance.randint(1, 3)

    def _how(self, who: str) -> str:
        drawn = self.chance.random()
        if drawn < 0.1:
            return ALL
        if who != TRAINER and drawn < 0.3:
            return ASKED if drawn < 0.2 else FROZEN
        return ""

    def _look(self) -> bool:
        """Whether the trainer runs; a process that ended otherwise than it should is said."""
        for who, process in self.alive.items():
            if (code := process.poll()) not in (None, 0):
                said = (self.folder / f"{self.name}-{who}.log").read_text()[-800:]
                raise RuntimeError(f"{who} of {self.path} ended with {code}: {said}")
        return self.alive[TRAINER].poll() is None


class Watch:
    """Sees names come and go in a run's folder."""

    def __init__(self, run: Path) -> None:
        kinds = ("claim", "progress", "spool", "plan", "choice")
        self._folders = {kind: run / fleet.FOLDER / kind for kind in kinds}
        self._folders |= {name: run / name for name in (fleet.POLICY, "checkpoints")}
        self._metrics, self._size = run / "metrics.jsonl", 0
        self._names = {kind: self._in(kind) for kind in self._folders}

    def look(self) -> Iterator[str]:
        """Yields what happened since the last look."""
        for kind in self._folders:
            now, before = self._in(kind), self._names[kind]
            self._names[kind] = now
            yield from [f"{kind} +"] * len(now - before)
            yield from [f"{kind} -"] * len(before - now)
        with contextlib.suppress(OSError):
            size = self._metrics.stat().st_size
            if size > self._size:
                yield "metrics"
            self._size = size

    def _in(self, kind: str) -> set[str]:
        with contextlib.suppress(OSError):
            return set(os.listdir(self._folders[kind]))
        return set()


def undisturbed(folder: Path) -> Path:
    """Returns the folder of a run whose readers the trainer starts itself."""
    words = ["train", "--name", "whole", *PINNED, f"--config.fleet.readers={len(READERS)}"]
    with (folder / "whole.log").open("wb") as said:
        subprocess.run(
            [sys.executable, "-m", "notepad_jax", *words], cwd=folder, check=True, stdout=said,
            stderr=said,
        )  # fmt: skip
    return folder / "runs" / "whole"


def problems(run: Path) -> Iterator[str]:
    """Yields what is wrong with a run of a live fleet that has ended."""
    lines = [json.loads(line) for line in (run / LEDGER).open()]
    outcomes = [outcome.value for outcome in Outcome]
    draws = [draw for line in lines for name in outcomes for draw, _ in line.get(name, ())]
    counts = collections.Counter(draws)
    questions = set(counts.values())  # of each draw as many
    if sorted(counts) != list(range(STEPS * DOCUMENTS)) or len(questions) != 1:
        yield f"draws are settled {dict(sorted(counts.items()))} times"
    ages = [line.get("rollout/age_max", 0) for line in read_metrics(run)]
    if max(ages) > OLDEST:
        yield f"a turn was {max(ages)} versions old when it was learnt from"
    made = audit.run(run, None, SilentScreen())
    yield from map(audit.problem, [made] if made.off else [])
    # What a reader puts of a step that is over lies there, and no process reads it.
    late = f"{schedule.SPOOL}/"
    left = [name for name in Objects(run / fleet.FOLDER).names() if not name.startswith(late)]
    if left != ["ended", "terms"]:
        yield f"{left} are left behind"


def kill_all(
    folder: Path, count: int, kills: int, seed: int, live: bool
) -> tuple[list[str], list[str]]:
    """Returns (what was hit, what is wrong) of so many runs, each with so many kills at most."""
    whole, hit, wrong = None if live else undisturbed(folder), [], []
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        one = Run(folder, f"killed-{number}", chance, LIVE if live else PINNED)
        try:
            one.to_the_end(kills)
            found = same_run.differences(whole, one.path) if whole else problems(one.path)
            wrong += [f"{one.name}: {line}" for line in found]
        except (RuntimeError, TimeoutError) as problem:
            wrong.append(str(problem))
        finally:
            for process in one.alive.values():
                process.kill()
        hit += one.kills
        print(f"{one.name}: {', '.join(one.kills)}", file=sys.stderr, flush=True)
    return hit, wrong


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="runs that are killed (10)")
    parser.add_argument("--kills", type=int, default=6, help="of each, at most (6)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--live", action="store_true", help="of a live fleet, with slack")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="fleet-kills-") as folder:
        hit, wrong = kill_all(Path(folder), options.runs, options.kills, options.seed, options.live)
    for what, count in sorted(collections.Counter(hit).items()):
        print(f"{count:4}  {what}")
    print(f"{len(hit)} kills in {options.runs} runs; {'all as promised' if not wrong else 'WRONG'}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
