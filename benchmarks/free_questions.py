"""Writes a dataset of free questions: forty about four texts, all written by hand for this.

    python -m benchmarks.free_questions free.jsonl
    python -m benchmarks.free_questions four.jsonl --together    # all four as one document
    notepad-jax eval --suite free.jsonl --policy data/smollm2 --methods notepad,full-context

A diary, minutes of a meeting, a travel guide and a manual (`free_texts/`, a chunk of 512 tokens
each), ten questions each, as one asks a person. No policy of ours was trained on texts or questions
like these. An answer is right that contains one of the words that stand behind the question
(`sub_em`). Above: `eval`, which reads the file; below: data.files.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

from notepad_jax.data import files
from notepad_jax.types import Task, TextDocument

TEXTS = Path(__file__).with_name("free_texts")


def tasks(together: bool = False) -> Iterator[Task]:
    """Yields the questions, text by text; `together`: of one document, all texts of it."""
    paths = sorted(TEXTS.glob("*.txt"))
    parts = [path.read_text(encoding="utf-8").split("\n? ") for path in paths]
    whole = "\n\n".join(text.strip() for text, *_ in parts)
    for path, (text, *asked) in zip(paths, parts, strict=True):
        document = TextDocument(whole if together else text.strip())
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the task file")
    parser.add_argument("--together", action="store_true", help="about one document of all texts")
    said = parser.parse_args()
    files.write(said.out, tasks(said.together), itertools.repeat(0))
