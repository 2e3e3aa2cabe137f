"""`notepad-jax ask`: one question about a file of any size."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from notepad_jax.commands.options import reader_options
from notepad_jax.commands.parser import Parser
from notepad_jax.programs import ask, file_document
from notepad_jax.reader import Reader
from notepad_jax.setup import configuration
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen

CONFIG = "quickstart"
LONG = """\
Reads the file chunk by chunk in constant memory, then prints the answer and which
chunks changed the memory. On a terminal memory and answer are seen while they are
written; standard output gets the answer once, and a log of standard error a line a
turn. A server (--endpoint) is heard turn by turn.

A run is read as it was trained; of other policies, a chat model with config chat.

example: notepad-jax ask --policy runs/quickstart/hf story.txt 'code of Ada ?'"""


def options(parser: Parser) -> None:
    parser.add_argument("file", help="a text file, or - for standard input")
    parser.add_argument("question")
    parser.add_argument("--trace", metavar="FILE", help="append the reading, turn by turn, to this "
                     "file, for `notepad-jax trace`")  # fmt: skip
    reader_options(parser)


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    document = file_document.FileDocument(None if arguments.file == "-" else Path(arguments.file))
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
