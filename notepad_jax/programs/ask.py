"""`notepad-jax ask`: one question about one file of any size.

The file is read as a stream, chunk by chunk, in constant memory; the note that the policy
keeps is shown whenever it changes. The memory agent and the engine are those of training.
Above: cli.
"""

from __future__ import annotations

import codecs
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ml_collections import ConfigDict

from notepad_jax.programs import parts, waiting
from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import TurnSampling
from notepad_jax.telemetry.progress import Screen
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.text.prompts import Template
from notepad_jax.types import MemoryState, PolicySnapshot, Turn, TurnKind

PIECE = 1 << 16  # bytes read at a time


class CannotRead(ValueError):
    """The document is missing, empty or not text."""


@dataclasses.dataclass
class FileDocument:
    """A text file, or standard input where `path` is None; decoded as it is read."""

    path: Path | None
    bytes_read: int = 0  # of the current pass

    @property
    def name(self) -> str:
        return "standard input" if self.path is None else str(self.path)

    def pieces(self) -> Iterator[str]:
        """Raises CannotRead for anything but UTF-8 text."""
        if self.path is None:
            yield from self._decoded(sys.stdin.buffer)
            return
        try:
            with self.path.open("rb") as file:
                yield from self._decoded(file)
        except OSError as error:
            raise CannotRead(f"cannot read {self.path}: {error.strerror}") from None

    def _decoded(self, file: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        self.bytes_read = 0
        while True:
            at, block = self.bytes_read, file.read(PIECE)
            if b"\0" in block:
                raise CannotRead(
                    f"{self.name} is a binary file (byte {at + block.index(0):,} is zero); "
                    f"convert it to text first"
                )
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise CannotRead(
                    f"{self.name} is not UTF-8 text (near byte {at + error.start:,}); "
                    f"convert it, for example with iconv"
                ) from None
            if text:
                yield text
            if not block:
                return
            self.bytes_read += len(block)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was answered, and how the memory came to hold it."""

    answer: str
    chunks: int
    tokens: int
    changes: tuple[tuple[int, str], ...]  # (chunk counted from 1, the memory after it)


def ask(
    config: ConfigDict,
    policy: parts.LoadedPolicy,
    document: FileDocument,
    question: str,
    screen: Screen,
) -> Answer:
    """Reads the document and answers. Raises ValueError for input that cannot be read."""
    rules = dataclasses.replace(parts.rules(config.reading), chunk_size=config.evaluate.chunk_size)
    template = parts.template(config.reading, policy)
    asked = memory_agent.encode_question(policy.tokenizer, question, rules.max_question)
    if not len(asked):
        raise ValueError("the question is empty; ask something, for example 'code of Ada ?'")
    chunks = ChunkedDocument(policy.tokenizer, document, rules.chunk_size)
    try:
        chunks[0]
    except IndexError:
        raise CannotRead(f"{document.name} is empty; there is nothing to read") from None

    size = document.path.stat().st_size if document.path is not None else None
    bar = screen.bar("reading", size, "bytes")
    seen = 0
    changes: list[tuple[int, str]] = []
    shown = policy.tokenizer.decode(template.no_memory)

    def on_turn(turn: Turn, state: MemoryState) -> None:
        nonlocal shown, seen
        if turn.kind is not TurnKind.UPDATE:
            return
        memory = policy.tokenizer.decode(template.shown_memory(state.memory_tokens))
        if memory != shown:
            shown = memory
            changes.append((turn.chunk + 1, memory))
            screen.say(f"chunk {turn.chunk + 1:,}: {memory}")
        bar.advance(document.bytes_read - seen, tokens=chunks.tokens_read, memory=shown)
        seen = document.bytes_read

    answer = waiting.run(_answer(config, policy, rules, template, asked, chunks, on_turn))
    bar.finish()
    return Answer(answer, chunks.total_chunks, chunks.tokens_read, tuple(changes))


async def _answer(
    config: ConfigDict,
    policy: parts.LoadedPolicy,
    rules: memory_agent.Rules,
    template: Template,
    question: memory_agent.Tokens,
    chunks: ChunkedDocument,
    on_turn: Callable[[Turn, MemoryState], None],
) -> str:
    e = config.evaluate
    sampling = TurnSampling(e.temperature, e.top_p, template.stop_ids, config.seed)
    service = parts.service(
        config.engine, policy, rules, template, PolicySnapshot(0, policy.params)
    )
    start = memory_agent.start(question, chunks)
    async with service:
        async for turn, state in memory_agent.read(service, template, rules, start, sampling):
            on_turn(turn, state)
    return policy.tokenizer.decode(memory_agent.written(turn.completion))
