"""What each command is: its options, its help, and the call of its program.

The file is long because these three change together, and all commands are read side by side
here. Each ends in what `--json` prints and what is printed without it. Above: `cli`, which
reads the config and runs one of them; below: programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from notepad_jax import __version__
from notepad_jax.data import files
from notepad_jax.eval import methods
from notepad_jax.planner import facts, fastest, plan, plan_table
from notepad_jax.programs import (
    ask,
    build,
    convert,
    evaluate,
    jetstream,
    quickstart,
    serve,
    subjects,
    traces,
    warmup,
)
from notepad_jax.reader import Reader
from notepad_jax.setup import configuration
from notepad_jax.telemetry.progress import Screen
from notepad_jax.training import check, train, trained
from pallas_kernels import aot

EXIT_CODES = "exit codes: 0 done, 1 bad input, 2 bad command line, 130 Ctrl-C, 143 SIGTERM"
OVERRIDES = """\
Any value of the config can be changed on the command line:
  --config.steps=20 --config.grpo.clip_high 0.28
A key that does not exist is an error that names the nearest one."""
POLICY = (
    "runs/NAME, runs/NAME@STEP or @best, a Hugging Face folder, or one of adapters (the config's)"
)
BY_SUITE = "by suite"  # the usual config of a command that has several
TRIES = 4  # settings that --fastest compiles at most


class Refused(ValueError):
    """A command that has something to print and yet ends with exit code 1."""

    def __init__(self, result: Any, text: str, problem: str) -> None:
        super().__init__(problem)
        self.result, self.text = result, text


def _quickstart(
    arguments: argparse.Namespace, config: ConfigDict, folder: Path, screen: Screen
) -> tuple[Any, str]:
    outcome = quickstart.run(config, folder, screen, arguments.resume, arguments.step)
    return outcome, quickstart.text(outcome)


def _train(
    arguments: argparse.Namespace, config: ConfigDict, folder: Path, screen: Screen
) -> tuple[Any, str]:
    train.train(config, folder, screen, arguments.resume, arguments.step, mended=arguments.mended)
    outcome = trained.outcome(config, folder)
    return outcome, trained.text(outcome)


def _plan(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    if not arguments.fastest and (arguments.price or arguments.tries is not None):
        raise ValueError("--price and --tries are of --fastest; say that, too, or leave them out")
    if arguments.estimate and arguments.largest:
        raise ValueError("--estimate compiles nothing, and --largest the largest: leave one out")
    known = facts.Kept(Path(arguments.out)) if arguments.out else {}
    if arguments.fastest:
        return _fastest(arguments, config, screen, known)
    changed: list[Any] = []
    programs = plan.LARGEST if arguments.largest else plan.ALL
    programs = plan.ESTIMATE if arguments.estimate else programs
    try:
        if arguments.fit:
            made, changed = plan.fit(config, arguments.tpu, screen, programs, known)
        else:
            made = plan.run(config, arguments.tpu, screen, known, programs)
    except plan.DoesNotFit as problem:
        raise Refused(problem.plan, plan_table.text(problem.plan), str(problem)) from problem
    return dataclasses.asdict(made) | {"changed": changed}, plan_table.text(made, changed)


def _fastest(
    arguments: argparse.Namespace, config: ConfigDict, screen: Screen, known: dict[str, Any]
) -> tuple[Any, str]:
    """Tells every point when it is there, as JSON or on the screen; Ctrl-C keeps the table."""
    points: list[fastest.Point] = []

    def told(point: fastest.Point) -> None:
        if not points and not arguments.json:
            screen.say(fastest.HEAD)
        points.append(point)
        line = {"point": dataclasses.asdict(point)}
        if isinstance(known, facts.Kept):
            known.add(line)
        if arguments.json:
            print(json.dumps(line), flush=True)
        else:
            screen.say(fastest.line(point))

    tries = TRIES if arguments.tries is None else arguments.tries
    if arguments.fit:
        raise ValueError("--fastest finds what fits by itself: leave out --fit")
    if tries < 0:
        raise ValueError(f"--tries is {tries}; use 0 (nothing is compiled) or more")
    if arguments.estimate or aot.missing_compiler():
        tries = 0
    names = fastest.slices(arguments.tpu)
    asked = fastest.Asked(config, names, fastest.prices(arguments.price), tries)
    try:
        fastest.search(asked, screen, told, known)
    except KeyboardInterrupt:
        if points and not arguments.json:
            print(fastest.text(points), flush=True)
        raise
    fast, cheap = fastest.winners(points)
    if arguments.json:
        print(json.dumps({"fastest": dataclasses.asdict(fast)}), flush=True)
        cheapest = None if cheap is None else dataclasses.asdict(cheap)
        print(json.dumps({"cheapest": cheapest}), flush=True)
    return None, fastest.text(points)


def _warmup(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    numbers = warmup.run(config, screen)
    lines = [f"{name:>18}  {value:.4g}" for name, value in sorted(numbers.items())]
    return numbers, "\n".join(lines)


def _eval(
    arguments: argparse.Namespace, config: ConfigDict, folder: Path, screen: Screen
) -> tuple[Any, str]:
    evaluate.check_meant(config)  # before anybody is asked to read
    reader = subjects.named(config, screen, config.evaluate.suite)
    outcome = evaluate.run(config, reader, folder, screen)
    return outcome, evaluate.text(outcome)


def _build(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = build.run(
        config, Path(arguments.out), arguments.form, arguments.paragraphs, arguments.rows,
        arguments.drop_known, screen,
    )  # fmt: skip
    return made, build.text(made)


def _ask(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    document = ask.FileDocument(None if arguments.file == "-" else Path(arguments.file))
    ask.check_asked(document, arguments.question)  # before any weight is loaded
    if arguments.trace:
        ask.check_trace(Path(arguments.trace))
    # One question is read: a cache for more of them would be memory that nobody uses.
    config = configuration.changed(config, [f"{configuration.FLAG}engine.slots=1"])
    with Reader(config, screen) as reader:
        answer = reader.read(document, arguments.question, arguments.trace)
    where = ", ".join(f"{chunk:,}" for chunk, _ in answer.memories) or "none"
    text = (
        f"{answer.answer}\n"
        f"(read {answer.tokens:,} tokens in {answer.chunks:,} chunks; "
        f"chunks that changed the memory: {where})"
    )
    return answer, text


def _trace(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = traces.run(arguments.runs, arguments.out, screen)
    asked = arguments.open or ("yes" if traces.may_open() and not arguments.json else "no")
    if asked == "yes":
        traces.show(made.page)
    return made, traces.text(made)


def _check(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = check.run(Path(arguments.folder), screen)
    if made.damaged:
        problem = f"{made.folder} is damaged in {len(made.damaged)} places"
        raise Refused(made, check.text(made), problem.replace(" 1 places", " one place"))
    return made, check.text(made)


def _serve(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    address = serve.Address(
        arguments.host, arguments.port, arguments.key_variable, arguments.rl, arguments.files,
        arguments.runs, tuple(arguments.documents), tuple(arguments.adapters),
    )  # fmt: skip
    program = jetstream if arguments.jetstream else serve
    ended = program.run(config, address, arguments.served_name, screen)
    return ended, f"served {ended.name} at {ended.url}"


def _import_hf(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = convert.import_hf(
        arguments.source, arguments.target, screen, arguments.dtype, arguments.overwrite
    )
    return made, (
        f"{made.folder}: {made.parameters:,} parameters of a {made.family} in {made.dtype}, "
        f"over {made.devices} device(s), in {made.seconds:.1f} s"
    )


def _export_hf(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    if not 0 < arguments.part_size < math.inf:
        raise ValueError(f"--part-size is {arguments.part_size}; a part needs room, in GB")
    if arguments.base and not arguments.adapters:
        raise ValueError("--base is what adapters belong on; say --adapters, or leave it out")
    if arguments.adapters:
        made = convert.export_adapters(
            arguments.source, arguments.target, screen, arguments.dtype or "float32",
            arguments.step, arguments.like, arguments.overwrite, arguments.base,
        )  # fmt: skip
    else:
        made = convert.export_hf(
            arguments.source, arguments.target, screen, arguments.dtype or "bfloat16",
            int(arguments.part_size * 1e9), arguments.step, arguments.like, arguments.overwrite,
        )  # fmt: skip
    what = "adapters of a" if arguments.adapters else "a"
    part = "" if made.step is None else f"step {made.step} of "
    return made, (
        f"{made.folder}: {part}{made.source} as {what} {made.family}, "
        f"{made.tensors:,} tensors in {made.dtype}, {made.bytes / 1e6:,.1f} MB, "
        f"{len(made.files)} files, in {made.seconds:.1f} s"
    )


# ---------------------------------------------------------------- the parser


class _Filled(argparse.Action):
    """Stores a value that is not empty, as that of a variable which nobody set."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        if value == "":
            parser.error(f"{option or self.metavar or self.dest} is empty; give a value")
        setattr(namespace, self.dest, value)


class _Once(_Filled):
    """An option of which the last one would undo some of the first, silently."""

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


def build_parser() -> Parser:
    parser = Parser(
        prog="notepad-jax",
        description="Teach a language model to read without limit: chunk by chunk, with a bounded "
        "memory that it rewrites, trained by reinforcement learning on its final answers.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"notepad-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.set_defaults(commands=commands.choices)

    def command(
        name: str, run: Callable[..., tuple[Any, str]], config: str, short: str, long: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=short,
            description=f"{long}\n\n{OVERRIDES}",
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, usual=config, parser=sub)
        sub.add_argument("--config", help=f"a config file, or a name in configs/ ({config})")
        sub.add_argument("--json", action="store_true", help="print one JSON object, no progress")
        return sub

    def run_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--name", help="name of the run; its folder is runs/NAME")
        sub.add_argument("--resume", action="store_true", help="go on where the run stopped")

    def recipe_option(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--recipe", metavar="NAME", action=_Once, help="how it learns: "
                         f"{', '.join(configuration.recipes())}; or a file with apply(config). "
                         "Overrides win over it (docs/algorithms.md)")  # fmt: skip

    def training_options(sub: argparse.ArgumentParser) -> None:
        run_options(sub)
        recipe_option(sub)
        sub.add_argument("--step", type=int, help="with --resume: from this checkpoint (the "
                         "newest good one); later ones are given up")  # fmt: skip

    def suite_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--tasks", help="some of the suite's tasks: vt,cwe (all)")
        sub.add_argument("--lengths", help="tokens, as 2k,32k,3.5m (the usual; of a file, all)")
        sub.add_argument("--samples", type=int, help="questions per task and length (the usual "
                         "128; of a file, all)")  # fmt: skip
        sub.add_argument("--text", help="haystack: stdlib, noise, a text file or folder")
        sub.add_argument("--hotpotqa", metavar="FILE", help="HotpotQA's json, here or in gs://")
        sub.add_argument("--squad", metavar="FILE", help="SQuAD's json, here or in gs://")

    def reader_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--policy", help=POLICY)
        sub.add_argument("--endpoint", metavar="URL", help="read through this server instead")
        sub.add_argument("--model", help="at the endpoint; may be left out if it has one")
        sub.add_argument("--tokenizer", help="a folder with a tokenizer that counts tokens")

    training_options(command(
        "quickstart", _quickstart, "quickstart", "the whole claim at laptop scale, in 6 minutes",
        "Measures the starter policy by document length, trains it with GRPO on short documents,\n"
        "measures it again up to 3.5 million tokens, exports it, and writes a report with plots.",
    ))  # fmt: skip
    sub = command(
        "train", _train, "quickstart", "reinforcement learning on the final answer (GRPO)",
        "Rollout, reward, update, hand-off, again. Everything goes to runs/NAME: config.json,\n"
        "metrics.jsonl and TensorBoard events, ledger.jsonl, checkpoints/, trajectories.jsonl,\n"
        "report.html. Held-out tasks are read every --config.validation.every steps.\n"
        "Ctrl-C or SIGTERM keeps the finished turns of the rollout, too, and --resume goes on.\n\n"
        "examples: notepad-jax train --name mine --config.steps=40 --config.seed=1\n"
        "          notepad-jax train --name clipped --recipe dapo --config.grpo.minibatches=4\n"
        "          notepad-jax train --config chat --name mine \\\n"
        "              --config.policy=path/to/Qwen2.5-0.5B-Instruct \\\n"
        "              --config.tasks.files=questions.jsonl",
    )  # fmt: skip
    training_options(sub)
    sub.add_argument("--mended", action="store_true", help="with --resume: rows of tasks.files "
                     "were mended since, where they stand; those left out stay so")  # fmt: skip
    sub.add_argument("--policy", help="what training begins with (the config's)")
    sub.add_argument("--hosts", metavar="WHERE", help="one run of several processes, started alike "
                     "on all hosts: auto (TPU pods, SLURM), or HOST:PORT,COUNT,INDEX; the first "
                     "has runs/NAME, and checkpoint.folder a bucket or a disk of all")  # fmt: skip
    sub = command(
        "plan", _plan, "qwen2_5_7b", "whether a config fits a TPU slice that is not here",
        "Compiles every program of a training run with the TPU compiler (no TPU is needed) and\n"
        "says what it needs of each chip's memory, what the chips send each other, how long a\n"
        "step would take at least, and what to change where it does not fit: exit code 1 then.\n"
        "`policy` may be a published model whose weights are not here.\n\n"
        "--fastest looks for the row length, rows at once, recomputation, devices to a row,\n"
        "devices to an engine and, where --tpu names several, the slice with which a step takes\n"
        "the fewest seconds, and the fewest dollars; its numbers stay what they are. Hundreds of\n"
        "settings are counted by arithmetic, the best compiled. Without libtpu, or with\n"
        "--estimate, arithmetic is all. With --json it prints a line for each when it is known.\n\n"
        "examples: notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p:2x4x4\n"
        "          notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p:2x4x4 --fastest\n"
        "          notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p,v6e --fastest \\\n"
        "              --estimate --price v5p=2.94",
    )  # fmt: skip
    recipe_option(sub)
    sub.add_argument(
        "--tpu", required=True, metavar="CHIP:SIDES", help="a slice, as v5p:2x4x4 or v6e:8x8; "
        "with --fastest several, by comma, or a chip: all of its slices up to "
        f"{fastest.MOST_CHIPS} chips",
    )  # fmt: skip
    sub.add_argument(
        "--fit", action="store_true", help="change the config until it fits, and say how"
    )
    sub.add_argument(
        "--largest", action="store_true",
        help="compile only the largest program of each kind, what full turns launch: half the time",
    )  # fmt: skip
    sub.add_argument("--estimate", action="store_true", help="compile nothing: arithmetic alone, "
                     "in a second and without libtpu")  # fmt: skip
    sub.add_argument("--fastest", action="store_true", help="search for the settings that make a "
                     "step fastest and cheapest")  # fmt: skip
    sub.add_argument("--tries", type=int, help="with --fastest: how many of the best are compiled "
                     f"at most ({TRIES}), each a few minutes of two cores")  # fmt: skip
    listed = ", ".join(f"{chip} {price:.2f}" for chip, price in fastest.PRICES.items())
    sub.add_argument("--price", action="append", default=[], metavar="CHIP=DOLLARS",
                     help=f"of a chip for an hour, also several times ({listed})")  # fmt: skip
    sub.add_argument("--out", metavar="FILE", help="append what is compiled and found to FILE as "
                     "it comes, as lines of JSON; what it holds is not compiled again")  # fmt: skip
    command(
        "warmup", _warmup, "starter", "make the starter policy by supervised learning",
        "Teaches a tiny policy to find facts and copy notes, and to forget: something honest for\n"
        "reinforcement learning to mend. Writes a Hugging Face folder.",
    )  # fmt: skip
    sub = command(
        "eval", _eval, BY_SUITE, "how well a policy reads documents of growing length",
        "Reads a suite of tasks at each length with each method, and reports scores with 95%\n"
        "intervals, what was lost since the training length, and where. A suite is synthetic\n"
        "(the starter's language), ruler, ruler-qa, memory, or a file or folder of tasks (.jsonl,\n"
        ".json, .parquet, .array_record), of which all rows are read, by length. The\n"
        "reader is a policy on our engine, or any OpenAI-compatible endpoint. Everything goes\n"
        "to runs/NAME: readings.jsonl, report.json, report.html.\n\n"
        "examples: notepad-jax eval --policy runs/quickstart/hf --lengths 2k,32k,512k\n"
        "          notepad-jax eval --suite ruler-qa --hotpotqa hotpot_dev_distractor_v1.json \\\n"
        "              --policy Qwen2.5-7B-Instruct --methods notepad,full-context --repeats 4\n"
        "          notepad-jax eval --suite eval_200.json --policy Qwen2.5-7B-Instruct\n"
        "          notepad-jax eval --suite ruler --endpoint http://localhost:8000/v1",
    )  # fmt: skip
    run_options(sub)
    sub.add_argument(
        "--suite",
        help="synthetic, ruler, ruler-qa, memory, or a path (synthetic; of an endpoint, ruler-qa)",
    )
    sub.add_argument("--methods", help=f"how documents are shown: {', '.join(methods.METHODS)}")
    sub.add_argument("--repeats", type=int, help="readings of each question")
    sub.add_argument("--train-length", help="of the policy, as 32k: losses are counted from there")
    suite_options(sub)
    reader_options(sub)
    sub = command(
        "build", _build, "ruler", "task files, to evaluate or to train on",
        "Makes the tasks of a suite at each length, one file each, and goes on with those that\n"
        "are missing. SUITE is ruler (13 tasks), ruler-qa, memory; golongrl, which converts the\n"
        "rows of --rows; or the path of any file that `eval` reads, which is converted. Lengths\n"
        "are tokens of --tokenizer; without one, of a stand-in that counts words and their parts.\n"
        "`eval` asks the samples of seed 0 without any files: a training set needs a --seed of\n"
        "its own, or other questions.\n\n"
        "examples: notepad-jax build ruler --lengths 8k,32k,128k --samples 50 --out data/ruler\n"
        "          notepad-jax build ruler-qa --hotpotqa hotpot_train_v1.1.json --out train \\\n"
        "              --paragraphs 200 --samples 8192 --seed 1 --form array_record \\\n"
        "              --drop-known --endpoint http://localhost:8000/v1",
    )  # fmt: skip
    sub.add_argument("suite", metavar="SUITE", help="ruler, ruler-qa, memory, golongrl or a path")
    sub.add_argument("--out", required=True, help="the folder for the files")
    sub.add_argument("--form", default="jsonl", help=f"{' or '.join(files.FORMS)} (jsonl)")
    sub.add_argument("--seed", type=int, help="another seed makes other samples (0)")
    sub.add_argument(
        "--paragraphs", help="of ruler-qa, instead of lengths: 50,200 (published: 50 to 25,600)"
    )
    sub.add_argument("--rows", help="of golongrl: a parquet or jsonl file, or a gs:// URL")
    sub.add_argument(
        "--drop-known", action="store_true",
        help="leave out questions that the policy or endpoint answers without the document",
    )  # fmt: skip
    suite_options(sub)
    reader_options(sub)
    sub = command(
        "ask", _ask, "quickstart", "one question about a file of any size",
        "Reads the file chunk by chunk in constant memory, then prints the answer and which\n"
        "chunks changed the memory. On a terminal memory and answer are seen while they are\n"
        "written; standard output gets the answer once, and a log of standard error a line a\n"
        "turn. A server (--endpoint) is heard turn by turn.\n\n"
        "A run is read as it was trained; of other policies, a chat model with config chat.\n\n"
        "example: notepad-jax ask --policy runs/quickstart/hf story.txt 'code of Ada ?'",
    )  # fmt: skip
    sub.add_argument("file", help="a text file, or - for standard input")
    sub.add_argument("question")
    sub.add_argument("--trace", metavar="FILE", help="append the reading, turn by turn, to this "
                     "file, for `notepad-jax trace`")  # fmt: skip
    reader_options(sub)
    sub = command(
        "serve", _serve, "quickstart", "the policy behind OpenAI's API",
        "Answers at http://HOST:PORT/v1 until Ctrl-C: chat/completions, completions (text or\n"
        "token ids), models; /tokenize, /health, /metrics. NAME continues what it is given,\n"
        "NAME:notepad reads a document of any length and answers a question about it.\n"
        "http://HOST:PORT/ is a page to read with, /traces shows readings turn by turn. Without\n"
        "a key in the environment it listens on this machine alone (docs/server.md).\n"
        "With --jetstream it is JetStream's gRPC server at HOST:PORT, for prompts alone.\n\n"
        "examples: notepad-jax serve --policy runs/quickstart/hf --port 8000\n"
        "          notepad-jax serve --policy runs/quickstart/hf --jetstream --port 9000",
    )  # fmt: skip
    sub.add_argument("--policy", help=POLICY)
    sub.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    sub.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    sub.add_argument("--served-name", metavar="NAME", help="of the model (the policy's)")
    sub.add_argument("--adapters", action="append", default=[], metavar="NAME=POLICY",
                     help="serve another run's or folder's adapters beside the same base (none); "
                     "also several times")  # fmt: skip
    folder = functools.partial(sub.add_argument, metavar="FOLDER")
    folder("--files", help="keep documents and readings here (a folder that ends with the server)")
    folder("--runs", help="show the runs in this folder, turn by turn, under /traces (none)")
    folder("--documents", action="append", default=[], help="requests may name its files (none); "
           "also gs://BUCKET/FOLDER, also several times")  # fmt: skip
    sub.add_argument("--key-variable", default=serve.KEY, metavar="VARIABLE",
                     help=f"of the environment, with the key ({serve.KEY})")  # fmt: skip
    sub.add_argument("--jetstream", action="store_true", help="JetStream's gRPC server instead")
    sub.add_argument("--rl", action="store_true", help="for trainers: /generate, pauses, other "
                     f"weights; with a key of its own ({serve.CONTROL_KEY})")  # fmt: skip

    def plain(
        name: str, run: Callable[..., tuple[Any, str]], short: str, long: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=short,
            description=long,
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, config=None, usual=None, parser=sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object, no progress")
        return sub

    sub = plain(
        "trace", _trace, "readings to look through, turn by turn, as a page",
        "Makes a folder with a page of all readings of a run or an evaluation: what the memory\n"
        "became after each chunk, word by word; the evidence in it; the exact prompts and what\n"
        "was sampled, where they were kept; other samples, steps and runs beside it. Any browser\n"
        "opens it from the disk, and no request leaves the machine. Two runs are compared.\n\n"
        "examples: notepad-jax trace runs/quickstart\n"
        "          notepad-jax trace runs/before runs/after --out compared --open no",
    )  # fmt: skip
    sub.add_argument("runs", nargs="+", metavar="RUN", help="runs/NAME, the folder of an "
                     "evaluation, a trajectories.jsonl or a readings.jsonl")  # fmt: skip
    sub.add_argument("--out", help="the page's folder (trace, in the run's)")
    sub.add_argument("--open", choices=("yes", "no"), help="in a browser (yes, where there is a "
                     "screen)")  # fmt: skip

    sub = plain(
        "check", _check, "is everything in a run's folder as it was written?",
        "Looks through the folder of a run or an evaluation: settings, every line of metrics,\n"
        "ledger, timings and readings, every byte of every checkpoint, the base of adapters. Says\n"
        "what is damaged and what to do, and changes nothing; exit code 1 where something is.\n\n"
        "example: notepad-jax check runs/mine",
    )  # fmt: skip
    sub.add_argument("folder", metavar="RUN", help="runs/NAME")

    def conversion(
        name: str, run: Callable[..., tuple[Any, str]], short: str, long: str
    ) -> argparse.ArgumentParser:
        sub = plain(name, run, short, long)
        sub.add_argument("--overwrite", action="store_true", help="replace the policy there")
        return sub

    sub = conversion(
        "import-hf", _import_hf, "a published model, as a checkpoint of ours",
        "Reads config.json, safetensors and tokenizer of a Qwen2/2.5, Qwen3, Qwen3-MoE, Llama or\n"
        "Mistral folder or bucket by byte range, each device its own slices, and writes a folder\n"
        "that `train`, `eval` and `ask` take as --policy. (They take a local Hugging Face folder\n"
        "as it is; import what lies in a bucket, or what is too large to hold twice.)\n\n"
        "SRC may be a GGUF file of one of these (llama, qwen2, qwen3, qwen3moe; byte-level BPE):\n"
        "quantised weights are multiplied out, config.json and tokenizer made of its metadata.\n"
        "That needs pip install 'notepad-jax[gguf]'.\n\n"
        "examples: notepad-jax import-hf gs://bucket/Qwen2.5-7B-Instruct policies/qwen\n"
        "          notepad-jax import-hf SmolLM2-135M-Instruct.Q4_1.gguf policies/smollm2",
    )  # fmt: skip
    sub.add_argument("source", metavar="SRC", help="a local Hugging Face folder, a gs:// URL, or a "
                     "local .gguf file")  # fmt: skip
    sub.add_argument("target", metavar="DST", help="a new local folder")
    sub.add_argument("--dtype", help="of the checkpoint: bfloat16 or float32 (default: as stored; "
                     "of GGUF bfloat16, float32 where all of it is)")  # fmt: skip
    sub = conversion(
        "export-hf", _export_hf, "a trained checkpoint, as transformers and vLLM load it",
        "Streams one step out as sharded safetensors with index, config.json, generation_config\n"
        "and tokenizer. Interrupted, it leaves the old folder or none. --adapters writes those of\n"
        "a run with grpo.lora.rank above 0 alone, as PEFT loads them onto the published model;\n"
        "such a folder is a policy here as well (--policy), and exported it is added in.\n\n"
        "examples: notepad-jax export-hf runs/mine exported --dtype bfloat16\n"
        "          notepad-jax export-hf runs/mine adapters --adapters --base policies/qwen",
    )  # fmt: skip
    sub.add_argument(
        "source", metavar="SRC",
        help="runs/NAME, runs/NAME@STEP or @best, what import-hf wrote, or a folder of adapters",
    )  # fmt: skip
    sub.add_argument("target", metavar="DST", help="a new local folder or a gs:// URL")
    sub.add_argument("--adapters", action="store_true", help="adapters alone, for PEFT")
    sub.add_argument("--base", help="what the adapters' files call the model that they belong on, "
                     "a path or a name (default: as the run does)")  # fmt: skip
    sub.add_argument("--dtype", help="bfloat16 or float32 (bfloat16; of adapters, float32)")
    sub.add_argument("--part-size", type=float, default=5.0, metavar="GB", help="of a file (5)")
    sub.add_argument("--step", type=int, help="which checkpoint (default: the newest good one)")
    sub.add_argument("--like", help="the Hugging Face folder whose tokenizer and ids to copy")
    return parser
