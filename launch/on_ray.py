"""Starts a fleet on Ray: trainer and readers, each a process that is started again when it dies.

    python launch/on_ray.py --readers 2 -- train --name mine --config.fleet.bundles=2

Ray decides where each runs, and makes its actor again, there or elsewhere, when it is killed.
Nothing is kept in Ray: what the two commands have to know lies in the run's folder
(docs/fleet.md), which on several machines is a bucket or a disk of all
(--config.checkpoint.folder). A program that fails by itself is not repeated. This file is not
called ray.py, or Python would take it for Ray.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from notepad_jax.checkpoint.steps import place_of, steps_in

NAMESPACE = "notepad"  # of the actors: NAME-trainer, NAME-reader-0, ...
STRUCK = 128 + signal.SIGTERM  # the exit code of a program that was told to stop
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
LOOK = 0.5  # seconds between two looks whether the run's folder is there


class Struck(Exception):
    """A program was killed, or told to stop: by nothing that it did itself."""


class Program:
    """One of the two commands, in an actor of its own: neither survives the other."""

    def run(self, words: Sequence[str], folder: str) -> int:
        """Runs `notepad-jax WORDS` in `folder` and returns its exit code. Raises Struck."""
        os.chdir(folder)
        again = ["--resume"] if words[0] == "train" and begun(*run_of(words)) else []
        command = [sys.executable, "-m", "notepad_jax", *words, *again]
        code = subprocess.Popen(command, preexec_fn=_die_with_parent).wait()
        if code < 0 or code == STRUCK:
            raise Struck(f"it ended with {code}")
        return code


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def run_of(words: Sequence[str]) -> tuple[str, str]:
    """Returns name and `checkpoint.folder` of the run that a command line of `train` says."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--name", default="")
    parser.add_argument("--config.checkpoint.folder", dest="folder", default="")
    said, _ = parser.parse_known_args(words)
    return said.name, said.folder


def begun(name: str, elsewhere: str) -> bool:
    """Whether there is something of the run to go on with: its folder here, or its steps."""
    run = Path("runs") / name
    return run.is_dir() or bool(elsewhere and steps_in(place_of(run, elsewhere)))


def place(name: str, elsewhere: str) -> str:
    """Returns the folder of a run as readers are told it, here or `elsewhere`."""
    return str(place_of(Path("runs") / name, elsewhere).parent)


def resources(text: str) -> dict[str, float]:
    """Returns what "TPU=4,GPU=1" says. Raises ValueError for anything else."""
    pairs = [each.split("=") for each in text.split(",") if each]
    return {kind: float(count) for kind, count in pairs}


def started(
    name: str, words: Sequence[str], wanted: Mapping[str, float], tries: int
) -> ray.ObjectRef:
    """Starts a program in an actor of this name; the result is its exit code."""
    program = ray.remote(Program).options(
        name=name,
        num_cpus=wanted.get("CPU", 0),
        num_gpus=wanted.get("GPU", 0),
        resources={kind: n for kind, n in wanted.items() if kind not in ("CPU", "GPU")},
        scheduling_strategy="SPREAD",
        max_restarts=tries,
        max_task_retries=tries,
    )
    run = program.remote().run.options(retry_exceptions=[Struck])
    return run.remote(list(words), os.getcwd())


def fleet(words: Sequence[str], said: argparse.Namespace) -> str:
    """Runs trainer and readers until the run has ended; returns what went wrong, if anything.

    Readers of a folder on a disk are started when it is there: they refuse one that is not.
    """
    name, elsewhere = run_of(words)
    there = place(name, elsewhere)
    # A fleet replaces no group: who says another number of rounds is refused by `train`.
    train = [words[0], "--config.rollout.max_rounds=1", *words[1:], "--config.fleet.apart=true"]
    running = {started(f"{name}-trainer", train, said.trainer, said.tries): "trainer"}
    while "://" not in there and not Path(there).is_dir():
        if ray.wait(list(running), timeout=LOOK)[0]:
            break
    for number in range(said.readers):
        rollout = ["rollout", there, "--as", f"reader-{number}"]
        reader = f"reader-{number}"
        running[started(f"{name}-{reader}", rollout, said.reader, said.tries)] = reader
    return _watched(running, said.readers)


def _watched(running: dict[ray.ObjectRef, str], readers: int) -> str:
    """Waits until all have ended, or the run cannot go on."""
    while running:
        (ended,), _ = ray.wait(list(running))
        who, problem = running.pop(ended), _problem(ended)
        print(f"{who} has ended{problem and f': {problem}'}", flush=True)
        readers -= bool(problem) and who != "trainer"
        if problem and (who == "trainer" or not readers):
            return f"{who} has failed ({problem}), and the run does not go on without it"
    return ""


def _problem(ended: ray.ObjectRef) -> str:
    try:
        code = ray.get(ended)
    except (ray.exceptions.RayError, Struck) as problem:
        return f"given up: {str(problem).strip().splitlines()[-1]}"
    return f"exit code {code}" if code else ""


def parsed(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads the command line: ours, and that of `train` behind `--`."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options] -- train --name NAME ...",
                                     description=__doc__.partition("\n")[0])  # fmt: skip
    parser.add_argument("--readers", type=int, default=1, help="how many (1)")
    parser.add_argument("--reader", type=resources, default={}, metavar="KIND=N,...",
                        help="what of Ray's resources each takes: TPU=4, or GPU=1")  # fmt: skip
    parser.add_argument("--trainer", type=resources, default={}, metavar="KIND=N,...",
                        help="those of the trainer")  # fmt: skip
    parser.add_argument("--tries", type=int, default=10, help="times that each is started again")
    parser.add_argument("words", nargs="*", metavar="train ...")
    said = parser.parse_args(words)
    if said.words[:1] != ["train"] or not run_of(said.words)[0]:
        parser.error("say what to train behind --: -- train --name NAME ...")
    if said.readers < 1 or said.tries < 0:
        parser.error("--readers is a whole number from 1 on, and --tries one from 0 on")
    return said, said.words


def main() -> None:
    said, words = parsed(sys.argv[1:])
    if sys.platform != "linux":
        sys.exit("on_ray.py needs Linux: its programs die with the actors that started them")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The cluster of RAY_ADDRESS, or one of this machine for as long as this takes.
    ray.init(namespace=NAMESPACE, include_dashboard=False)
    try:
        problem = fleet(words, said)
    except ValueError as refusal:  # a name that another launcher has taken
        problem = str(refusal)
    time.sleep(LOOK)  # for what the programs said last, which comes by way of Ray
    sys.exit(problem or None)


if __name__ == "__main__":
    main()
