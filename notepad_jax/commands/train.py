"""`notepad-jax train`: reinforcement learning on the final answer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from notepad_jax.commands.options import training_options
from notepad_jax.commands.parser import Parser
from notepad_jax.setup import configuration
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import outcome, replay, train

CONFIG = "quickstart"
LONG = """\
Rollout, reward, update, hand-off, again. Everything goes to runs/NAME: config.json,
metrics.jsonl and TensorBoard events, ledger.jsonl, checkpoints/, trajectories.jsonl,
report.html. Held-out tasks are read every --config.validation.every steps.
Ctrl-C or SIGTERM keeps the finished turns of the rollout, too, and --resume goes on.

examples: notepad-jax train --name mine --config.steps=40 --config.seed=1
          notepad-jax train --name clipped --recipe dapo --config.grpo.minibatches=4
          notepad-jax train --config chat --name mine \\
              --config.policy=path/to/Qwen2.5-0.5B-Instruct \\
              --config.tasks.files=questions.jsonl"""


def options(parser: Parser) -> None:
    training_options(parser)
    parser.add_argument("--mended", action="store_true", help="with --resume: rows of tasks.files "
                     "were mended since, where they stand; those left out stay so")  # fmt: skip
    parser.add_argument(
        "--profile", metavar="STEP", type=_steps, default=range(0),
        help="record in runs/NAME/profile what devices and host do in this step (or 3..5)",
    )  # fmt: skip
    parser.add_argument(
        "--replay",
        metavar="RUN",
        help="learn again what this run with readers chose (fleet.keep), and compare the weights",
    )
    parser.add_argument("--policy", help="what training begins with (the config's)")
    parser.add_argument(
        "--hosts",
        metavar="WHERE",
        help="one run of several processes, started alike "
        "on all hosts: auto (TPU pods, SLURM), or HOST:PORT,COUNT,INDEX; the first "
        "has runs/NAME, and checkpoint.folder a bucket or a disk of all",
    )


def _steps(text: str) -> range:
    """Returns the steps that "3" or "3..5" names; ArgumentTypeError for what names none."""
    first, _, last = text.partition("..")
    ends = first, last if ".." in text else first
    if not all(map(str.isdecimal, ends)) or not 1 <= int(ends[0]) <= int(ends[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no step; say one from 1 on, as 3, or the first and the last, as 3..5"
        )
    return range(int(ends[0]), int(ends[1]) + 1)


def run(
    arguments: argparse.Namespace, config: Training, folder: Path, screen: Screen
) -> tuple[Any, str]:
    if arguments.replay is not None:
        others = (arguments.resume, arguments.step is not None, arguments.mended, arguments.profile)
        if any(others) or config != configuration.load(CONFIG):
            raise ValueError(
                "--replay has the settings of its run, from the first step: name no others"
            )
        again = replay.replay(Path(arguments.replay), folder, screen)
        return again, replay.text(again)
    train.train(
        config, folder, screen, arguments.resume, arguments.step, mended=arguments.mended,
        profiled=arguments.profile,
    )  # fmt: skip
    made = outcome.outcome(config, folder)
    return made, outcome.text(made)
