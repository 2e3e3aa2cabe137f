"""`notepad-jax check`: checks that everything in a run's folder is as it was written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from notepad_jax.commands.parser import Parser, PrintedFailure
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import check

CONFIG = None  # it has no config
LONG = """\
Looks through the folder of a run or an evaluation: settings, every line of metrics,
ledger, timings and readings, every byte of every checkpoint, the base of adapters. Says
what is damaged and what to do, and changes nothing; exit code 1 where something is.

example: notepad-jax check runs/mine"""


def options(parser: Parser) -> None:
    parser.add_argument("folder", metavar="RUN", help="runs/NAME")


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = check.run(Path(arguments.folder), screen)
    if made.damaged:
        problem = f"{made.folder} is damaged in {len(made.damaged)} places"
        raise PrintedFailure(made, check.text(made), problem.replace(" 1 places", " one place"))
    return made, check.text(made)
