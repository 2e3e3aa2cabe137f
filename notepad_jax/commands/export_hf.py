"""`notepad-jax export-hf`: a trained checkpoint, as transformers and vLLM load it."""

from __future__ import annotations

import argparse
import math
from typing import Any

from notepad_jax.commands.options import overwrite_option
from notepad_jax.commands.parser import Parser
from notepad_jax.programs import export
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen

CONFIG = None  # it has no config
LONG = """\
Streams one step out as sharded safetensors with index, config.json, generation_config
and tokenizer. Interrupted, it leaves the old folder or none. --adapters writes those of
a run with grpo.lora.rank above 0 alone, as PEFT loads them onto the published model;
such a folder is a policy here as well (--policy), and exported it is added in.

examples: notepad-jax export-hf runs/mine exported --dtype bfloat16
          notepad-jax export-hf runs/mine adapters --adapters --base policies/qwen"""


def options(parser: Parser) -> None:
    parser.add_argument(
        "source", metavar="SRC",
        help="runs/NAME, runs/NAME@STEP or @best, what import-hf wrote, or a folder of adapters",
    )  # fmt: skip
    parser.add_argument("target", metavar="DST", help="a new local folder or a gs:// URL")
    parser.add_argument("--adapters", action="store_true", help="adapters alone, for PEFT")
    parser.add_argument(
        "--base",
        help="what the adapters' files call the model that they belong on, "
        "a path or a name (default: as the run does)",
    )
    parser.add_argument("--dtype", help="bfloat16 or float32 (bfloat16; of adapters, float32)")
    parser.add_argument("--part-size", type=float, default=5.0, metavar="GB", help="of a file (5)")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest good one)")
    parser.add_argument("--like", help="the Hugging Face folder whose tokenizer and ids to copy")
    overwrite_option(parser)


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    if not 0 < arguments.part_size < math.inf:
        raise ValueError(f"--part-size is {arguments.part_size}; a part needs room, in GB")
    if arguments.base and not arguments.adapters:
        raise ValueError("--base is what adapters belong on; say --adapters, or leave it out")
    if arguments.adapters:
        made = export.export_adapters(
            arguments.source, arguments.target, screen, arguments.dtype or "float32",
            arguments.step, arguments.like, arguments.overwrite, arguments.base,
        )  # fmt: skip
    else:
        made = export.export_hf(
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
