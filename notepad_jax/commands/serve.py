"""`notepad-jax serve`: an HTTP server of a policy with OpenAI's API."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from notepad_jax.commands.options import POLICY
from notepad_jax.commands.parser import Parser
from notepad_jax.programs import access, jetstream, serve
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen

CONFIG = "quickstart"
LONG = """\
Answers at http://HOST:PORT/v1 until Ctrl-C: chat/completions, completions (text or
token ids), models; /tokenize, /health, /metrics. NAME continues what it is given,
NAME:notepad reads a document of any length and answers a question about it.
http://HOST:PORT/ is a page to read with, /traces shows readings turn by turn. Without
a key in the environment it listens on this machine alone (docs/server.md).
With --jetstream it is JetStream's gRPC server at HOST:PORT, for prompts alone.

examples: notepad-jax serve --policy runs/quickstart/hf --port 8000
          notepad-jax serve --policy runs/quickstart/hf --jetstream --port 9000"""


def options(parser: Parser) -> None:
    parser.add_argument("--policy", help=POLICY)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    parser.add_argument("--served-name", metavar="NAME", help="of the model (the policy's)")
    parser.add_argument("--adapters", action="append", default=[], metavar="NAME=POLICY",
                     help="serve another run's or folder's adapters beside the same base (none); "
                     "also several times")  # fmt: skip
    folder = functools.partial(parser.add_argument, metavar="FOLDER")
    folder("--files", help="keep documents and readings here (a folder that ends with the server)")
    folder("--runs", help="show the runs in this folder, turn by turn, under /traces (none)")
    folder("--documents", action="append", default=[], help="requests may name its files (none); "
           "also gs://BUCKET/FOLDER, also several times")  # fmt: skip
    parser.add_argument("--key-variable", default=access.KEY, metavar="VARIABLE",
                     help=f"of the environment, with the key ({access.KEY})")  # fmt: skip
    parser.add_argument("--jetstream", action="store_true", help="JetStream's gRPC server instead")
    parser.add_argument("--rl", action="store_true", help="for trainers: /generate, pauses, other "
                     f"weights; with a key of its own ({access.CONTROL_KEY})")  # fmt: skip


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    address = access.Address(
        arguments.host, arguments.port, arguments.key_variable, arguments.rl, arguments.files,
        arguments.runs, tuple(arguments.documents), tuple(arguments.adapters),
    )  # fmt: skip
    program = jetstream if arguments.jetstream else serve
    ended = program.run(config, address, arguments.served_name, screen)
    return ended, f"served {ended.name} at {ended.url}"
