"""`notepad-jax rollout`: a rollout process (reader) of a run whose trainer is elsewhere."""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

from notepad_jax.commands.parser import Parser
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import fleet_reader

CONFIG = None  # it is the run's
LONG = """\
Reads for a training run with readers apart (--config.fleet.apart=true), until that ends.
RUN is the run's folder, or the one of its name in checkpoint.folder: gs://bucket/runs/NAME.
Start as many as there are machines for, at any time; kill and add what you like. Settings
are the run's; policy and task files have to lie here where they lie there, with the same
content. Ctrl-C or SIGTERM keeps the finished turns; docs/fleet.md says more.

examples: notepad-jax rollout runs/mine
          notepad-jax rollout gs://bucket/runs/mine --as reader-3"""


def options(parser: Parser) -> None:
    parser.add_argument(
        "place", metavar="RUN", help="runs/NAME, or FOLDER/NAME of checkpoint.folder"
    )
    parser.add_argument("--policy", help="the policy that the run began with, if it lies elsewhere "
                     "here")  # fmt: skip
    parser.add_argument("--as", dest="me", metavar="NAME", help="one that is started again under "
                     "its name goes on with what it had begun (host and process)")  # fmt: skip
    parser.add_argument("--beside", metavar="PID", type=int, help="end with the process that "
                     "started this one, which is PID")  # fmt: skip


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    me = arguments.me or f"{socket.gethostname()}-{os.getpid()}"

    def alone() -> bool:
        return arguments.beside not in (None, os.getppid())

    made = fleet_reader.read(arguments.place, me, arguments.policy, screen, alone)
    return made, f"read {made.bundles} parts of steps of {made.run} in {made.seconds:.1f} s"
