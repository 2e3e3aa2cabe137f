"""`notepad-jax build`: builds task files, to evaluate or to train on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from notepad_jax.commands.options import reader_options, suite_options
from notepad_jax.commands.parser import Parser
from notepad_jax.data import files
from notepad_jax.programs import build
from notepad_jax.setup.config.whole import Config
from notepad_jax.tasks import suites
from notepad_jax.telemetry.screen import Screen

CONFIG = "ruler"
LONG = """\
Makes the tasks of a suite at each length, one file each, and goes on with those that
are missing. SUITE is one of those below; golongrl, which converts the rows of --rows; or
the path of any file that `eval` reads, which is converted. Lengths are tokens of
--tokenizer; without one, of a stand-in that counts words and their parts.
`eval` asks the samples of seed 0 without any files: a training set needs a --seed of
its own, or other questions.

examples: notepad-jax build ruler --lengths 8k,32k,128k --samples 50 --out data/ruler
          notepad-jax build ruler-qa --hotpotqa hotpot_train_v1.1.json --out train \\
              --paragraphs 200 --samples 8192 --seed 1 --form array_record \\
              --drop-known --endpoint http://localhost:8000/v1"""


def options(parser: Parser) -> None:
    parser.add_argument(
        "suite",
        metavar="SUITE",
        help=f"{', '.join(suites.SUITES)}, golongrl or a path",
    )
    parser.add_argument("--out", required=True, help="the folder for the files")
    parser.add_argument("--form", default="jsonl", help=f"{' or '.join(files.FORMS)} (jsonl)")
    parser.add_argument("--seed", type=int, help="another seed makes other samples (0)")
    parser.add_argument(
        "--paragraphs", help="of ruler-qa, instead of lengths: 50,200 (published: 50 to 25,600)"
    )
    parser.add_argument("--rows", help="of golongrl: a parquet or jsonl file, or a gs:// URL")
    parser.add_argument(
        "--drop-known", action="store_true",
        help="leave out questions that the policy or endpoint answers without the document",
    )  # fmt: skip
    suite_options(parser)
    reader_options(parser)


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    making = ("--lengths", "--seed", "--text", "--hotpotqa", "--squad", *build.READERS)
    given = [option for option in making if vars(arguments)[option[2:]] is not None]
    made = build.run(
        config, Path(arguments.out), arguments.form, arguments.paragraphs, arguments.rows,
        arguments.drop_known, given, screen,
    )  # fmt: skip
    return made, build.text(made)
