"""NAME:notepad: a conversation as a document and a question, read by the memory agent.

The last part of the message is the question; the parts before it, texts and files, are the
document, in their order. Files are read from disk as the reading comes to them, so a document may
have any length. The agent is that of `ask`, evaluation and training; its answer is told token by
token, and ends where the request says. Above: `app` and `readings`; below: reading.memory_agent
and `choices`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import numpy as np

from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import Rules, State, TurnSampling
from notepad_jax.serve.asked import Chat
from notepad_jax.serve.choices import REASONS, Delta, choice, completed, told
from notepad_jax.serve.files import Files, in_thread
from notepad_jax.serve.messages import FilePart
from notepad_jax.serve.refusal import bad
from notepad_jax.serve.saying import Saying
from notepad_jax.serve.served import Served
from notepad_jax.serve.texts import FileText
from notepad_jax.text.chunks import ChunkedDocument, sentence_pieces
from notepad_jax.types import (
    NO_TOKENS,
    Completion,
    Prompt,
    SamplingParams,
    Streamer,
    Tokens,
    Turn,
    TurnKind,
)

FORM = (
    'send the document and the question as two parts of one message: "content": '
    '[{"type": "text", "text": DOCUMENT}, {"type": "text", "text": QUESTION}]'
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A document in parts; a file stands in lines of its own."""

    parts: tuple[str | FileText, ...]

    def pieces(self) -> Iterator[str]:
        """Yields the parts' text; Refusal if a file was deleted meanwhile."""
        beside_file = False
        for number, part in enumerate(self.parts):
            is_file = isinstance(part, FileText)
            if number and (is_file or beside_file):
                yield "\n"
            if is_file:
                yield from part.pieces()
            else:
                yield part
            beside_file = is_file


class ReadAhead(ChunkedDocument):
    """Chunks that threads read and tokenise before a turn wants them, one thread at a time.

    A disk or a bucket may be slow, and nobody else shall wait for it.
    """

    def __init__(self, served: Served, document: Parts, rules: Rules) -> None:
        pieces = sentence_pieces(served.tokenizer, rules.chunk_ends)
        super().__init__(served.tokenizer, document, rules.chunk_size, pieces=pieces)
        self._one = asyncio.Lock()

    async def reach(self, k: int) -> None:
        """Returns when a turn over chunk `k` has all it asks for: that, and the one behind it.

        Raises what reading them raises.
        """
        if self.total_chunks is None:
            async with self._one:
                await in_thread(self._touch, k)

    def _touch(self, k: int) -> None:
        with contextlib.suppress(IndexError):  # the document ends before
            self[k], self[k + 1]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a document, as all choices of a request share it."""

    tokens: Tokens
    chunks: ReadAhead
    rules: Rules
    sampling: TurnSampling  # its seed is each choice's
    # Of the answer alone:
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    top_logprobs: int = 0


def asked(served: Served, files: Files, request: Chat) -> Question:
    """Returns what a request asks; Refusal for what a reading has no way to do."""
    how = request.how
    if len(request.messages) != 1 or request.messages[0].role != "user":
        raise bad("messages", "a reading takes one message, of the user's; leave the others out")
    *document, question = request.messages[0].parts
    if isinstance(question, FilePart):
        raise bad(question.where, "the last part of the message must be the question, a text; "
                  "put the file before it")  # fmt: skip
    rules = lowered(served.rules, request.limits)
    ids = question_tokens(served, question, "messages", "ask a shorter one" if document else FORM)
    if (how.max_tokens or 0) > rules.longest_answer:
        raise bad(
            "max_tokens", f"max_tokens is {how.max_tokens} and an answer may have "
            f"{rules.longest_answer} tokens",
        )  # fmt: skip
    found = [
        files.document(part.id, part.where) if isinstance(part, FilePart) else part
        for part in document
    ]
    chunks = ReadAhead(served, Parts(tuple(found)), rules)
    rules = rules.within(how.max_tokens or rules.longest_answer)
    sampled = sampling(served, how.temperature, how.top_p)
    stops = served.stops(sampled.stop_ids, how.stop_token_ids)
    return Question(ids, chunks, rules, sampled, how.stop, stops, how.top_logprobs)


def question_tokens(served: Served, question: str, param: str, mend: str) -> Tokens:
    """Returns a question's ids; Refusal for an empty one, and with the mend for a long one."""
    ids, most = served.tokenizer.encode(question), served.rules.max_question
    if not len(ids):
        raise bad(param, "the question is empty; ask something")
    if len(ids) > most:
        raise bad(
            param, f"the question has {len(ids):,} tokens and may have {most:,}; {mend}",
            "context_length_exceeded",
        )  # fmt: skip
    return ids


def lowered(rules: Rules, limits: Mapping[str, int]) -> Rules:
    """Returns the rules with limits of a request's own; Refusal for those above the server's."""
    for name, value in limits.items():
        most = getattr(rules, name)
        if value > most:
            raise bad(f"notepad.{name}", f"notepad.{name} is {value} and may be {most} here")
    return dataclasses.replace(rules, **limits)


def sampling(served: Served, temperature: float | None, top_p: float | None) -> TurnSampling:
    """Returns how a reading is sampled where a request says so, or does not."""
    usual = served.sampling
    return dataclasses.replace(
        usual,
        temperature=usual.temperature if temperature is None else temperature,
        top_p=usual.top_p if top_p is None else top_p,
    )


class Watch:
    """Tells when a memory changed, and into what."""

    def __init__(
        self, served: Served, chunks: ReadAhead, before: Tokens = NO_TOKENS, seconds: float = 0.0
    ) -> None:
        """A reading that goes on had read for some seconds `before`."""
        self.chunks, self._decode, self._before = chunks, served.tokenizer.decode, before
        self._began = time.monotonic() - seconds

    def seconds(self) -> float:
        """Returns how long the reading has taken so far."""
        return round(time.monotonic() - self._began, 3)

    def change(self, turn: Turn, state: State) -> dict[str, Any] | None:
        """Returns what a turn made of the memory; None where it stayed what it was."""
        memory = state.memory_tokens
        if np.array_equal(memory, self._before):
            return None
        self._before = memory
        return {
            "chunk": turn.chunk, "of": self.chunks.total_chunks, "memory": self._decode(memory),
            "tokens": len(memory), "seconds": self.seconds(),
        }  # fmt: skip


@dataclasses.dataclass
class Counted:
    """Turns and tokens of a reading so far, those under way among them."""

    chunks: ReadAhead
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def turn(self, prompt: Prompt, made: int = 0) -> None:
        """Counts a turn, and the tokens that were made of it."""
        self.turns += 1
        self.prompt_tokens += len(prompt.tokens)
        self.completion_tokens += made

    def notes(self) -> dict[str, Any]:
        """Returns the usage."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "notepad": {"turns": self.turns, "document_tokens": self.chunks.tokens_read},
        }


class Aloud:
    """Completes the turns of an answer, and tells what becomes certain of it; a `Completer`.

    Its contexts are one text, which a stop string may end anywhere.
    """

    def __init__(
        self, streamer: Streamer, question: Question, saying: Saying, index: int,
        counted: Counted, tell: Callable[[Delta], None],
    ) -> None:  # fmt: skip
        self._streamer, self._question, self._saying = streamer, question, saying
        self._index, self._counted, self._tell = index, counted, tell

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Returns the completion of one context; one that a stop string cut ends there."""
        asked = self._question
        sampling = dataclasses.replace(
            sampling, stop_ids=asked.stop_ids, top_logprobs=asked.top_logprobs
        )
        self._counted.turn(prompt)
        course = choice(self._streamer, prompt, sampling, self._saying, self._index, more=True)
        return await completed(course, self._told)

    def _told(self, delta: Delta) -> None:
        self._counted.completion_tokens += len(delta.tokens)
        if delta.tokens:  # how it ends is told when all of it has ended
            notes = self._counted.notes()
            self._tell(dataclasses.replace(delta, finish=None, notes=notes))


def reading(
    streamer: Streamer, served: Served, question: Question, seed: int, index: int,
    watched: bool = False,
) -> AsyncGenerator[Delta]:  # fmt: skip
    """Yields the answer of one reading as it is made; tokens of all its turns are in `notes`.

    If it is watched, a change of its memory is a delta, too.
    """
    sampling = dataclasses.replace(question.sampling, seed=seed)
    counted = Counted(question.chunks)
    saying = Saying(served.tokenizer.decode, question.stop)

    async def read(tell: Callable[[Delta], None]) -> None:
        watch = Watch(served, question.chunks)
        aloud = Aloud(streamer, question, saying, index, counted, tell)
        state: State = memory_agent.start(question.tokens, question.chunks)
        await question.chunks.reach(state.next_chunk)
        course = memory_agent.read(
            streamer, served.template, question.rules, state, sampling, aloud
        )
        async for turn, state in course:
            made = turn.completion
            if turn.kind is TurnKind.UPDATE:
                counted.turn(turn.prompt, len(made.tokens))
                if watched and (change := watch.change(turn, state)):
                    memory = Delta(index, "", (), (), (), None, made.policy_version, memory=change)
                    tell(dataclasses.replace(memory, notes=counted.notes()))
            await question.chunks.reach(state.next_chunk)
        rest = saying.rest()
        finish = "stop" if saying.stopped else REASONS[made.finish]
        tell(Delta(index, rest, (), (), (), finish, made.policy_version, counted.notes()))

    return told(read)
