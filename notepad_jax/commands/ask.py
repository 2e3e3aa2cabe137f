"""`notepad-jax ask`: questions about a file of any size."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from notepad_jax.commands.options import reader_options
from notepad_jax.commands.parser import Parser
from notepad_jax.programs import ask, file_document, questions
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

With --questions all questions of a file are read for at once. Where the template has the
question behind the chunk (reading.template=document_first) the document is prefilled once.

A run is read as it was trained; of other policies, a chat model with config chat.

example: notepad-jax ask --policy runs/quickstart/hf story.txt 'code of Ada ?'"""


def options(parser: Parser) -> None:
    parser.add_argument("file", help="a text file, or - for standard input")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("question", nargs="?", help="in quotes")
    asked.add_argument("--questions", metavar="FILE", help="ask all questions of this file, one a "
                    "line: the document is read once for all of them")  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="append the reading, turn by turn, to this "
                     "file, for `notepad-jax trace`")  # fmt: skip
    reader_options(parser)


def run(
    arguments: argparse.Namespace, config: Config, folder: None, screen: Screen
) -> tuple[Any, str]:
    document = file_document.FileDocument(None if arguments.file == "-" else Path(arguments.file))
    asked = _asked(arguments)
    ask.check_asked(document, asked)  # before any weight is loaded
    if arguments.trace:
        ask.check_trace(Path(arguments.trace))
    if config.reading.order == "serial":
        # As many read at once: a cache for more of them would be memory that is not used.
        slots = min(len(asked), config.engine.slots)
        config = configuration.changed(config, [f"{configuration.FLAG}engine.slots={slots}"])
    with Reader(config, screen) as reader:
        if arguments.questions is None:
            answer = reader.read(document, asked[0], arguments.trace)
            return answer, _told(answer)
        answers = reader.read_all(document, asked, arguments.trace)
    pairs = list(zip(asked, answers, strict=True))
    told = [{"question": question, **dataclasses.asdict(answer)} for question, answer in pairs]
    return told, "\n\n".join(f"{question}\n{_told(answer)}" for question, answer in pairs)


def _asked(arguments: argparse.Namespace) -> list[str]:
    if arguments.questions is None:
        return [arguments.question]
    return questions.of_file(arguments.questions)


def _told(answer: ask.Answer) -> str:
    where = ", ".join(f"{chunk:,}" for chunk, _ in answer.memories) or "none"
    early = ", and left the rest" * answer.early
    cut = ", the answer was cut at reading.max_answer" * answer.truncated
    return (
        f"{answer.answer}\n"
        f"(read {answer.tokens:,} tokens in {answer.chunks:,} chunks{early}{cut}; "
        f"chunks that changed the memory: {where})"
    )
