"""`notepad-jax eval`: evaluates a policy on documents of growing length."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from notepad_jax.commands.options import reader_options, run_options, suite_options
from notepad_jax.commands.parser import BY_SUITE, Parser
from notepad_jax.eval import methods
from notepad_jax.programs import evaluate, subjects
from notepad_jax.setup.config.whole import Config
from notepad_jax.tasks import suites
from notepad_jax.telemetry.screen import Screen

CONFIG = BY_SUITE
LONG = """\
Reads a suite of tasks at each length with each method, and reports scores with 95%
intervals, what was lost since the training length, and where. A suite is synthetic
(the starter's language), one of those below, or a file or folder of tasks (.jsonl, .json,
.parquet, .array_record), of which all rows are read, by length. The reader is a policy on
our engine, or any OpenAI-compatible endpoint. Everything goes to runs/NAME:
readings.jsonl, report.json, report.html.

examples: notepad-jax eval --policy runs/quickstart/hf --lengths 2k,32k,512k
          notepad-jax eval --suite ruler-qa --hotpotqa hotpot_dev_distractor_v1.json \\
              --policy Qwen2.5-7B-Instruct --methods notepad,full-context --repeats 4
          notepad-jax eval --suite eval_200.json --policy Qwen2.5-7B-Instruct
          notepad-jax eval --suite ruler --endpoint http://localhost:8000/v1"""


def options(parser: Parser) -> None:
    run_options(parser)
    parser.add_argument(
        "--suite",
        help=f"synthetic, {', '.join(suites.SUITES)}, or a path (synthetic; of an endpoint, "
        "ruler-qa)",
    )
    parser.add_argument("--methods", help=f"how documents are shown: {', '.join(methods.METHODS)}")
    parser.add_argument("--repeats", type=int, help="readings of each question")
    parser.add_argument(
        "--train-length", help="of the policy, as 32k: losses are counted from there"
    )
    suite_options(parser)
    reader_options(parser)


def run(
    arguments: argparse.Namespace, config: Config, folder: Path, screen: Screen
) -> tuple[Any, str]:
    evaluate.check_meant(config)  # before a policy is loaded or an endpoint asked
    reader = subjects.named(config, screen, config.evaluate.suite)
    outcome = evaluate.run(config, reader, folder, screen)
    return outcome, evaluate.text(outcome)
