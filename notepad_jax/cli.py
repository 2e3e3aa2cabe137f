"""The command-line interface, `notepad-jax`: parses, calls one program, prints its result.

Progress goes to standard error and results to standard output, as text or with `--json` as
one JSON object. Exit codes: 0 done; 1 something about the input is wrong (one line says
what); 2 the command line is wrong; 130 stopped with Ctrl-C, 143 with SIGTERM (a run goes on).

What each command is stands in `commands`; here is what they have in common.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax import keys
from notepad_jax.commands.parser import BY_SUITE, PrintedFailure, Unread, build_parser, named, show
from notepad_jax.near import nearest
from notepad_jax.parallel import hosts
from notepad_jax.setup import compiled, configuration, policies, process, settings, stopping
from notepad_jax.setup.config.whole import Config, Starter
from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.identity import read_sealed
from notepad_jax.telemetry.metrics import CONFIG
from notepad_jax.telemetry.progress import choose
from notepad_jax.telemetry.words import harmless
from notepad_jax.training import record, run_log
from notepad_jax.types import CompleterFailed

# No room, by the words of the system: what is written in C++ has wrapped the number in them.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READERS = ("eval", "ask", "serve")  # commands whose config suits who reads
# Options that stand for a config key.
SHORTHAND = {
    "recipe": "recipe",
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


def main(argv: Sequence[str] | None = None, alone: bool = False) -> int:
    """Runs one command; returns its exit code. Mistakes of the user end in one line.

    `alone`: the process is there for this, and a signal that cannot wait ends it.
    """
    process.quiet()
    arguments, overrides = parsed(sys.argv[1:] if argv is None else argv)
    folder = None

    def at_once(number: int) -> None:
        run_folder.abandon()
        ended(number, f"{stopping.Stopped(number)}{again(arguments, folder)}")

    def with_another(why: str) -> None:
        mend = f"--name {arguments.name} --resume --hosts={arguments.hosts}"
        said = f"{why}; go on with, on every host: notepad-jax {arguments.command} {mend}"
        ended(signal.SIGTERM, said)

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(stopping.told_apart(at_once if alone else None))
            if getattr(arguments, "hosts", None):
                stack.enter_context(hosts.joined(arguments.hosts, with_another, complain))
                follow_the_first(arguments)
            screen = stack.enter_context(
                choose(arguments.json or not hosts.first(), busy=compiled.watched())
            )
            if hasattr(arguments, "name"):
                folder = stack.enter_context(opened_folder(arguments, overrides))
            config = None
            if name := config_name(arguments, saved := saved_config(arguments, folder)):
                words = shorthand(arguments, name) + overrides
                config = configuration.load(name, words, saved)
                configuration.check_use(config, arguments.command)
                check_reader(arguments, config)
                if lent := habits(arguments, config):
                    config = configuration.load(name, words, saved, lent)
            process.prepared(config)
            refused = None
            try:
                result, text = arguments.run(arguments, config, folder, screen)
            except PrintedFailure as error:
                result, text, refused = error.result, error.text, error
        if hosts.first() and not (arguments.json and result is None):  # it has printed its lines
            show(json.dumps(result, indent=1, default=_plain) if arguments.json else harmless(text))
        if refused:
            raise refused
    except stopping.Stopped as stop:
        complain(f"{stop}{again(arguments, folder)}")
        return stop.exit_code
    except Unread:
        return 0
    except (ValueError, OSError, CompleterFailed) as error:
        said = " ".join(str(error).splitlines())
        if any(os.strerror(number) in said for number in FULL):
            said = f"the disk is full, make room{again(arguments, folder)} ({said})"
        complain(said)
        return 1
    return 0


def complain(said: str) -> None:
    """Prints a message to standard error, in a line of its own; to nobody where none reads it."""
    with contextlib.suppress(BrokenPipeError):
        print(f"notepad-jax: {harmless(said)}", file=sys.stderr, flush=True)


def ended(number: int, said: str) -> None:
    """Ends the process from any thread, as the signal would, after a line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nnotepad-jax: {said}\n".encode())
    os._exit(128 + number)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of a command line, and the overrides of its config.

    Exits with code 2 for what is not known, which names what comes near it.
    """
    parser = build_parser(named(argv))
    arguments, words = parser.parse_known_args(configuration.joined(argv))
    overrides = [word for word in words if word.startswith(configuration.FLAG)]
    configured = "config" in arguments and arguments.usual is not None
    unknown = [word for word in words if word not in overrides or not configured]
    if unknown:
        of_command = arguments.parser
        of_command.error(
            f"unrecognized arguments: {' '.join(unknown)}{near_miss(arguments, unknown)}"
        )
    return arguments, overrides


def near_miss(arguments: argparse.Namespace, unknown: Sequence[str]) -> str:
    """Returns "; did you mean ...?" for an option that is a config key, or comes near another."""
    said = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
    near = ""
    if name := arguments.config or arguments.usual:
        with contextlib.suppress(configuration.ConfigProblem):
            config = configuration.load("quickstart" if name == BY_SUITE else name)
            key = said.removeprefix("--").replace("-", "_")
            for known in keys.flat(config):
                if key in (known, known.rpartition(".")[2]):
                    near = near or configuration.FLAG + known
    options = re.findall(r"--[a-z][a-z-]*", arguments.parser.format_usage())
    near = near or nearest(said, options)
    return f"; did you mean {near}?" if near else ""


def again(arguments: argparse.Namespace, folder: Path | None) -> str:
    """Returns the hint how to resume a run; "" where there is none to go on with."""
    if folder is None or not folder.is_dir():
        return ""
    name = shlex.quote(folder.name)
    return f"; go on with: notepad-jax {arguments.command} --name {name} --resume"


def follow_the_first(arguments: argparse.Namespace) -> None:
    """Sets resume, step and mended to the first process's: it alone has the run's folder."""
    told = hosts.broadcast(lambda: [arguments.resume, arguments.step, arguments.mended])
    arguments.resume, arguments.step, arguments.mended = told


def opened_folder(
    arguments: argparse.Namespace, overrides: Sequence[str]
) -> contextlib.AbstractContextManager[Path]:
    """Opens and holds the run folder: new, or with --resume an old one, or as its steps know it."""
    named = arguments.name is not None
    name = run_folder.plain_name(arguments.name) if named else arguments.command
    folder = Path("runs") / name
    if arguments.resume and hasattr(arguments, "step"):  # of those that train
        elsewhere = checkpoint_folder(arguments, overrides)
        hosts.broadcast(lambda: record.bring_back(folder, elsewhere))
    if named or arguments.resume:
        return run_log.opened(folder, arguments.resume)
    if hosts.count() > 1:
        raise ValueError("several processes need one name for their run; say --name")
    return run_folder.numbered(folder)


def checkpoint_folder(arguments: argparse.Namespace, overrides: Sequence[str]) -> str:
    """Returns the checkpoint folder that the command line names; "" where it names none."""
    flag = f"{configuration.FLAG}checkpoint.folder="
    said = [word.removeprefix(flag) for word in overrides if word.startswith(flag)]
    if said or not arguments.config:
        return said[-1] if said else ""
    return configuration.load(arguments.config).checkpoint.folder


def config_name(arguments: argparse.Namespace, saved: Mapping[str, Any]) -> str | None:
    """Returns a command's config by name: what --config says, or the one that suits the suite."""
    if arguments.config or arguments.command not in READERS:
        return arguments.config or arguments.usual
    said, suite = vars(arguments), ""
    if arguments.usual == BY_SUITE:
        suite = said["suite"] or keys.flat(saved).get("evaluate.suite", settings.SYNTHETIC)
    return settings.suited(said["policy"], said.get("endpoint"), suite)


def habits(arguments: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Returns how the policy reads, for `eval`, `ask`, `serve` without --config; {} for others."""
    if arguments.command not in READERS or arguments.config or not config.policy:
        return {}
    if config.by_endpoint:
        return {}
    return policies.reads_as(config.policy)


def check_reader(arguments: argparse.Namespace, config: Config | Starter) -> None:
    """Raises ValueError for options of a policy or endpoint that the command would not look at."""
    said, served = vars(arguments), config.by_endpoint
    if served and said.get("policy"):
        raise ValueError("--policy and --endpoint both say who reads; say one of them")
    counting = ["tokenizer"] * (arguments.command != "build")  # which counts by it, whoever reads
    of_servers = [f"--{name}" for name in ("model", *counting) if said.get(name)]
    if of_servers and not served and arguments.command in ("ask", "eval", "build"):
        raise ValueError(f"{of_servers[0]} is of --endpoint; say that, too, or leave it out")


def shorthand(arguments: argparse.Namespace, name: str) -> list[str]:
    """Returns options that stand for a key of the config `name`, as overrides of it."""
    said = vars(arguments)
    given = {option: key for option, key in SHORTHAND.items() if said.get(option) is not None}
    known = keys.flat(configuration.load(name)) if given else {}
    for option, key in given.items():
        if key not in known:
            for_whom = "training" if key == configuration.RECIPE else "the suites of config ruler"
            raise ValueError(
                f"--{option.replace('_', '-')} stands for {key}, which config {name} does not "
                f"have; it is for {for_whom}"
            )
    return [f"{configuration.FLAG}{key}={said[option]}" for option, key in given.items()]


def saved_config(arguments: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Returns the settings of a resumed run, which are given again only where they are lost."""
    if folder is None or not arguments.resume:
        return {}
    mend = "say --config again, with all that was changed, and --resume goes on"
    try:
        return hosts.broadcast(lambda: read_sealed(folder / CONFIG, mend))
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
