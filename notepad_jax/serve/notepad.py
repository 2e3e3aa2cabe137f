"""NAME:notepad: a conversation as a document and a question, read by the memory agent.

The last part of the message is the question; the parts before it, texts and files, are the
document, in their order. Files are read from disk as the reading comes to them, so a document may
have any length. The agent is that of `ask`, evaluation and training. Above: `app` and `readings`;
below: reading.memory_agent.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import numpy as np

from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import Rules, State, TurnSampling
from notepad_jax.serve.asked import Chat
from notepad_jax.serve.choices import REASONS, Delta
from notepad_jax.serve.files import Files, FileText
from notepad_jax.serve.messages import FilePart
from notepad_jax.serve.refusal import bad
from notepad_jax.serve.served import Served
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.types import (
    NO_TOKENS,
    Chunks,
    Completer,
    Completion,
    Finish,
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


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a document, as all choices of a request share it."""

    tokens: Tokens
    chunks: Chunks  # empty: there is no document
    rules: Rules
    sampling: TurnSampling  # its seed is each choice's


def asked(served: Served, files: Files, request: Chat) -> Question:
    """Returns what a request asks; Refusal for what a reading has no way to do."""
    how = request.how
    for name in ("logprobs", "stop", "stop_token_ids"):
        if getattr(how, name):
            raise bad(name, f"a reading has no {name}; the model {served.name} has", "unsupported")
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
    chunks: Chunks = ()
    if document:
        found = [
            files.document(part.id, part.where) if isinstance(part, FilePart) else part
            for part in document
        ]
        chunks = ChunkedDocument(served.tokenizer, Parts(tuple(found)), rules.chunk_size)
    rules = rules.within(how.max_tokens or rules.longest_answer)
    return Question(ids, chunks, rules, sampling(served, how.temperature, how.top_p))


def question_tokens(served: Served, question: str, param: str, mend: str) -> Tokens:
    """Returns a question's ids; Refusal for an empty one, and with the mend for a long one."""
    ids, most = served.tokenizer.encode(question), served.rules.max_question
    if not len(ids):
        raise bad(param, "the question, the last part of the message, is empty")
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
        self, served: Served, chunks: Chunks, before: Tokens = NO_TOKENS, seconds: float = 0.0
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
            "chunk": turn.chunk, "of": total(self.chunks), "memory": self._decode(memory),
            "tokens": len(memory), "seconds": self.seconds(),
        }  # fmt: skip


def total(chunks: Chunks) -> int | None:
    """Returns how many chunks a document has; None while its end was not seen."""
    return chunks.total_chunks if isinstance(chunks, ChunkedDocument) else len(chunks)


async def reading(
    completer: Completer, served: Served, question: Question, seed: int, index: int,
    watched: bool = False,
) -> AsyncGenerator[Delta]:  # fmt: skip
    """Yields the answer of one reading, whole; tokens of all its turns are in `notes`.

    If it is watched, a change of its memory is a delta, too.
    """
    sampling = dataclasses.replace(question.sampling, seed=seed)
    state = memory_agent.start(question.tokens, question.chunks)
    said: list[Completion] = []  # of the answer, a context each
    prompt_tokens = completion_tokens = turns = 0
    watch = Watch(served, question.chunks)
    course = memory_agent.read(completer, served.template, question.rules, state, sampling)
    async for turn, state in course:
        turns += 1
        prompt_tokens += len(turn.prompt.tokens)
        completion_tokens += len(turn.completion.tokens)
        if turn.kind is TurnKind.ANSWER:
            said.append(turn.completion)
        elif watched and (change := watch.change(turn, state)):
            version = turn.completion.policy_version
            yield Delta(index, "", (), (), (), None, version, memory=change)
    completion, read = turn.completion, getattr(question.chunks, "tokens_read", 0)
    aborted = completion.finish is Finish.CANCELLED
    yield Delta(
        index,
        "" if aborted else served.tokenizer.decode(memory_agent.answered(state)),
        tuple(token for one in said for token in one.tokens.tolist()),
        tuple(float(logprob) for one in said for logprob in one.behaviour_logprobs),
        (),
        REASONS[completion.finish],
        completion.policy_version,
        {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "notepad": {"turns": turns, "document_tokens": read},
        },
    )
