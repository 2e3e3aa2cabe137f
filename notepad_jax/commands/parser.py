"""The command line's parser: the commands by name, and their options.

Only the file of the command that is asked for is imported, so that a list of them costs no seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from notepad_jax import __version__
from notepad_jax.near import meant

# The file of a command has its name, with _ for -.
COMMANDS = {
    "quickstart": "the whole claim at laptop scale, in 6 minutes",
    "train": "reinforcement learning on the final answer (GRPO)",
    "rollout": "read for a training run whose trainer is elsewhere",
    "plan": "whether a config fits a TPU slice that is not here",
    "warmup": "make the starter policy by supervised learning",
    "eval": "how well a policy reads documents of growing length",
    "build": "task files, to evaluate or to train on",
    "ask": "one question about a file of any size",
    "serve": "the policy behind OpenAI's API",
    "trace": "readings to look through, turn by turn, as a page",
    "audit": "were turns said by the policy that the run names?",
    "check": "is everything in a run's folder as it was written?",
    "import-hf": "a published model, as a checkpoint of ours",
    "export-hf": "a trained checkpoint, as transformers and vLLM load it",
}
EXIT_CODES = "exit codes: 0 done, 1 bad input, 2 bad command line, 130 Ctrl-C, 143 SIGTERM"
OVERRIDES = """\
Any value of the config can be changed on the command line:
  --config.steps=20 --config.grpo.clip_high 0.28
A key that does not exist is an error that names the nearest one."""
BY_SUITE = "by suite"  # the usual config of a command that has several


class PrintedFailure(ValueError):
    """A command that has something to print and yet ends with exit code 1."""

    def __init__(self, result: Any, text: str, problem: str) -> None:
        super().__init__(problem)
        self.result, self.text = result, text


class Unread(Exception):
    """Standard output is read no further: the command ends there, and all is well."""


def show(text: str) -> None:
    """Prints a result to standard output; raises Unread, or OSError where a disk is full."""
    encoding = sys.stdout.encoding or "utf-8"  # which may lack letters of an answer
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as problem:  # Python would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(problem, BrokenPipeError):
            raise Unread from None
        raise


class _Filled(argparse.Action):
    """Stores a value; refuses an empty one, as that of a shell variable that is not set."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        if value == "" or (isinstance(value, list) and "" in value):
            parser.error(f"{option or self.metavar or self.dest} is empty; give a value")
        setattr(namespace, self.dest, value)


class Once(_Filled):
    """An option that may be given once: a second one would undo some of the first, silently."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        if (before := getattr(namespace, self.dest)) is not None:
            parser.error(f"{option} is said twice, {before} and {value}; say one")
        super().__call__(parser, namespace, value, option)


class Parser(argparse.ArgumentParser):
    """Parses a command line; what is wrong with it is one line, with exit code 2."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.register("action", None, _Filled)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def named(argv: Sequence[str]) -> str:
    """Returns the command that a command line names.

    Exits where it names none: with code 0 for --help and --version, else with 2 and the nearest.
    """
    word = next((word for word in argv if not word.startswith("-")), None)
    if word in COMMANDS:
        return word
    parser = build_parser()
    if word is not None and word == argv[0]:
        hint = meant(word, COMMANDS, f"there are {', '.join(COMMANDS)}")
        parser.error(f"there is no command {word!r}; {hint}")
    parser.parse_args(argv)
    parser.error("say a command")


def build_parser(command: str | None = None) -> Parser:
    """Returns the parser of `notepad-jax`, with the options of one command; the others are listed.

    What it parses has `run`, `usual` (the config) and `parser` (the command's), as that says.
    """
    parser = Parser(
        prog="notepad-jax",
        description="Teach a language model to read without limit: chunk by chunk, with a bounded "
        "memory that it rewrites, trained by reinforcement learning on its final answers.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"notepad-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, short in COMMANDS.items():
        sub = commands.add_parser(
            name, help=short, epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if name == command:
            _fill(sub, importlib.import_module(f"notepad_jax.commands.{name.replace('-', '_')}"))
    return parser


def _fill(parser: Parser, command: Any) -> None:
    """Adds the options and defaults of a command's file to its parser."""
    usual = command.CONFIG
    parser.description = command.LONG if usual is None else f"{command.LONG}\n\n{OVERRIDES}"
    parser.set_defaults(run=command.run, usual=usual, parser=parser)
    if usual is None:
        parser.set_defaults(config=None)
    else:
        parser.add_argument("--config", help=f"a config file, or a name in configs/ ({usual})")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no progress")
    command.options(parser)
