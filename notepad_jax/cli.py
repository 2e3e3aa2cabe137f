"""`notepad-jax`: the command line. Parses, calls one program, prints its result.

Progress goes to standard error and results to standard output, as text or with `--json` as
one JSON object. Exit codes: 0 done; 1 something about the input is wrong (one line says
what); 2 the command line is wrong; 130 stopped with Ctrl-C, 143 with SIGTERM (a run goes on).

What the commands are stands in `commands`; here is what they have in common.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import pallas_kernels
from notepad_jax import commands
from notepad_jax.parallel import hosts
from notepad_jax.programs import compiled, configuration, policies, reading_list, stopping, telling
from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.identity import read_json
from notepad_jax.telemetry.metrics import CONFIG
from notepad_jax.telemetry.progress import choose
from notepad_jax.text import chat
from notepad_jax.types import CompleterFailed

# No room, by the words of the system: what is written in C++ has wrapped the number in them.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Options of the commands `eval`, `ask` and `build` that stand for a config key.
SHORTHAND = {
    "policy": "policy",
    "suite": "evaluate.suite",
    "tasks": "evaluate.tasks",
    "lengths": "evaluate.lengths",
    "methods": "evaluate.methods",
    "samples": "evaluate.samples",
    "repeats": "evaluate.repeats",
    "train_length": "evaluate.train_length",
    "seed": "seed",
    "text": "sources.text",
    "hotpotqa": "sources.hotpotqa",
    "squad": "sources.squad",
    "endpoint": "endpoint.url",
    "model": "endpoint.model",
    "tokenizer": "endpoint.tokenizer",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Mistakes of the user end in one line."""
    # orbax and grain talk at every step; what they log as an error they raise as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    parser = commands.build_parser()
    arguments, words = parser.parse_known_args(argv)
    overrides = [word for word in words if word.startswith(configuration.FLAG)]
    unknown = [word for word in words if not word.startswith(configuration.FLAG)]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    folder = None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(stopping.told_apart())
            if getattr(arguments, "hosts", None):
                hosts.join(arguments.hosts)
            screen = stack.enter_context(
                choose(arguments.json or not hosts.first(), busy=compiled.watched())
            )
            if hasattr(arguments, "name"):
                folder = stack.enter_context(opened_folder(arguments))
            config = ConfigDict()
            if name := config_name(arguments, saved := saved_config(arguments, folder)):
                words = shorthand(arguments, name) + overrides
                config = configuration.load(name, words, saved)
                if lent := habits(arguments, config):
                    config = configuration.load(name, words, lent | saved)
            compiled.keep()
            pallas_kernels.use(config.get("kernels", "auto"))
            refused = None
            try:
                result, text = arguments.run(arguments, config, folder, screen)
            except commands.Refused as error:
                result, text, refused = error.result, error.text, error
        if hosts.first():
            _print(json.dumps(result, indent=1, default=_plain) if arguments.json else text)
        if refused:
            raise refused
    except stopping.Stopped as stop:
        print(f"notepad-jax: {stop}{again(arguments, folder)}", file=sys.stderr)
        return stop.exit_code
    except BrokenPipeError:
        return 0
    except (ValueError, OSError, CompleterFailed) as error:
        said = " ".join(str(error).splitlines())
        if any(os.strerror(number) in said for number in FULL):
            said = f"the disk is full, make room{again(arguments, folder)} ({said})"
        print(f"notepad-jax: {said}", file=sys.stderr)
        return 1
    return 0


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # the reader is gone, or the disk full; Python would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def again(arguments: argparse.Namespace, folder: Path | None) -> str:
    """Says how to go on with a run, if there is one to go on with."""
    if folder is None or not folder.is_dir():
        return ""
    return f"; go on with: notepad-jax {arguments.command} --name {folder.name} --resume"


def opened_folder(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Path]:
    """The run's folder, held: new, or with --resume an existing one."""
    named = arguments.name is not None
    name = run_folder.plain_name(arguments.name) if named else arguments.command
    folder = Path("runs") / name
    if named or arguments.resume:
        return telling.opened(folder, arguments.resume)
    if hosts.count() > 1:
        raise ValueError("several processes need one name for their run; say --name")
    return run_folder.numbered(folder)


def config_name(arguments: argparse.Namespace, saved: Mapping[str, Any]) -> str | None:
    """The config of a command: what --config says, or the one that suits the suite."""
    if arguments.config or arguments.usual is None:
        return arguments.config
    if (
        arguments.command == "ask"
        and arguments.policy
        and chat.has_template(Path(arguments.policy))
    ):
        return "chat"
    if arguments.usual != commands.BY_SUITE:
        return arguments.usual
    known = configuration.flat(saved).get("evaluate.suite", reading_list.SYNTHETIC)
    suite = arguments.suite or known
    elsewhere = suite != reading_list.SYNTHETIC or getattr(arguments, "endpoint", None)
    return "ruler" if elsewhere else "quickstart"


def habits(arguments: argparse.Namespace, config: ConfigDict) -> dict[str, Any]:
    """How the run reads that `eval` and `ask` are to read with, unless --config says how."""
    if arguments.command not in ("eval", "ask") or arguments.config or not config.policy:
        return {}
    if config.get("endpoint") and config.endpoint.url:
        return {}
    return policies.reads_as(config.policy)


def shorthand(arguments: argparse.Namespace, name: str) -> list[str]:
    """Options that stand for a key of the config `name`, as overrides of it."""
    said = vars(arguments)
    given = {option: key for option, key in SHORTHAND.items() if said.get(option) is not None}
    known = configuration.flat(configuration.load(name)) if given else {}
    for option, key in given.items():
        if key not in known:
            raise ValueError(
                f"--{option.replace('_', '-')} stands for {key}, which config {name} does not "
                "have; it is for the suites of config ruler"
            )
    return [f"{configuration.FLAG}{key}={said[option]}" for option, key in given.items()]


def saved_config(arguments: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """The settings of a run that is resumed, which need not be given again unless they are lost."""
    if folder is None or not arguments.resume:
        return {}
    mend = "say --config again, with all that was changed, and --resume goes on"
    try:
        return read_json(folder / CONFIG, mend)
    except ValueError:
        if arguments.config:
            return {}
        raise


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
