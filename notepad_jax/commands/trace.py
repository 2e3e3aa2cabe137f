"""`notepad-jax trace`: the HTML page of a trace's readings, turn by turn."""

from __future__ import annotations

import argparse
from typing import Any

from notepad_jax.commands.parser import Parser
from notepad_jax.programs import traces
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen

CONFIG = None  # it has no config
LONG = """\
Makes a folder with a page of all readings of a run or an evaluation: what the memory
became after each chunk, word by word; the evidence in it; the exact prompts and what
was sampled, where they were kept; other samples, steps and runs beside it. Any browser
opens it from the disk, and no request leaves the machine. Two runs are compared.

examples: notepad-jax trace runs/quickstart
          notepad-jax trace runs/before runs/after --out compared --open no"""


def options(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs/NAME, the folder of an "
                     "evaluation, a trajectories.jsonl or a readings.jsonl")  # fmt: skip
    parser.add_argument("--out", help="the page's folder (trace, in the run's)")
    parser.add_argument("--open", choices=("yes", "no"), help="in a browser (yes, where there is a "
                     "screen)")  # fmt: skip


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = traces.run(arguments.runs, arguments.out, screen)
    asked = arguments.open or ("yes" if traces.may_open() and not arguments.json else "no")
    if asked == "yes":
        traces.show(made.page)
    return made, traces.text(made)
