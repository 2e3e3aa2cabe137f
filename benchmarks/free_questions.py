"""Writes a dataset of free questions about texts, all written by hand for this.

    python -m benchmarks.free_questions free.jsonl
    python -m benchmarks.free_questions four.jsonl --together    # all four as one document
    python -m benchmarks.free_questions unseen.jsonl --unseen    # twenty about two others
    notepad-jax eval --suite free.jsonl --policy data/smollm2 --methods notepad,full-context

A diary, minutes of a meeting, a travel guide and a manual (`free_texts/`, a chunk of 512 tokens
each), ten questions each, as one asks a person. No policy of ours was trained on texts or questions
like these; but what is shipped was chosen by them, so two more texts are kept for the end
(`free_texts/unseen/`: a letter, a museum's notes). An answer is right that contains one of the
words that stand behind the question (`sub_em`). Above: `eval`, which reads the file; below:
data.files.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

from notepad_jax.data import files
from notepad_jax.types import Task, TextDocument

TEXTS = Path(__file__).with_name("free_texts")


def tasks(folder: Path = TEXTS, together: bool = False) -> Iterator[Task]:
    """Yields the questions, text by text; `together`: of one document, all texts of it."""
    paths = sorted(folder.glob("*.txt"))
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
    parser.add_argument("--unseen", action="store_true", help="the texts that chose nothing")
    said = parser.parse_args()
    folder = TEXTS / "unseen" if said.unseen else TEXTS
    files.write(said.out, tasks(folder, said.together), itertools.repeat(0))
