"""The dataset of a training run: the task files that are named, or the starter's generator.

Opening says in words what is left out of the files, and what is cut off their documents is
counted while they are read. In a stage of a curriculum the stream has the same questions at the
same ordinals, of shorter documents. Above: train; below: curriculum, data.records and
starter.synthetic.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.data import held_out, sources
from notepad_jax.data.admission import RowCounts
from notepad_jax.data.records import Records, generated, of_files
from notepad_jax.data.rows import Pair
from notepad_jax.data.task_sources import (
    LongQuestions,
    TaskSources,
    by_source,
    shares,
    without_long_questions,
)
from notepad_jax.setup import configuration, curriculum
from notepad_jax.setup.config.whole import Training
from notepad_jax.setup.curriculum import Curriculum
from notepad_jax.starter import vocabulary
from notepad_jax.starter.mixed import make_tasks
from notepad_jax.starter.synthetic import SENTENCE
from notepad_jax.tasks import haystack, stories
from notepad_jax.telemetry.identity import read_json, write_json
from notepad_jax.telemetry.screen import Screen
from notepad_jax.text.chunks import Documents
from notepad_jax.text.tokenizer import Tokenizer, counter

TRAINING_DOCUMENTS = range(2**30)  # document seeds; evaluation uses others
SENTENCES = 15 / 16  # of a chunk that ends where a sentence does, the share that is filled
ROWS = "rows.json"  # in a run's folder: what of its files is drawn, and what is not and why
EMPTY: Mapping[str, Any] = types.MappingProxyType({})
IDLE = {  # keys of `tasks` that cannot act on documents that are made, and why
    "weights": "tasks.files is empty",
    "max_tokens": "tasks.files is empty",
    "balanced": "documents that are made have questions of several kinds",
    "retire_at": "documents that are made are never drawn twice",
}
MOST_CHUNKS = "data/max_chunks"  # a metric: of the documents of a step, where there is a curriculum


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """The dataset that a run draws from: its records, and what is cut or left out."""

    records: Records
    questions: int  # of every draw
    left_out: int  # tasks whose question is too long to be asked
    max_document: int | None  # tokens of a document; None: none is cut
    # Of the files, by source, and never drawn (`validation.split`).
    held_out: Mapping[str, Sequence[Pair]] = dataclasses.field(default_factory=dict)
    sources: TaskSources | None = None  # of the files; None: documents are made
    # What became of the rows of the files, as the run keeps it (`keep`); {}: documents are made.
    admitted: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curriculum: Curriculum = Curriculum()
    # Where documents are made: the same stream with documents of at most so many tokens.
    shorter: Callable[[int], Records] | None = None
    size: Callable[[int], int] | None = None  # tokens, by document seed; None: all are alike
    chunks: int = 0  # of a document at most, in a stage; 0: no limit
    balanced: tuple[str, ...] = ()  # sources of which a batch has equal numbers; (): of none

    def stage(self, chunks: int, chunk_size: int) -> TaskStream:
        """Returns the stream with documents of at most `chunks` chunks; 0: as they are.

        What is made is made so long; what is out of files is cut, as by `tasks.max_tokens`.
        """
        if not chunks:
            return self
        limit = chunks * chunk_size
        if self.shorter:
            return dataclasses.replace(self, chunks=chunks, records=self.shorter(limit))
        most = min(limit, self.max_document or limit)
        return dataclasses.replace(self, chunks=chunks, max_document=most)

    def documents(self, tokenizer: Tokenizer, chunk_size: int, chunk_ends: str) -> Documents:
        """Returns what cuts documents into chunks, and counts what it cuts off."""
        return Documents(tokenizer, chunk_size, self.max_document, chunk_ends)


def opened(
    config: Training, tokenizer: Tokenizer, screen: Screen, before: Mapping[str, Any] = EMPTY
) -> TaskStream:
    """Opens the config's dataset. Raises ValueError for files that cannot be drawn from.

    `before` is what a run that goes on has kept of its files: rows that were left out when it
    began stay so, also where they were mended since, for every ordinal has its row.
    """
    stages = curriculum.parsed(config.tasks.curriculum)
    if config.tasks.min_tokens and not config.tasks.stories:
        screen.say("tasks.min_tokens cannot act: tasks.stories is empty")
    if late := [begin for begin, _ in stages.stages if begin >= config.steps]:
        screen.say(
            f"{curriculum.KEY} has a stage from step {late[0]:,} on, which cannot act: the run "
            f"ends with step {config.steps:,} (steps)"
        )
    if not config.tasks.files:
        _say_idle(config, stages, screen)
        return _told(config, tokenizer, stages) if config.tasks.stories else _made(config, stages)
    weights, limit = _weights(config.tasks.weights), config.reading.max_question
    admission = RowCounts()
    found = by_source(
        config.tasks.files, screen, admission.leave_out, _out(config.tasks.files, before)
    )
    rows = sum(map(len, found.tasks.values()))
    sources, long = without_long_questions(
        found, lambda question: len(tokenizer.encode(question)), limit, weights, screen
    )
    share = config.validation.split if config.validation else 0.0
    held: Mapping[str, Sequence[Pair]] = {}
    if share:
        sources, held = held_out.split(sources, share, weights, screen, config.validation.split_by)
    for line in admission.lines(rows):
        screen.warn(line)
    if long:
        screen.say(_left_out(long, limit))
    balanced = _balanced(config, shares(sources.tasks, weights), screen)
    if admission.count or long or held:
        screen.say(_admitted(rows + admission.count, sources, weights))
    return TaskStream(
        records=of_files(sources, config.seed, weights),
        questions=1,
        left_out=sum(source.count for source in long),
        max_document=config.tasks.max_tokens or None,
        held_out=held,
        sources=sources,
        admitted=_kept(sources, admission, config.tasks.files, before),
        curriculum=stages,
        balanced=balanced,
    )


def _balanced(config: Training, drawn: Mapping[str, float], screen: Screen) -> tuple[str, ...]:
    """Returns the sources of which a batch has equal numbers, if it does."""
    if not config.tasks.balanced:
        return ()
    if len(set(drawn.values())) > 1:
        said = ", ".join(f"{name}={weight:g}" for name, weight in drawn.items())
        raise ValueError(
            f"tasks.balanced wants equal numbers of each source and tasks.weights says {said}; "
            f"use one of them"
        )
    if len(drawn) == 1:
        screen.say(f"tasks.balanced cannot act: there is one source, {next(iter(drawn))}")
        return ()
    return tuple(drawn)


def _say_idle(config: Training, stages: Curriculum, screen: Screen) -> None:
    """Says which settings cannot act on documents that are made."""
    tokens, most = stages.longest * config.reading.chunk_size, config.data.tokens
    for key, why in IDLE.items():
        if getattr(config.tasks, key):
            screen.say(f"tasks.{key} cannot act: {why}")
    if tokens > most:
        screen.say(
            f"{curriculum.KEY} goes to {stages.longest:,} chunks, {tokens:,} tokens, and cannot "
            f"act beyond data.tokens, which is {most:,}"
        )


def _made(config: Training, stages: Curriculum) -> TaskStream:
    """Generated documents are as long as `data.tokens` and the stage say, and never cut."""
    data, size = dict(vars(config.data)), config.reading.chunk_size
    most, room = data["tokens"], 2 * data["questions"] * SENTENCE  # two facts a question
    if stages.shortest and min(most, stages.shortest * size) < min(most, room):
        raise ValueError(
            f"{curriculum.KEY} has a stage of {stages.shortest} chunks, {stages.shortest * size} "
            f"tokens, and the facts of {data['questions']} questions may need {room}; make it "
            f"longer, or ask fewer (data.questions)"
        )

    def of(limit: int) -> Records:
        make = functools.partial(make_tasks, **{**data, "tokens": min(most, limit)})
        return generated(make, config.seed, documents=TRAINING_DOCUMENTS)

    make_tasks(TRAINING_DOCUMENTS.start, **data)  # refuses what cannot be made
    return TaskStream(of(most), data["questions"], 0, None, curriculum=stages, shorter=of)


def _told(config: Training, tokenizer: Tokenizer, stages: Curriculum) -> TaskStream:
    """Stories of `tasks.stories` in documents of `data.tokens`, `data.questions` of each."""
    kinds, questions = tuple(config.tasks.stories), config.data.questions
    stories.check(kinds)
    tell = functools.partial(
        stories.draw_tasks, kinds=kinds, questions=questions, haystack=haystack.stdlib_prose(),
        count=counter(tokenizer),
    )  # fmt: skip
    full = SENTENCES if config.reading.chunk_ends == "sentence" else 1.0
    least, most = config.tasks.min_tokens, config.data.tokens

    def of(length: int) -> Records:
        make = functools.partial(tell, lengths=range(min(least or length, length), length + 1))
        return generated(make, config.seed, documents=TRAINING_DOCUMENTS)

    def shorter(limit: int) -> Records:
        return of(min(most, int(full * limit)))

    shorter(stages.shortest * config.reading.chunk_size or 2 * most).at(0)  # refused now, if ever
    size = (lambda seed: stories.drawn_length(seed, least, most)) if least else None
    return TaskStream(of(most), questions, 0, None, curriculum=stages, shorter=shorter, size=size)


def check_files(config: Training, tokenizer: Tokenizer) -> None:
    """Raises ValueError for files that are not there, before any weight is loaded.

    And where none is named and a policy lacks the words of the documents that are made instead.
    """
    _weights(config.tasks.weights)
    if not (config.tasks.files or config.tasks.stories) and not knows_starter(tokenizer):
        raise ValueError(
            f"tasks.files is empty, and the documents that are made instead are the starter's word "
            f"game, whose words {tokenizer.path} does not have; name task files, for example "
            f"{configuration.FLAG}tasks.files=questions.jsonl (data/README.md says what is in one)"
        )
    held = config.validation.files if config.validation else ()
    for path in (*config.tasks.files, *held):
        if not sources.is_remote(path) and not Path(path).exists():
            raise ValueError(f"there is no task file {path}; mend tasks.files or validation.files")


def knows_starter(tokenizer: Tokenizer) -> bool:
    """Whether the words of the starter's documents are a token each, or nearly."""
    words = vocabulary.WORDS
    return len(tokenizer.encode(" ".join(words))) <= 1.1 * len(words)


def truncated(metrics: Mapping[str, float], step: int, config: Training) -> str:
    """Says in words what the first step that cut documents cut off."""
    limit, key = config.tasks.max_tokens, "tasks.max_tokens"
    stage = int(metrics.get(MOST_CHUNKS, 0)) * config.reading.chunk_size
    if stage and not 0 < limit <= stage:
        limit, key = stage, curriculum.KEY
    return (
        f"in step {step:,}, {metrics['data/truncated_documents']:,} documents have more than "
        f"{limit:,} tokens ({key}) and lose their middle, "
        f"{metrics['data/truncated_tokens']:,} tokens; metrics.jsonl counts them from here on"
    )


def not_retired(kept: Collection[tuple[str, int]]) -> str:
    """Says in words that more than half of a source would be retired."""
    names = ", ".join(sorted({source for source, _ in kept}))
    return (
        f"{len(kept):,} more tasks of {names} are answered well enough to be retired "
        f"(tasks.retire_at), but half of what is there is retired already: they are drawn on; "
        f"train on harder tasks, or on more of them"
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


def _out(paths: Sequence[str], before: Mapping[str, Any]) -> list[list[int]]:
    """Returns the places of the rows of each file that were left out before, wherever it lies."""
    then = before.get("files", ())
    by_path = {file["path"]: file for file in then}
    by_name = {Path(file["path"]).name: file for file in then}
    files = [by_path.get(str(path)) or by_name.get(Path(path).name) for path in paths]
    return [[row - 1 for row in file["left_out"]] if file else [] for file in files]


def _kept(
    found: TaskSources, admission: RowCounts, paths: Sequence[str], before: Mapping[str, Any]
) -> dict[str, Any]:
    files = {file.path: file for own in found.files.values() for file in own}

    def told(path: str) -> dict[str, Any]:
        out = [place + 1 for place in files[path].left_out]
        return dict(path=path, digest=files[path].digest, rows=files[path].rows, left_out=out)

    return {
        "files": [told(str(path)) for path in paths],
        "left_out": [dataclasses.asdict(one) for one in admission.left_out],
        "long_questions": dict(found.left_out),
        "held_out": dict(found.held_out),
        "withheld": dict(found.withheld),
        "mended": list(before.get("mended", ())),
    }


def before(folder: Path) -> dict[str, Any]:
    """Returns what a run has kept of its files; {} where it has not, or an older version had it."""
    path = folder / ROWS
    return read_json(path, "remove it: no row was left out, or begin anew") if path.exists() else {}


def keep(
    folder: Path, stream: TaskStream, before: Mapping[str, Any], step: int, screen: Screen
) -> None:
    """Writes down, beside a run's config, what became of the rows of its files.

    Where they are no longer the bytes of `before`, they were mended, and the step tells when.
    """
    told = dict(stream.admitted)
    if not told or told == before:
        return
    digests = {file["digest"] for file in before.get("files", ())}
    new = [file["path"] for file in told["files"] if file["digest"] not in digests]
    if before and new:
        told["mended"] = [*told["mended"], {"step": step, "files": new}]
        screen.say(f"from step {step + 1:,} on, rows of {', '.join(new)} are read as they are now")
    write_json(folder / ROWS, told)


def _admitted(rows: int, found: TaskSources, weights: Mapping[str, float]) -> str:
    """Says in words what became of all rows of the files."""
    names = list(shares(found.tasks, weights))
    drawn = sum(len(found.tasks[name]) for name in names)
    held, withheld = (sum(of.values()) for of in (found.held_out, found.withheld))
    asleep = sum(len(tasks) for name, tasks in found.tasks.items() if name not in names)
    left = rows - drawn - held - withheld - asleep
    parts = [f"{drawn:,} to draw from", *([f"{held:,} held out"] if found.held_out else [])]
    if found.shared:
        parts[-1] += f" ({found.shared:,} of them about documents that are drawn, too)"
    if without := [name for name in names if found.held_out and name not in found.held_out]:
        parts[-1] += f" (none of {', '.join(without)})"
    parts += [f"{withheld:,} withheld, which ask what is held out"] if withheld else []
    parts += [f"{asleep:,} of weight 0"] if asleep else []
    return f"tasks.files: {rows:,} rows, {', '.join(parts)}, {left:,} left out"


def _weights(words: Sequence[str]) -> dict[str, float]:
    weights = {}
    for word in words:
        name, _, weight = word.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ValueError(f"tasks.weights has {word!r}; write SOURCE=NUMBER") from None
    return weights
