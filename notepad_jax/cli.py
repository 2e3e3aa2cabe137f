"""`notepad-jax`: the command line. Parses, calls one program, prints its result.

Progress goes to standard error and results to standard output, as text or with `--json` as
one JSON object. Exit codes: 0 done; 1 something about the input is wrong (one line says
what); 2 the command line is wrong; 130 stopped with Ctrl-C (a training run can be resumed).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import pallas_kernels
from notepad_jax import __version__
from notepad_jax.eval import lengths
from notepad_jax.programs import (
    ask,
    configuration,
    convert,
    evaluate,
    parts,
    quickstart,
    train,
    warmup,
)
from notepad_jax.telemetry.progress import Screen, choose

EXIT_CODES = "exit codes: 0 done, 1 bad input, 2 bad command line, 130 stopped with Ctrl-C"
OVERRIDES = """\
Any value of the config can be changed on the command line:
  --config.steps=20 --config.grpo.clip_high=0.28
A key that does not exist is an error that names the nearest one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Mistakes of the user end in one line."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax and grain talk at every step
    parser = build_parser()
    arguments, words = parser.parse_known_args(argv)
    overrides = [word for word in words if word.startswith(configuration.FLAG)]
    unknown = [word for word in words if not word.startswith(configuration.FLAG)]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    folder = None
    try:
        with choose(quiet=arguments.json) as screen:
            if hasattr(arguments, "name"):
                folder = run_folder(arguments)
            config = ConfigDict()
            if arguments.config:
                config = configuration.load(arguments.config, overrides, saved_config(folder))
            pallas_kernels.use(config.get("kernels", "auto"))
            result, text = arguments.run(arguments, config, folder, screen)
    except KeyboardInterrupt:
        again = f"; go on with: notepad-jax {arguments.command} --name {folder.name} --resume" if (
            folder is not None and (folder / "checkpoints").is_dir()
        ) else ""  # fmt: skip
        print(f"notepad-jax: stopped{again}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except (ValueError, OSError) as error:
        print(f"notepad-jax: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1, default=_plain) if arguments.json else text)
    return 0


def run_folder(arguments: argparse.Namespace) -> Path:
    """The run's folder: new, or with --resume an existing one."""
    name = arguments.name or arguments.command
    folder = Path("runs") / name
    if arguments.resume:
        if not folder.is_dir():
            raise ValueError(f"there is no run {folder} to resume; see the folder runs/")
        return folder
    number = 2
    while folder.exists():
        if arguments.name:
            raise ValueError(f"{folder} exists; choose another --name, or go on with --resume")
        folder = Path("runs") / f"{name}-{number}"
        number += 1
    return folder


def saved_config(folder: Path | None) -> dict[str, Any]:
    """The settings of a run that is resumed: they need not be given again."""
    path = folder / "config.json" if folder is not None else None
    return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return str(value)


# ---------------------------------------------------------------- the commands


def _quickstart(
    arguments: argparse.Namespace, config: ConfigDict, folder: Path, screen: Screen
) -> tuple[Any, str]:
    outcome = quickstart.run(config, folder, screen, arguments.resume)
    return outcome, quickstart.text(outcome)


def _train(
    arguments: argparse.Namespace, config: ConfigDict, folder: Path, screen: Screen
) -> tuple[Any, str]:
    checkpoints = train.train(config, folder, screen, arguments.resume)
    return {"folder": folder, "checkpoints": checkpoints}, f"checkpoints in {checkpoints}"


def _warmup(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    numbers = warmup.run(config, screen)
    lines = [f"{name:>18}  {value:.4g}" for name, value in sorted(numbers.items())]
    return numbers, "\n".join(lines)


def _eval(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    policy = parts.load_policy(arguments.policy or config.policy)
    wanted = arguments.lengths.split(",") if arguments.lengths else config.evaluate.lengths
    results = evaluate.measure(config, policy, wanted, "eval", screen)
    if arguments.out:
        evaluate.save(Path(arguments.out), results)
    summaries = lengths.summarise(results)
    return summaries, evaluate.table(summaries)


def _ask(
    arguments: argparse.Namespace, config: ConfigDict, folder: None, screen: Screen
) -> tuple[Any, str]:
    policy = parts.load_policy(arguments.policy or config.policy)
    document = ask.FileDocument(None if arguments.file == "-" else Path(arguments.file))
    answer = ask.ask(config, policy, document, arguments.question, screen)
    where = ", ".join(f"{chunk:,}" for chunk, _ in answer.changes) or "none"
    text = (
        f"{answer.answer}\n"
        f"(read {answer.tokens:,} tokens in {answer.chunks:,} chunks; "
        f"chunks that changed the memory: {where})"
    )
    return answer, text


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
    if arguments.part_size <= 0:
        raise ValueError(f"--part-size is {arguments.part_size}; a part needs room, in GB")
    made = convert.export_hf(
        arguments.source, arguments.target, screen, arguments.dtype,
        int(arguments.part_size * 1e9), arguments.step, arguments.like, arguments.overwrite,
    )  # fmt: skip
    return made, (
        f"{made.folder}: step {made.step} of {made.source} as a {made.family}, "
        f"{made.tensors:,} tensors in {made.dtype}, {made.bytes / 1e6:,.1f} MB, "
        f"{len(made.files)} files, in {made.seconds:.1f} s"
    )


# ---------------------------------------------------------------- the parser


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="notepad-jax",
        description="Teach a language model to read without limit: chunk by chunk, with a bounded "
        "memory that it rewrites, trained by reinforcement learning on its final answers.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"notepad-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

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
        sub.set_defaults(run=run)
        sub.add_argument(
            "--config", default=config, help=f"a config file, or a name in configs/ ({config})"
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object, no progress")
        return sub

    def run_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--name", help="name of the run; its folder is runs/NAME")
        sub.add_argument(
            "--resume", action="store_true", help="go on where the run's last checkpoint stands"
        )

    run_options(command(
        "quickstart", _quickstart, "quickstart", "the whole claim at laptop scale, in 10 minutes",
        "Measures the starter policy by document length, trains it with GRPO on short documents,\n"
        "measures it again up to 3.5 million tokens, exports it, and writes a report with plots.",
    ))  # fmt: skip
    run_options(command(
        "train", _train, "quickstart", "reinforcement learning on the final answer (GRPO)",
        "Rollout, reward, update, hand-off, again. Everything goes to runs/NAME: config.json,\n"
        "metrics.jsonl and TensorBoard events, checkpoints/, trajectories.jsonl.\n\n"
        "example: notepad-jax train --name mine --config.steps=40 --config.seed=1",
    ))  # fmt: skip
    command(
        "warmup", _warmup, "starter", "make the starter policy by supervised learning",
        "Teaches a tiny policy to find facts and copy notes, and to forget: something honest for\n"
        "reinforcement learning to mend. Writes a Hugging Face folder.",
    )  # fmt: skip
    sub = command(
        "eval", _eval, "quickstart", "accuracy by document length",
        "Reads synthetic documents that training never draws, greedily, and prints accuracy with\n"
        "95% intervals.\n\n"
        "example: notepad-jax eval --policy runs/quickstart/hf --lengths 2k,32k,512k",
    )  # fmt: skip
    sub.add_argument("--policy", help="a Hugging Face folder (default: the config's)")
    sub.add_argument("--lengths", help="tokens, as 2k,32k,3.5m (default: the config's)")
    sub.add_argument("--out", help="also write every reading to this JSON file")
    sub = command(
        "ask", _ask, "quickstart", "one question about a file of any size",
        "Reads the file chunk by chunk in constant memory and shows the memory as it changes,\n"
        "then the answer and which chunks changed the memory.\n\n"
        "example: notepad-jax ask --policy runs/quickstart/hf story.txt 'code of Ada ?'",
    )  # fmt: skip
    sub.add_argument("file", help="a text file, or - for standard input")
    sub.add_argument("question")
    sub.add_argument("--policy", help="a Hugging Face folder (default: the config's)")

    def conversion(
        name: str, run: Callable[..., tuple[Any, str]], short: str, long: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=short,
            description=long,
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, config=None)
        sub.add_argument("--json", action="store_true", help="print one JSON object, no progress")
        sub.add_argument("--overwrite", action="store_true", help="replace the policy there")
        return sub

    sub = conversion(
        "import-hf", _import_hf, "a published model, as a checkpoint of ours",
        "Reads config.json, safetensors and tokenizer of a Qwen2/2.5, Qwen3, Qwen3-MoE, Llama or\n"
        "Mistral folder or bucket by byte range, each device its own slices, and writes a folder\n"
        "that `train`, `eval` and `ask` take as --policy. (They take a local Hugging Face folder\n"
        "as it is; import what lies in a bucket, or what is too large to hold twice.)\n\n"
        "example: notepad-jax import-hf gs://bucket/Qwen2.5-7B-Instruct policies/qwen",
    )  # fmt: skip
    sub.add_argument("source", metavar="SRC", help="a local Hugging Face folder or a gs:// URL")
    sub.add_argument("target", metavar="DST", help="a new local folder")
    sub.add_argument("--dtype", help="of the checkpoint: bfloat16 or float32 (default: as stored)")
    sub = conversion(
        "export-hf", _export_hf, "a trained checkpoint, as transformers and vLLM load it",
        "Streams one step out as sharded safetensors with index, config.json, generation_config\n"
        "and tokenizer. Interrupted, it leaves the old folder or none.\n\n"
        "example: notepad-jax export-hf runs/mine exported --dtype bfloat16",
    )  # fmt: skip
    sub.add_argument("source", metavar="SRC", help="a run (runs/NAME) or what import-hf wrote")
    sub.add_argument("target", metavar="DST", help="a new local folder or a gs:// URL")
    sub.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    sub.add_argument("--part-size", type=float, default=5.0, metavar="GB", help="of a file (5)")
    sub.add_argument("--step", type=int, help="which checkpoint (default: the newest)")
    sub.add_argument("--like", help="the Hugging Face folder whose tokenizer and ids to copy")
    return parser


if __name__ == "__main__":
    sys.exit(main())
