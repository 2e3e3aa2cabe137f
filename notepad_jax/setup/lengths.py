"""How long the document of a draw is, before anybody reads it.

Made documents are all of one length. A row of a file may say how many tokens it has (`length`);
else its characters are counted, and its first ones tokenised to see how many make a token: that
reads the text once more, and tokenises nothing twice. Good enough to share work out by length
(`reading.shares`) and to sort draws by it (`data.windows`), and never told to a policy. Above:
training.rollout_settings; below: task_stream.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from notepad_jax.data.task_sources import TaskSources
from notepad_jax.data.windows import windowed
from notepad_jax.setup.task_stream import TaskStream
from notepad_jax.text.tokenizer import Tokenizer, counter
from notepad_jax.types import Document

SAMPLE = 4096  # characters that are tokenised, to see how many make a token

Length = Callable[[int], int]  # of an ordinal's document: tokens, about; 0: all are equal


def in_windows(
    stream: TaskStream, tokenizer: Tokenizer, steps: int, documents: int, seed: int
) -> tuple[TaskStream, Length]:
    """Returns the stream in windows of so many steps (`data.windows`), and its lengths.

    They are those of whole documents, before any is cut; asking for one that cannot be read, in
    windows also for a draw of its window, raises ValueError naming the task. Made documents are of
    one length, and their stream stays as it is.
    """
    if stream.sources is None:
        return stream, lambda ordinal: 0
    of_row = _of_rows(stream.sources, counter(tokenizer))
    before = stream.records
    after = windowed(before, lambda place: of_row(*before.task(place)), steps, documents, seed)
    stream = dataclasses.replace(stream, records=after)
    return stream, lambda ordinal: of_row(*after.task(ordinal))


def _of_rows(sources: TaskSources, count: Callable[[str], int]) -> Callable[[str, int], int]:
    @functools.cache
    def of_row(source: str, number: int) -> int:
        task, said = sources.tasks[source][number]
        try:
            return said or about(task.document, count)
        except Exception as problem:
            raise ValueError(
                f"how long the document of task {task.id!r} is cannot be told, and rollout.window "
                f"sorts by it ({type(problem).__name__}: {problem}); mend or remove the task, or "
                f"set rollout.window=1"
            ) from problem

    return of_row


def about(document: Document, count: Callable[[str], int]) -> int:
    """Returns a document's tokens, about: its characters, by the tokens of its first ones."""
    characters, head = 0, ""
    for piece in document.pieces():
        characters += len(piece)
        head += piece[: SAMPLE - len(head)]
    return round(characters * count(head) / len(head)) if head else 0
