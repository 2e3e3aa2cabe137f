"""`notepad-jax import-hf`: a published model, as a checkpoint of ours."""

from __future__ import annotations

import argparse
from typing import Any

from notepad_jax.commands.options import overwrite_option
from notepad_jax.commands.parser import Parser
from notepad_jax.programs import convert
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen

CONFIG = None  # it has no config
LONG = """\
Reads config.json, safetensors and tokenizer of a Qwen2/2.5, Qwen3, Qwen3-MoE, Llama or
Mistral folder or bucket by byte range, each device its own slices, and writes a folder
that `train`, `eval` and `ask` take as --policy. (They take a local Hugging Face folder
as it is; import what lies in a bucket, or what is too large to hold twice.)

SRC may be a GGUF file of one of these (llama, qwen2, qwen3, qwen3moe; byte-level BPE):
quantised weights are multiplied out, config.json and tokenizer made of its metadata.
That needs pip install 'notepad-jax[gguf]'.

examples: notepad-jax import-hf gs://bucket/Qwen2.5-7B-Instruct policies/qwen
          notepad-jax import-hf SmolLM2-135M-Instruct.Q4_1.gguf policies/smollm2"""


def options(parser: Parser) -> None:
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a local Hugging Face folder, a gs:// URL, or a local .gguf file",
    )
    parser.add_argument("target", metavar="DST", help="a new local folder")
    parser.add_argument(
        "--dtype",
        help="of the checkpoint: bfloat16 or float32 (default: as stored; "
        "of GGUF bfloat16, float32 where all of it is)",
    )
    overwrite_option(parser)


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    made = convert.import_hf(
        arguments.source, arguments.target, screen, arguments.dtype, arguments.overwrite
    )
    return made, (
        f"{made.folder}: {made.parameters:,} parameters of a {made.family} in {made.dtype}, "
        f"over {made.devices} device(s), in {made.seconds:.1f} s"
    )
