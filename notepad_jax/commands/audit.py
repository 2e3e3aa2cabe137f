"""`notepad-jax audit`: checks that a step's turns were written by the policy that the run names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from notepad_jax.commands.parser import Parser, PrintedFailure
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import audit

CONFIG = None  # it is the run's
LONG = """\
Computes again, with the trainer's forward pass and the checkpoint of the version that is
named, the logprobs of every turn that a training run keeps token by token
(rollout.archive_turns), and compares them with the sampler's. Exit code 1 where a token is
off by more than rounding: then another policy said it.

example: notepad-jax audit runs/mine --step 40"""


def options(parser: Parser) -> None:
    parser.add_argument("folder", metavar="RUN", help="runs/NAME")
    parser.add_argument("--step", type=int, help="turns of this step (of all whose versions are "
                     "kept as checkpoints)")  # fmt: skip


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = audit.run(Path(arguments.folder), arguments.step, screen)
    if made.off:
        raise PrintedFailure(made, audit.text(made), audit.problem(made))
    return made, audit.text(made)
