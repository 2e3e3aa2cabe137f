"""Writes a dataset of free questions: forty about four texts, all written by hand for this.

    python -m benchmarks.free_questions free.jsonl
    notepad-jax eval --suite free.jsonl --policy data/smollm2 --methods notepad,full-context

A diary, minutes of a meeting, a travel guide and a manual (`free_texts/`, a chunk of 512 tokens
each), ten questions each, as one asks a person. No policy of ours was trained on texts or questions
like these. An answer is right that contains one of the words that stand behind the question
(`sub_em`). Above: `eval`, which reads the file; below: data.files.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from notepad_jax.data import files
from notepad_jax.types import Task, TextDocument

TEXTS = Path(__file__).with_name("free_texts")


def tasks() -> Iterator[Task]:
    """Yields the questions, text by text."""
    for path in sorted(TEXTS.glob("*.txt")):
        text, *asked = path.read_text(encoding="utf-8").split("\n? ")
        document = TextDocument(text.strip())
        for number, line in enumerate(asked):
            question, _, answers = line.partition(" => ")
            yield Task(
                id=f"{path.stem}-{number}",
                question=question,
                document=document,
                answers=tuple(answers.strip().split("|")),
                source=f"free/{path.stem}",
                metric="sub_em",
                contract="auto",
            )


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m benchmarks.free_questions FILE.jsonl")
    files.write(sys.argv[1], tasks(), itertools.repeat(0))
