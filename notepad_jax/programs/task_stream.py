"""Where a training run draws its tasks: the files that are named, or the starter's generator.

Opening says in words what is left out of the files, and what is cut off their documents is
counted while they are read. Above: train; below: data.records and starter.synthetic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from notepad_jax.data import held_out, sources
from notepad_jax.data.records import Records, generated, of_files
from notepad_jax.data.rows import Pair
from notepad_jax.data.task_sources import LongQuestions, by_source, without_long_questions
from notepad_jax.programs import configuration
from notepad_jax.starter import vocabulary
from notepad_jax.starter.mixed import make_tasks
from notepad_jax.telemetry.progress import Screen
from notepad_jax.text.chunks import Documents
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Task

TRAINING_DOCUMENTS = range(2**30)  # document seeds; evaluation uses others


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """What a run draws from."""

    records: Records
    questions: int  # of every draw
    left_out: int  # tasks whose question is too long to be asked
    max_document: int | None  # tokens of a document; None: none is cut
    # Of the files, by source, and never drawn (`validation.split`).
    held_out: Mapping[str, Sequence[Pair]] = dataclasses.field(default_factory=dict)

    def documents(self, tokenizer: Tokenizer, chunk_size: int) -> Documents:
        """Returns what cuts documents into chunks, and counts what it cuts off."""
        return Documents(tokenizer, chunk_size, self.max_document)


def opened(config: ConfigDict, tokenizer: Tokenizer, screen: Screen) -> TaskStream:
    """Opens what the config names. Raises ValueError for files that cannot be drawn from."""
    if not config.tasks.files:
        # Generated documents are as long as `data.tokens` says, and never cut.
        make = functools.partial(_document, config.data.to_dict())
        make(TRAINING_DOCUMENTS.start)
        records = generated(make, config.seed, documents=TRAINING_DOCUMENTS)
        return TaskStream(records, config.data.questions, 0, None)
    weights, limit = _weights(config.tasks.weights), config.reading.max_question
    sources, long = without_long_questions(
        by_source(config.tasks.files, screen),
        lambda question: len(tokenizer.encode(question)), limit, weights, screen,
    )  # fmt: skip
    if long:
        screen.say(_left_out(long, limit))
    share = config.validation.split if config.get("validation") else 0.0
    sources, held = held_out.split(sources, share, weights) if share else (sources, {})
    return TaskStream(
        records=of_files(sources, config.seed, weights),
        questions=1,
        left_out=sum(source.count for source in long),
        max_document=config.tasks.max_tokens or None,
        held_out=held,
    )


def check_files(config: ConfigDict, tokenizer: Tokenizer) -> None:
    """Raises ValueError for files that are not there, before any weight is loaded.

    And where none is named and a policy lacks the words of the documents that are made instead.
    """
    if not config.tasks.files and not knows_starter(tokenizer):
        raise ValueError(
            f"tasks.files is empty, and the documents that are made instead are the starter's word "
            f"game, whose words {tokenizer.path} does not have; name task files, for example "
            f"{configuration.FLAG}tasks.files=questions.jsonl (data/README.md says what is in one)"
        )
    held = config.validation.files if config.get("validation") else ()
    for path in (*config.tasks.files, *held):
        if not sources.is_remote(path) and not Path(path).exists():
            raise ValueError(f"there is no task file {path}; mend tasks.files or validation.files")


def knows_starter(tokenizer: Tokenizer) -> bool:
    """Whether the words of the starter's documents are a token each, or nearly."""
    words = vocabulary.WORDS
    return len(tokenizer.encode(" ".join(words))) <= 1.1 * len(words)


def truncated(metrics: Mapping[str, float], step: int, limit: int) -> str:
    """Says in words what the first step that cut documents cut off."""
    return (
        f"in step {step:,}, {metrics['data/truncated_documents']:,} documents have more than "
        f"{limit:,} tokens (tasks.max_tokens) and lose their middle, "
        f"{metrics['data/truncated_tokens']:,} tokens; metrics.jsonl counts them from here on"
    )


def _left_out(long: Sequence[LongQuestions], limit: int) -> str:
    worst = max(long, key=lambda source: source.longest)
    count, total = (sum(getattr(source, n) for source in long) for n in ("count", "total"))
    names = ", ".join(source.source for source in long)
    return (
        f"{count:,} of {total:,} tasks of {names} have questions of more than {limit:,} tokens "
        f"(the longest, task {worst.longest_id!r}, {worst.longest:,}); they are left out: raise "
        f"reading.max_question to keep them"
    )


def _weights(words: Sequence[str]) -> dict[str, float]:
    weights = {}
    for word in words:
        name, _, weight = word.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ValueError(f"tasks.weights has {word!r}; write SOURCE=NUMBER") from None
    return weights


def _document(data: dict[str, Any], seed: int) -> tuple[Task, ...]:
    return make_tasks(seed, **data)
