"""Estimates the length of a draw's document before it is read, and sorts draws by length.

A made document's follows from its seed, if not all are of one length. A row of a file may say how
many tokens it has (`length`); else its characters are counted, and its first ones tokenised to see
how many make a token: that reads the text once more, and tokenises nothing twice. Good enough to
share work out by length (`reading.shares`) and to sort draws by it, and never told to a policy.

A step's rollout waits for its longest document. So in a window the draws of W steps are sorted by
length and dealt to the W batches: the longest is waited for once in W steps, and every draw is
still read by the newest policy. (RollPacker, 2025, without its guess at lengths and without
dropping anything.) A window is a permutation of aligned places of the stream, a function of the
seed and its first place, so what goes by ordinals (ledger, resume, replacements, journals) needs
nothing new. Above: training.rollout_settings; below: task_stream.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from notepad_jax.data.records import Records
from notepad_jax.data.task_sources import TaskSources
from notepad_jax.setup.task_stream import TaskStream
from notepad_jax.text.tokenizer import Tokenizer, counter
from notepad_jax.types import Document

KEPT = 4  # windows whose permutations are remembered
SAMPLE = 4096  # characters that are tokenised, to see how many make a token

Length = Callable[[int], int]  # of an ordinal's document: tokens, about; 0: all are equal


def in_windows(
    stream: TaskStream, tokenizer: Tokenizer, steps: int, documents: int, seed: int
) -> tuple[TaskStream, Length]:
    """Returns the stream in windows of so many steps, and its lengths.

    They are those of whole documents, before any is cut; asking for one that cannot be read, in
    windows also for a draw of its window, raises ValueError naming the task. Where made
    documents are all of one length, their stream stays as it is; in a stage of a curriculum they
    are sorted by what they are without it, so that a window has the same draws in every stage.
    """
    of = _of_rows(stream.sources, counter(tokenizer)) if stream.sources else stream.size
    if of is None:
        return stream, lambda ordinal: 0

    def within(records: Records) -> Records:
        return windowed(records, lambda place: of(records.key(place)), steps, documents, seed)

    own, shorter = within(stream.records), stream.shorter
    stream = dataclasses.replace(
        stream, records=own, shorter=shorter and (lambda limit: within(shorter(limit)))
    )
    return stream, lambda ordinal: of(own.key(ordinal))


def _of_rows(sources: TaskSources, count: Callable[[str], int]) -> Callable[[tuple[str, int]], int]:
    @functools.cache
    def of_row(key: tuple[str, int]) -> int:
        source, number = key
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
    """Returns a document's estimated tokens: its characters, by the tokens of its first ones."""
    characters, head = 0, ""
    for piece in document.pieces():
        characters += len(piece)
        head += piece[: SAMPLE - len(head)]
    return round(characters * count(head) / len(head)) if head else 0


def permutation(lengths: Sequence[int], steps: int, seed: int, first: int) -> list[int]:
    """Returns which draw of a window stands at each of its places.

    `lengths` are those of its draws, a multiple of `steps`. The longest make one batch, the next
    longest another, and chance (of the seed and the window's first place) puts the batches in
    order: which step reads the longest must not follow from its number. Draws of one length keep
    their order, and so do those of one batch, whose minibatches would differ in length else.
    """
    by_length = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    batches = np.sort(by_length.reshape(steps, -1), axis=1)
    chance = np.random.default_rng([seed, zlib.crc32(b"rollout.window"), first])
    return batches[chance.permutation(steps)].ravel().tolist()


def windowed(
    records: Records, length: Callable[[int], int], steps: int, documents: int, seed: int
) -> Records:
    """Returns the records in windows of `steps` batches of `documents` draws.

    `length` is that of an ordinal's document, the same whenever it is asked for. Of one step these
    are the records themselves.
    """
    if steps == 1:
        return records
    size = steps * documents

    @functools.lru_cache(KEPT)
    def window(first: int) -> list[int]:
        return permutation([length(first + k) for k in range(size)], steps, seed, first)

    def order(place: int) -> int:
        within = place % size
        return place - within + window(place - within)[within]

    return records.reordered(order, [steps, documents])
